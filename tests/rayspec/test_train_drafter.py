import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from answerers import answer_in_process
from torch import Tensor
from torch.nn import functional as F

from rayspec.training import ttt
from rayspec.training.acceptance import measure
from rayspec.training.data.answers import AnswersConfig, AnswerSet, read_answers
from rayspec.training.drafter import batch_indices, provenance_of, train_drafter, train_step
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig
from rayspec.training.drafter_runs import is_exported
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.origin import new_drafter
from rayspec.training.recipe import Recipe
from rayspec.training.ttt import backward_batch, roll_out
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.drafters.eagle3.config import Eagle3Options
from sglang_ext.drafters.eagle3.training import config_for, unroll
from sglang_ext.drafters.layers import rotate
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import head_from_target, parse_head
from sglang_ext.heads.losses import soft_cross_entropy

FULL = DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))
SLIM = DrafterEntry(name="slim", draft_head=parse_head({"kind": "slimspec", "rank": 8}))
# the other kinds on the tiny target's 257 tokens; options that have a default are left out
KINDS: dict[str, dict[str, Any]] = {
    "truncated": {"kind": "truncated", "size": 129},
    "specvocab": {"kind": "specvocab", "rank": 4, "size": 20},
    "dynaspec": {"kind": "dynaspec", "clusters": 8, "first": 3, "later": 1, "router_width": 12},
    "dynaspec_union": {"kind": "dynaspec", "clusters": 8, "first": 3, "later": 1, "router_width": 12, "union": True},
    "coral": {"kind": "coral", "clusters": 8, "top": 3},
    "rdk": {"kind": "rdk", "base": {"kind": "truncated", "size": 129}},
    "rdk_dynaspec": {
        "kind": "rdk", "base": {"kind": "dynaspec", "clusters": 8, "first": 3, "later": 1, "router_width": 12}
    },
}  # fmt: skip
ROUTERS = {
    "dynaspec": ("router_in", "router_in_bias", "router_out", "router_out_bias"),
    "coral": ("router",),
    "specvocab": ("down", "up"),
}
SIZES = torch.tensor([1, 8, 8, 16, 16, 32, 48, 64, 64])  # of the clusters, so that there is something to learn
ARTIFACTS = {"ids": torch.arange(0, 257, 2), "cluster_of": torch.arange(9).repeat_interleave(SIZES)}
RECIPE = Recipe(num_steps=6, batch_size=4, warmup_steps=2, ttt_steps=3, bfloat16=False, chunk_rows=16)


@pytest.fixture(scope="session")
def answers(tiny_target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> AnswerSet:
    folder = tmp_path_factory.mktemp("data") / "answers"
    config = AnswersConfig(
        count=10, min_prompt_tokens=8, max_prompt_tokens=20, answer_tokens=14, batch_size=10, greedy_share=0.5
    )
    generator = torch.Generator().manual_seed(1)
    answer_in_process(
        folder, tiny_target, config, [torch.randint(1, 257, (8 + n,), generator=generator).tolist() for n in range(10)]
    )
    return read_answers(folder)


def random_drafter(target: FrozenTarget, head: DrafterEntry = FULL, seed: int = 0) -> Eagle3Drafter:
    """Every weight random and large, so that nothing under test can hide behind a small one."""
    lm_head = head_from_target(head.draft_head, target.head_VG, ARTIFACTS)
    drafter = Eagle3Drafter(config_for(target, Eagle3Options()), lm_head)
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return drafter


def run_config(folder: Path, **changes: object) -> DrafterTrainConfig:
    base = DrafterTrainConfig(
        target=str(folder / "tiny"),
        output_dir=str(folder / "out"),
        work_dir=str(folder / "work"),
        drafters=[FULL, SLIM],
        recipe=RECIPE,
        evaluation=EvaluationConfig(draft_steps=3, every=4, sequences=2),
        checkpoint_every=2,
        log_every=2,
        mlflow=False,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class LiteralStep(NamedTuple):
    """What one draft step gives the head, and what it put into the layer."""

    hidden_H: Tensor
    embed_H: Tensor
    feature_H: Tensor

    def target_logits(self, drafter: Eagle3Drafter, step: int) -> Tensor:
        head = drafter.lm_head
        return head.target_logits(
            self.hidden_H[None], step, head.route(self.embed_H[None], self.feature_H[None], step)
        )[0]


def literal_draft(
    drafter: Eagle3Drafter, target: FrozenTarget, ids_T: Tensor, taps_TG: Tensor, slot: int, num_steps: int
) -> list[LiteralStep]:
    """Draft from `slot` one token at a time, as a server does: a growing KV cache, one new slot per step."""
    c, layer = drafter.config, drafter.midlayer
    keys: list[Tensor] = []
    values: list[Tensor] = []
    steps = []
    feature_H = torch.empty(0)
    for position in range(slot + num_steps):
        # true features up to the slot, the drafter's own output after it
        feature_H = drafter.fuse(taps_TG[position]) if position <= slot else feature_H
        embed_H = target.embed(ids_T[position + 1])
        x = torch.cat([layer.input_layernorm(embed_H), layer.hidden_norm(feature_H)], dim=-1)
        where = torch.tensor([[position]])
        q_AD = rotate(layer.self_attn.q_proj(x).view(1, 1, -1, c.head_dim), where, c.rope)[0, 0]
        keys.append(rotate(layer.self_attn.k_proj(x).view(1, 1, -1, c.head_dim), where, c.rope)[0, 0])
        values.append(layer.self_attn.v_proj(x).view(-1, c.head_dim))
        heads = []
        for a in range(c.num_attention_heads):
            k = a // (c.num_attention_heads // c.num_key_value_heads)
            scores = torch.stack([q_AD[a] @ key[k] for key in keys]) / c.head_dim**0.5
            heads.append(scores.softmax(0) @ torch.stack([value[k] for value in values]))
        x_H = feature_H + layer.self_attn.o_proj(torch.cat(heads))
        out_H = x_H + layer.mlp(layer.post_attention_layernorm(x_H))
        if position >= slot:
            steps.append(LiteralStep(drafter.norm(out_H), embed_H, feature_H))
        feature_H = out_H
    return steps


@torch.no_grad()
@pytest.mark.parametrize("slot", [0, 1, 7, 13], ids=["first", "second", "middle", "last_with_all_steps"])
def test_training_time_test_is_literal_drafting(tiny_target: FrozenTarget, slot: int) -> None:
    drafter = random_drafter(tiny_target)
    ids_BT = torch.randint(1, 257, (2, 18), generator=torch.Generator().manual_seed(2))
    taps, _ = tiny_target.features(ids_BT)
    hiddens = unroll(drafter, tiny_target, ids_BT, taps, num_steps=4).hiddens
    for b in range(2):
        literal = literal_draft(drafter, tiny_target, ids_BT[b], taps[b], slot, 4)
        for i in range(4):
            # float32 rounding of sums in another order; values are of order 1
            torch.testing.assert_close(hiddens[i][b, slot], literal[i].hidden_H, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_a_row_holds_what_literal_drafting_gives_the_head(tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    drafter = random_drafter(tiny_target, DrafterEntry(name="dynaspec", draft_head=parse_head(KINDS["dynaspec"])))
    batch = Batch.of(answers, torch.tensor([3, 0]))
    taps, _ = tiny_target.features(batch.ids_BT)
    rows = roll_out(drafter, tiny_target, batch, 3)
    assert rows.feature_KNH is not None
    for n in (0, 5, len(batch.position_N) - 1):
        b, p = int(batch.sequence_N[n]), int(batch.position_N[n])
        for i in range(3):  # step i of the draft that reaches position p
            literal = literal_draft(drafter, tiny_target, batch.ids_BT[b], taps[b], p - 1 - i, i + 1)[i]
            torch.testing.assert_close(rows.hidden_KNH[i, n], literal.hidden_H, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(rows.feature_KNH[i, n], literal.feature_H, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(rows.embed_KNH[i, n], literal.embed_H)


def test_taps_are_the_inputs_of_their_layers(tiny_target: FrozenTarget) -> None:
    seen: dict[int, Tensor] = {}
    layers = tiny_target.model.model.layers
    hooks = [
        layers[i].register_forward_pre_hook(
            lambda module, args, kwargs, i=i: seen.__setitem__(i, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for i in tiny_target.taps
    ]
    ids = torch.arange(1, 9)[None]
    taps, last_hidden = tiny_target.features(ids)
    for hook in hooks:
        hook.remove()
    assert torch.equal(taps, torch.cat([seen[i] for i in (2, 4, 5)], dim=-1))
    logits = tiny_target.model(ids).logits[0]
    # the same product in another order of rows
    torch.testing.assert_close(tiny_target.distribution(last_hidden[0], torch.float32), logits.softmax(-1))


def test_rows_are_the_positions_before_answer_tokens(answers: AnswerSet) -> None:
    batch = Batch.of(answers, torch.tensor([3, 0]))
    for b, n in enumerate((3, 0)):
        own = batch.position_N[batch.sequence_N == b].tolist()
        assert own == list(range(int(answers.prompt_length_N[n]) - 1, int(answers.length_N[n]) - 1))
    assert torch.equal(batch.next_ids_N, batch.ids_BT[batch.sequence_N, batch.position_N + 1])


def naive_loss(drafter: Eagle3Drafter, target: FrozenTarget, batch: Batch, num_steps: int, decay: float) -> Tensor:
    """The paper's form: all logits at once, ids, target distribution and mask shifted left by one per step."""
    taps, last_hidden = target.features(batch.ids_BT)
    p_BTV = target.distribution(last_hidden, torch.float32)
    mask_BT = torch.zeros(batch.ids_BT.shape, dtype=torch.bool)
    mask_BT[batch.sequence_N, batch.position_N] = True
    total = torch.zeros(())
    for i, hidden in enumerate(unroll(drafter, target, batch.ids_BT, taps, num_steps).hiddens):
        T = batch.ids_BT.shape[1] - 1 - i
        log_q = drafter.lm_head.candidates(hidden[:, :T].flatten(0, 1), i).logits_TS.log_softmax(-1)
        ce = -(p_BTV[:, 1 + i :].flatten(0, 1) * log_q).sum(-1)
        mask = mask_BT[:, 1 + i :].flatten()
        total = total + decay**i * ce[mask].sum() / mask.sum()
    return total


@pytest.mark.parametrize("head", [FULL, SLIM], ids=lambda head: head.name)
@pytest.mark.parametrize("chunk_rows", [7, 1000], ids=["ragged_chunks", "one_chunk"])
def test_chunked_gradients_equal_the_naive_loss(
    tiny_target: FrozenTarget, answers: AnswerSet, head: DrafterEntry, chunk_rows: int
) -> None:
    batch = Batch.of(answers, torch.tensor([0, 4, 9]))
    naive, chunked = random_drafter(tiny_target, head), random_drafter(tiny_target, head)
    loss = naive_loss(naive, tiny_target, batch, 3, 0.8)
    loss.backward()
    loss_K = backward_batch(chunked, tiny_target, batch, num_steps=3, decay=0.8, chunk_rows=chunk_rows).head_K
    torch.testing.assert_close((loss_K * torch.tensor([1, 0.8, 0.64])).sum(), loss.detach(), rtol=1e-5, atol=1e-5)
    expected = dict(naive.named_parameters())
    for name, parameter in chunked.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_mean_over_draft_steps_is_their_sum_by_the_sum_of_weights(
    tiny_target: FrozenTarget, answers: AnswerSet
) -> None:
    batch, settings = Batch.of(answers, torch.tensor([0, 4])), {"num_steps": 3, "decay": 0.8, "chunk_rows": 7}
    summed, mean = random_drafter(tiny_target, FULL), random_drafter(tiny_target, FULL)
    of_sum = backward_batch(summed, tiny_target, batch, **settings)
    of_mean = backward_batch(mean, tiny_target, batch, **settings, reduction="mean")
    torch.testing.assert_close(of_mean.head_K, of_sum.head_K)  # what is logged is of each step, without its weight
    expected = dict(summed.named_parameters())
    for name, parameter in mean.named_parameters():
        want = expected[name].grad / (1 + 0.8 + 0.64)
        torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_rows", [7, 1000], ids=["ragged_chunks", "one_chunk"])
def test_chunked_gradients_equal_one_backward_of_the_heads_loss(
    tiny_target: FrozenTarget, answers: AnswerSet, kind: str, chunk_rows: int
) -> None:
    head, batch = DrafterEntry(name=kind, draft_head=parse_head(KINDS[kind])), Batch.of(answers, torch.tensor([0, 4]))
    whole, chunked = random_drafter(tiny_target, head), random_drafter(tiny_target, head)
    rows = roll_out(whole, tiny_target, batch, 3)
    p_NV = tiny_target.distribution(rows.last_hidden_NG, torch.float32)
    losses = [whole.lm_head.loss(rows.hidden_KNH[i], i, rows.route(whole.lm_head, i), p_NV).mean() for i in range(3)]
    sum(0.8**i * loss for i, loss in enumerate(losses)).backward()
    loss_K = backward_batch(chunked, tiny_target, batch, num_steps=3, decay=0.8, chunk_rows=chunk_rows).head_K
    torch.testing.assert_close(loss_K, torch.stack(losses).detach(), rtol=1e-5, atol=1e-5)
    expected = dict(whole.named_parameters())
    for name, parameter in chunked.named_parameters():
        want = expected[name].grad
        if want is None:  # a router's loss does not reach the body
            assert parameter.grad is None or not bool(parameter.grad.any()), name
        else:
            torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "head", [FULL, DrafterEntry(name="coral", draft_head=parse_head(KINDS["coral"]))], ids=lambda head: head.name
)
def test_csra_adds_its_share_to_the_bodys_gradient(
    tiny_target: FrozenTarget, answers: AnswerSet, head: DrafterEntry
) -> None:
    batch, settings = Batch.of(answers, torch.tensor([0, 4])), {"num_steps": 3, "decay": 0.8, "chunk_rows": 7}
    without, added, alone = (random_drafter(tiny_target, head) for _ in range(3))
    backward_batch(without, tiny_target, batch, **settings)
    loss = backward_batch(added, tiny_target, batch, **settings, csra_weight=0.5, csra_temperature=0.2)
    hidden_KNH = roll_out(alone, tiny_target, batch, 3).hidden_KNH
    unit_KNH = F.normalize(hidden_KNH, dim=-1)
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    # all pairs of steps at once: position n is to recognise itself
    log_q = torch.stack([(unit_KNH[i] @ unit_KNH[j].T / 0.2).log_softmax(-1).diagonal() for i, j in pairs])
    expected = -log_q.mean()
    expected.backward()
    assert loss.csra is not None
    torch.testing.assert_close(loss.csra, expected.detach())
    for (name, got), before, pull in zip(
        added.named_parameters(), without.parameters(), alone.parameters(), strict=True
    ):
        if pull.grad is None:
            assert name.startswith("lm_head."), name
            torch.testing.assert_close(got.grad, before.grad, msg=name)
        else:
            assert bool(pull.grad.any()), name
            torch.testing.assert_close(got.grad, before.grad + 0.5 * pull.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_csra_pulls_the_steps_of_a_drafter_together(
    tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path
) -> None:
    recipe = replace(RECIPE, num_steps=20, batch_size=10, csra_weight=1.0)
    config = run_config(tmp_path, recipe=recipe, log_every=1)
    train_drafter(config, FULL, tiny_target, answers, answers)
    report = json.loads((tmp_path / "out" / "full" / "training.json").read_text())
    assert report["history"][-1]["loss_csra"] < report["history"][0]["loss_csra"] - 0.1
    assert report["recipe"]["csra_temperature"] == 0.07


def test_a_drafter_from_before_csra_is_still_recognised(
    tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path
) -> None:
    config = run_config(tmp_path)
    recipe = provenance_of(config, tiny_target.sha256, answers)["recipe"]
    assert not [key for key in recipe if key.startswith("csra")]
    save_drafter(
        Path(config.output_dir) / "full",
        random_drafter(tiny_target),
        tiny_target.info("tiny"),
        provenance_of(config, tiny_target.sha256, answers),
    )
    assert is_exported(config, FULL, tiny_target.sha256)
    with pytest.raises(ValueError, match="holds a drafter with recipe"):
        is_exported(replace(config, recipe=replace(RECIPE, csra_weight=0.1)), FULL, tiny_target.sha256)


def test_csra_on_a_frozen_body_is_refused(tmp_path: Path) -> None:
    heads = [FULL, DrafterEntry(name="coral", draft_head=parse_head(KINDS["coral"]), base="full")]
    run_config(tmp_path, drafters=heads)
    with pytest.raises(
        ValueError, match=r"recipe\.csra_weight=0\.1 trains the drafter's body, but drafters\[coral\]\.base takes over"
    ):
        run_config(tmp_path, drafters=heads, recipe=replace(RECIPE, csra_weight=0.1))


def test_csra_needs_two_steps_to_align() -> None:
    with pytest.raises(ValueError, match=r"recipe\.ttt_steps must be at least 2, got 1"):
        replace(RECIPE, csra_weight=0.1, ttt_steps=1)


def test_a_truncated_head_trains_on_its_own_targets(tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    drafter = random_drafter(tiny_target, DrafterEntry(name="even", draft_head=parse_head(KINDS["truncated"])))
    batch = Batch.of(answers, torch.tensor([0, 1]))
    loss_K = backward_batch(drafter, tiny_target, batch, num_steps=2, decay=1.0, chunk_rows=10).head_K
    rows = roll_out(drafter, tiny_target, batch, 2)
    p_NV = tiny_target.distribution(rows.last_hidden_NG, torch.float32)
    p_NS, counts_N = p_NV[:, ::2] / p_NV[:, ::2].sum(-1, keepdim=True), p_NV.argmax(-1) % 2 == 0
    assert 0 < int(counts_N.sum()) < len(counts_N)
    for i in range(2):
        ce_N = -(p_NS * (rows.hidden_KNH[i] @ drafter.lm_head.weight.T).log_softmax(-1)).sum(-1)
        torch.testing.assert_close(loss_K[i], ((ce_N * counts_N).sum() / len(counts_N)).detach())


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_router_trains_on_a_frozen_body(
    full_drafter: Eagle3Drafter, tiny_target: FrozenTarget, answers: AnswerSet, kind: str
) -> None:
    drafter = with_head(full_drafter, tiny_target, kind)
    drafter.requires_grad_(False)
    router = [
        parameter.requires_grad_() for name, parameter in drafter.lm_head.named_parameters() if name in ROUTERS[kind]
    ]
    assert len(router) == len(ROUTERS[kind])
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    batch = Batch.of(answers, torch.arange(6))
    optimizer = torch.optim.Adam(router, lr=0.02)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss_K = backward_batch(drafter, tiny_target, batch, num_steps=2, decay=0.8, chunk_rows=50).head_K
        assert all((parameter.grad is not None) == parameter.requires_grad for parameter in drafter.parameters())
        optimizer.step()
        losses.append(loss_K)
    assert bool((losses[-1] < losses[0] - 0.05).all()), losses
    moved = {name for name, parameter in drafter.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {f"lm_head.{name}" for name in ROUTERS[kind]}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_a_step_in_bfloat16(tiny_target: FrozenTarget, answers: AnswerSet, kind: str) -> None:
    drafter = random_drafter(tiny_target, DrafterEntry(name=kind, draft_head=parse_head(KINDS[kind])))
    recipe = replace(RECIPE, bfloat16=True, ttt_steps=2)
    before = {name: parameter.clone() for name, parameter in drafter.lm_head.named_parameters()}
    batch, optimizers = Batch.of(answers, torch.arange(2)), recipe.make_optimizers(drafter)
    loss_K, figures, _ = train_step(drafter, tiny_target, [batch], recipe, optimizers, step=1)
    assert bool(loss_K.isfinite().all())
    assert figures["grad_norm"] > 0
    assert any(not torch.equal(parameter, before[name]) for name, parameter in drafter.lm_head.named_parameters())


def test_soft_cross_entropy_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, dtype=torch.float64, generator=generator).requires_grad_()
    p = torch.randn(5, 11, dtype=torch.float64, generator=generator).softmax(-1)
    weight = torch.rand(5, generator=generator)
    # the function accumulates its loss in float32, the gradient stays in the dtype of the logits
    (soft_cross_entropy(logits, p) * weight).sum().backward()
    reference = logits.detach().clone().requires_grad_()
    (F.cross_entropy(reference, p, reduction="none") * weight).sum().backward()
    torch.testing.assert_close(logits.grad, reference.grad)


def test_one_seed_gives_every_head_the_same_body(tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    first, second = (new_drafter(tiny_target, head, RECIPE, answers) for head in (FULL, SLIM))
    other = new_drafter(tiny_target, FULL, replace(RECIPE, seed=1), answers)
    body = {n: t for n, t in first.state_dict().items() if not n.startswith("lm_head.")}
    assert all(torch.equal(t, second.state_dict()[n]) for n, t in body.items())
    assert not all(torch.equal(t, other.state_dict()[n]) for n, t in body.items())


def test_every_head_sees_the_same_data_once_per_epoch() -> None:
    recipe = replace(RECIPE, batch_size=3)
    seen = torch.cat([batch_indices(9, recipe, step) for step in range(6)])
    assert sorted(seen[:9].tolist()) == sorted(seen[9:].tolist()) == list(range(9))
    assert seen[:9].tolist() != seen[9:].tolist()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_interrupted_and_resumed_equals_uninterrupted(
    tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path, optimizer: str
) -> None:
    recipe = replace(RECIPE, optimizer=optimizer)
    whole, cut = (run_config(tmp_path / name, recipe=recipe) for name in ("whole", "cut"))
    train_drafter(whole, SLIM, tiny_target, answers, answers)

    def interrupt(step: int) -> None:
        if step == 5:  # after the checkpoint of step 4, so one step is done twice
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_drafter(cut, SLIM, tiny_target, answers, answers, on_step=interrupt)
    assert not Path(cut.output_dir).exists()
    train_drafter(cut, SLIM, tiny_target, answers, answers)
    a, _ = load_drafter(Path(whole.output_dir) / "slim")
    b, _ = load_drafter(Path(cut.output_dir) / "slim")
    assert all(torch.equal(t, b.state_dict()[n]) for n, t in a.state_dict().items())
    histories = [json.loads((Path(c.output_dir) / "slim" / "training.json").read_text()) for c in (whole, cut)]
    losses = [[(h["step"], h["loss"], h["lr"]) for h in history["history"]] for history in histories]
    assert losses[0] == losses[1]
    assert histories[0]["evaluations"] == histories[1]["evaluations"]


def test_resuming_with_another_recipe_is_refused(tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path) -> None:
    def interrupt(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_drafter(run_config(tmp_path), FULL, tiny_target, answers, answers, on_step=interrupt)
    other = run_config(tmp_path, recipe=replace(RECIPE, lr=0.5))
    with pytest.raises(ValueError, match=r"started with recipe\.lr=0.003, now it is 0.5"):
        train_drafter(other, FULL, tiny_target, answers, answers)


def test_loss_falls_and_the_export_names_its_origin(
    tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path, draw_training: Any
) -> None:
    recipe = replace(RECIPE, num_steps=40, batch_size=10, lr=3e-3)
    config = run_config(tmp_path, recipe=recipe, log_every=1)
    train_drafter(config, FULL, tiny_target, answers, answers)
    folder = Path(config.output_dir) / "full"
    drafter, info = load_drafter(folder)
    report = json.loads((folder / "training.json").read_text())
    # the entropy of P is the loss that nothing can pass; every batch holds all the data, so the curve is smooth
    assert report["history"][-1]["loss_step_0"] < report["history"][0]["loss_step_0"] - 0.1
    assert info.target is not None
    assert info.target.tap_layers == (2, 4, 5)
    assert info.provenance["trained_on"] == {**answers.provenance(), "target_sha256": tiny_target.sha256}
    assert info.provenance["recipe"] == recipe.to_dict()
    assert (folder / "training.png").read_bytes() == b"of full"
    assert draw_training(report).startswith(b"\x89PNG")
    # bfloat16 weights may flip a near tie, so acceptance after loading is close, not equal
    acceptance = measure(drafter, tiny_target, answers, num_steps=3, batch_size=4, chunk_rows=16)
    assert acceptance.tau[-1] == pytest.approx(report["held_out"]["tau"][-1], abs=0.3)


def test_the_first_feature_is_the_deepest_tap_at_unit_size(tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    drafter = new_drafter(tiny_target, FULL, RECIPE, answers)
    batch = Batch.of(answers, torch.arange(8))
    taps, _ = tiny_target.features(batch.ids_BT)
    feature = drafter.fuse(taps)[batch.sequence_N, batch.position_N]
    # the other taps add a little
    assert float(feature.detach().pow(2).mean().sqrt()) == pytest.approx(1.0, rel=0.1)


@pytest.fixture(scope="session")
def full_drafter(
    tiny_target: FrozenTarget, answers: AnswerSet, tmp_path_factory: pytest.TempPathFactory
) -> Eagle3Drafter:
    """Trained for a few steps, since a random drafter is never right and would prove nothing."""
    folder = tmp_path_factory.mktemp("full")
    recipe = replace(RECIPE, num_steps=40, batch_size=10, lr=1e-2)
    train_drafter(run_config(folder, recipe=recipe), FULL, tiny_target, answers, answers)
    drafter, _ = load_drafter(folder / "out" / "full")
    return drafter


def with_head(drafter: Eagle3Drafter, target: FrozenTarget, kind: str) -> Eagle3Drafter:
    """The same body, and a head made of the trained full one."""
    made = Eagle3Drafter(
        drafter.config, head_from_target(parse_head(KINDS[kind]), drafter.lm_head.weight.detach(), ARTIFACTS)
    )
    missing = made.load_state_dict({n: t for n, t in drafter.state_dict().items() if "lm_head" not in n}, strict=False)
    assert all(name.startswith("lm_head.") for name in missing.missing_keys)
    return made


@torch.no_grad()
def test_acceptance_equals_literal_greedy_drafting(
    full_drafter: Eagle3Drafter, tiny_target: FrozenTarget, answers: AnswerSet
) -> None:
    check_acceptance(full_drafter, tiny_target, answers)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["truncated", "specvocab", "dynaspec"])
def test_acceptance_of_other_kinds_equals_literal_greedy_drafting(
    full_drafter: Eagle3Drafter, tiny_target: FrozenTarget, answers: AnswerSet, kind: str
) -> None:
    check_acceptance(with_head(full_drafter, tiny_target, kind), tiny_target, answers)


def check_acceptance(drafter: Eagle3Drafter, tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    greedy = (answers.temperature_N == 0).nonzero().squeeze(1).tolist()
    counts, walks = [], []
    for n in greedy:
        start, length = int(answers.prompt_length_N[n]), int(answers.length_N[n])
        ids_T = answers.token_ids_NL[n, :length].long()
        taps, _ = tiny_target.features(ids_T[None])
        accepted = {}
        for first in range(start, length - 2):  # position of the first drafted token
            right = 0
            # with the true tokens as inputs: up to the first wrong draft they are the drafted ones
            for i, step in enumerate(literal_draft(drafter, tiny_target, ids_T, taps[0], first - 2, 3)):
                if int(step.target_logits(drafter, i).argmax()) != int(ids_T[first + i]):
                    break
                right += 1
            accepted[first] = right
        counts += list(accepted.values())
        place = start + 1
        while place in accepted:
            walks.append(accepted[place])
            place += accepted[place] + 1
    got = measure(drafter, tiny_target, answers, num_steps=3, batch_size=2, chunk_rows=5)
    assert got.chains == len(counts)
    assert sum(counts) > 10
    assert got.u == pytest.approx([sum(c > i for c in counts) / len(counts) for i in range(3)])
    assert got.tau[-1] == pytest.approx(1 + sum(got.u))
    assert got.tau_walk == pytest.approx(1 + sum(walks) / len(walks))
    batch = Batch.of(answers, torch.tensor(greedy))
    rows = roll_out(drafter, tiny_target, batch, 3)
    p_NV = tiny_target.distribution(rows.last_hidden_NG, torch.float32)
    for i in range(3):
        q_NV = drafter.lm_head.target_logits(rows.hidden_KNH[i], i, rows.route(drafter.lm_head, i)).softmax(-1)
        assert got.overlap[i] == pytest.approx(float(torch.minimum(p_NV, q_NV).sum(-1).mean()), rel=1e-4)
        assert got.support[i] == pytest.approx(float((q_NV > 0).sum(-1).float().mean()))


def test_a_finished_drafter_is_recognised_by_the_words_that_made_it(
    tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path
) -> None:
    config = run_config(tmp_path)
    for kind, spec in KINDS.items():
        head = DrafterEntry(name=kind, draft_head=parse_head(spec))
        assert not is_exported(config, head, tiny_target.sha256)
        drafter = random_drafter(tiny_target, head)
        provenance = provenance_of(config, tiny_target.sha256, answers)
        save_drafter(Path(config.output_dir) / kind, drafter, tiny_target.info("tiny"), provenance)
        assert is_exported(config, head, tiny_target.sha256)
    other = DrafterEntry(name="truncated", draft_head=parse_head({**KINDS["truncated"], "size": 128}))
    with pytest.raises(ValueError, match="holds a drafter with draft_head"):
        is_exported(config, other, tiny_target.sha256)


def test_short_prompts_are_refused_before_training(tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    with pytest.raises(ValueError, match=r"recipe\.ttt_steps=9 needs prompts of at least 10 tokens"):
        ttt.check_prompt_lengths(answers, 9)


def test_learning_rate_warms_up_and_ends_at_its_share() -> None:
    recipe = Recipe(num_steps=100, warmup_steps=10, final_lr_share=0.05)
    factors = [recipe.lr_factor(step) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == pytest.approx(1.0)
    assert factors[100] == pytest.approx(0.05)
    assert all(a >= b for a, b in pairwise(factors[10:]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttt_steps", 0),
        ("optimizer", "sgd"),
        ("lr", 0.0),
        ("ttt_decay", 1.5),
        ("warmup_steps", 6),
        ("clip_norm", 0.0),
        ("csra_weight", -0.1),
        ("csra_temperature", 0.0),
        ("csra_temperature", 0.1),  # of a loss that is off
    ],
)
def test_bad_recipes_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"recipe.{field}"):
        replace(RECIPE, **{field: value})  # type: ignore[arg-type]
