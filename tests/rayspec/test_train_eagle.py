"""Training of an EAGLE drafter: its rollout against literal drafting, its loss on features, its noise, and resuming."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answerers import short_answers
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from rayspec.training.acceptance import measure
from rayspec.training.data.answers import AnswerSet
from rayspec.training.drafter import train_drafter
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.origin import Origin, new_drafter
from rayspec.training.recipe import Recipe
from rayspec.training.ttt import backward_batch, roll_out
from sglang_ext.drafters import parse_drafter
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.eagle import EagleDrafter
from sglang_ext.drafters.eagle.training import FEATURE_WEIGHT, NOISE
from sglang_ext.drafters.layers import rotate
from sglang_ext.drafters.shared.features.training import unroll
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import parse_head
from sglang_ext.settings import build

EAGLE = {"kind": "eagle"}
FULL = DrafterEntry(
    name="full", drafter=parse_drafter(EAGLE), draft_head=parse_head({"kind": "full"}), freeze_head=True
)
ROUTED = DrafterEntry(
    name="routed",
    drafter=parse_drafter(EAGLE),
    draft_head=parse_head({"kind": "dynaspec", "clusters": 8, "first": 3, "later": 1, "router_width": 12}),
)
RECIPE = Recipe(num_steps=6, batch_size=2, warmup_steps=1, bfloat16=False, chunk_rows=16, ttt_steps=2)
ARTIFACTS = {"ids": torch.arange(0, 257, 2), "cluster_of": torch.arange(257) % 9}


@pytest.fixture(scope="session")
def answers(tiny_target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> AnswerSet:
    folder = tmp_path_factory.mktemp("data") / "answers"
    return short_answers(folder, tiny_target, 8, greedy_share=1.0)


def random_drafter(target: FrozenTarget, entry: DrafterEntry, answers: AnswerSet) -> Any:
    """Every weight random and large, so that nothing under test can hide behind a small one."""
    drafter = new_drafter(target, entry, RECIPE, answers, Origin(ARTIFACTS))
    generator = torch.Generator().manual_seed(3)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return drafter


def run_config(folder: Path, **changes: object) -> DrafterTrainConfig:
    base = DrafterTrainConfig(
        target=str(folder / "tiny"),
        output_dir=str(folder / "out"),
        work_dir=str(folder / "work"),
        drafters=[FULL],
        recipe=RECIPE,
        evaluation=EvaluationConfig(draft_steps=3, every=4, sequences=2),
        checkpoint_every=2,
        log_every=1,
        mlflow=False,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def literal_draft(
    drafter: EagleDrafter, target: FrozenTarget, ids_T: Tensor, features_TH: Tensor, slot: int, steps: int
) -> list[Tensor]:
    """What decoding would do, one slot after the other with a cache that grows: true features up to `slot`, the
    drafter's own behind it. The states of the draft steps."""
    c, layer, keys, values, states = drafter.config, drafter.layers[0], [], [], []
    for position in range(slot + steps):
        feature_H = features_TH[position] if position <= slot else states[-1]
        x_H = drafter.fc(torch.cat([target.embed(ids_T[position + 1]), feature_H]))
        where = torch.tensor([[position]])
        q_AD = rotate(layer.self_attn.q_proj(x_H).view(1, 1, -1, c.head_dim), where, c.rope)[0, 0]
        keys.append(rotate(layer.self_attn.k_proj(x_H).view(1, 1, -1, c.head_dim), where, c.rope)[0, 0])
        values.append(layer.self_attn.v_proj(x_H).view(-1, c.head_dim))
        heads = []
        for a in range(c.num_attention_heads):
            k = a // (c.num_attention_heads // c.num_key_value_heads)
            scores = torch.stack([q_AD[a] @ key[k] for key in keys]) / c.head_dim**0.5
            heads.append(scores.softmax(0) @ torch.stack([value[k] for value in values]))
        y_H = x_H + layer.self_attn.o_proj(torch.cat(heads))
        y_H = y_H + layer.mlp(layer.post_attention_layernorm(y_H))
        if position >= slot:
            states.append(y_H)
    return states


@torch.no_grad()
@pytest.mark.parametrize("slot", [0, 1, 7, 13], ids=["first", "second", "middle", "last_with_all_steps"])
def test_the_rollout_is_literal_drafting(tiny_target: FrozenTarget, answers: AnswerSet, slot: int) -> None:
    drafter = random_drafter(tiny_target, FULL, answers)
    ids_BT = torch.randint(1, 257, (2, 18), generator=torch.Generator().manual_seed(2))
    features_BTH = tiny_target.last_hidden(ids_BT)
    hiddens = unroll(drafter, tiny_target, ids_BT, features_BTH, num_steps=4).hiddens
    for b in range(2):
        literal = literal_draft(drafter, tiny_target, ids_BT[b], features_BTH[b], slot, 4)
        for i in range(4):
            # float32 rounding of sums in another order; values are of order 1
            torch.testing.assert_close(hiddens[i][b, slot], literal[i], rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_a_router_sees_what_the_layer_is_given(tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    drafter = random_drafter(tiny_target, ROUTED, answers)
    batch = Batch.of(answers, torch.tensor([3, 0]))
    features_BTH = tiny_target.last_hidden(batch.ids_BT)
    rows = roll_out(drafter, tiny_target, batch, 2)
    assert rows.feature_KNH is not None
    assert rows.body_loss_KN is None
    for n in (0, 5, len(batch.position_N) - 1):
        b, p = int(batch.sequence_N[n]), int(batch.position_N[n])
        first = literal_draft(drafter, tiny_target, batch.ids_BT[b], features_BTH[b], p - 2, 1)[0]
        torch.testing.assert_close(rows.feature_KNH[0, n], features_BTH[b, p - 1])
        torch.testing.assert_close(rows.feature_KNH[1, n], first, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(rows.embed_KNH[:, n], tiny_target.embed(batch.ids_BT[b, p]).expand(2, -1))


def published_loss(
    drafter: EagleDrafter, target: FrozenTarget, batch: Batch, noisy_BTH: Tensor, num_steps: int, decay: float
) -> tuple[Tensor, Tensor]:
    """(head's, features') in EAGLE's form: slot t against the target's feature and distribution one token on, mean over
    the answers; behind the first step, HASS's, both shifted by one a step."""
    features_BTH = target.last_hidden(batch.ids_BT)
    p_BTV = (features_BTH @ target.head_VG.T).softmax(dim=-1)
    mask_BT = torch.zeros(batch.ids_BT.shape, dtype=torch.bool)
    mask_BT[batch.sequence_N, batch.position_N] = True
    head = body = torch.zeros(())
    for i, out_BTH in enumerate(unroll(drafter, target, batch.ids_BT, noisy_BTH, num_steps).hiddens):
        T = batch.ids_BT.shape[1] - 1 - i
        mask = mask_BT[:, 1 + i :]
        log_q = (out_BTH[:, :T] @ target.head_VG.T).log_softmax(dim=-1)
        head = head + decay**i * -(p_BTV[:, 1 + i :] * log_q).sum(-1)[mask].mean()
        apart = F.smooth_l1_loss(out_BTH[:, :T], features_BTH[:, 1 + i :], reduction="none").mean(-1)
        body = body + decay**i * apart[mask].mean()
    return head, body


@pytest.mark.parametrize("num_steps", [1, 3], ids=["eagle", "hass"])
def test_the_gradient_is_that_of_the_published_loss(
    tiny_target: FrozenTarget, answers: AnswerSet, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = random_drafter(tiny_target, FULL, answers)
    batch = Batch.of(answers, torch.tensor([1, 2, 6]))
    noise_BTH = torch.rand(tiny_target.last_hidden(batch.ids_BT).shape) * 0.2 - 0.1
    monkeypatch.setattr("sglang_ext.drafters.eagle.training._noise", lambda batch, like_BTH: noise_BTH)
    loss = backward_batch(drafter, tiny_target, batch, num_steps=num_steps, decay=0.5, chunk_rows=7)
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    assert set(found) == {name for name, _ in drafter.named_parameters() if not name.startswith("lm_head.")}
    drafter.zero_grad()
    noisy_BTH = tiny_target.last_hidden(batch.ids_BT) + noise_BTH
    head, body = published_loss(drafter, tiny_target, batch, noisy_BTH, num_steps, 0.5)
    torch.testing.assert_close(sum(0.5**i * x for i, x in enumerate(loss.head_K)), head.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.body, FEATURE_WEIGHT * body.detach(), rtol=1e-5, atol=1e-5)
    (1.0 * body + 0.1 * head).backward()  # as published; ours is ten times as much
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[name] / 10, parameter.grad, rtol=1e-4, atol=1e-5)


def test_noise_is_for_a_body_that_is_trained(tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    """As large as published, of a sequence the same again at the same step, and neither in measuring nor under a frozen
    body."""
    drafter = random_drafter(tiny_target, ROUTED, answers)
    batch, later = (Batch.of(answers, torch.tensor([1, 2]), step=step) for step in (0, 1))
    alone = Batch.of(answers, torch.tensor([1]))
    with torch.no_grad():
        clean = roll_out(drafter, tiny_target, batch, 2)
    rows = [roll_out(drafter, tiny_target, b, 2) for b in (batch, batch, later, alone)]
    noise_NH = rows[0].feature_KNH[0] - clean.feature_KNH[0]
    assert NOISE * 0.98 < noise_NH.abs().max() <= NOISE * 1.001
    assert abs(float(noise_NH.mean())) < 0.01
    assert torch.equal(rows[0].hidden_KNH, rows[1].hidden_KNH)
    assert not torch.allclose(rows[0].hidden_KNH, rows[2].hidden_KNH, atol=1e-3)
    one = batch.sequence_N == 0
    torch.testing.assert_close(rows[0].feature_KNH[0, one], rows[3].feature_KNH[0], rtol=1e-5, atol=1e-5)
    noise_of_two_NH = noise_NH[~one][: int(one.sum())]
    assert not torch.allclose(noise_NH[one][: len(noise_of_two_NH)], noise_of_two_NH, atol=1e-3)
    for parameter in drafter.parameters():
        parameter.requires_grad_(False)
    frozen = roll_out(drafter, tiny_target, batch, 2)
    assert frozen.body_loss_KN is None
    assert torch.equal(frozen.hidden_KNH, clean.hidden_KNH)


def test_a_new_one_starts_near_the_feature_that_it_reads(tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    drafter = new_drafter(tiny_target, FULL, RECIPE, answers)
    batch = Batch.of(answers, torch.arange(8))
    features_BTH = tiny_target.last_hidden(batch.ids_BT)
    with torch.no_grad():
        hidden_BTH = unroll(drafter, tiny_target, batch.ids_BT, features_BTH, 1).hiddens[0]
    assert F.cosine_similarity(hidden_BTH, features_BTH[:, :-1], dim=-1).mean() > 0.9
    assert torch.equal(drafter.lm_head.weight, tiny_target.head_VG)
    assert not drafter.lm_head.weight.requires_grad


def test_interrupted_and_resumed_equals_uninterrupted(
    tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path
) -> None:
    whole, cut = (run_config(tmp_path / name) for name in ("whole", "cut"))
    train_drafter(whole, FULL, tiny_target, answers, answers)

    def interrupt(step: int) -> None:
        if step == 5:  # after the checkpoint of step 4, so one step is done twice
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_drafter(cut, FULL, tiny_target, answers, answers, on_step=interrupt)
    train_drafter(cut, FULL, tiny_target, answers, answers)
    a, _ = load_drafter(Path(whole.output_dir) / "full")
    b, _ = load_drafter(Path(cut.output_dir) / "full")
    assert all(torch.equal(t, b.state_dict()[n]) for n, t in a.state_dict().items())


def test_what_is_trained_logged_and_stored(tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path) -> None:
    recipe = replace(RECIPE, num_steps=40, batch_size=8, lr=3e-3)
    config = run_config(tmp_path, recipe=recipe)
    train_drafter(config, FULL, tiny_target, answers, answers)
    folder = Path(config.output_folder) / "full"
    drafter, info = load_drafter(folder)
    report = json.loads((folder / "training.json").read_text())
    first, last = report["history"][0], report["history"][-1]
    assert last["loss_body"] < 0.7 * first["loss_body"]
    assert last["loss_step_0"] < first["loss_step_0"]
    assert info.kind == "eagle"
    assert info.provenance["drafter"] == {"kind": "eagle"}
    assert info.provenance["freeze_head"] is True
    assert info.target is not None
    assert info.target.tap_layers == ()
    found = measure(drafter, tiny_target, answers, num_steps=3, batch_size=4, chunk_rows=16)
    # bfloat16 weights may flip a near tie, so acceptance after loading is close, not equal
    assert found.tau[-1] == pytest.approx(report["held_out"]["tau"][-1], abs=0.3)


def test_a_step_in_bfloat16(tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path) -> None:
    """Layers compute in that type, and the loss is a number."""
    config = run_config(tmp_path, recipe=replace(RECIPE, num_steps=2, bfloat16=True))
    products: set[torch.dtype] = set()

    def note(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, torch.nn.Linear):
            products.add(output.dtype)

    with register_module_forward_hook(note):
        train_drafter(config, FULL, tiny_target, answers, answers)
    assert torch.bfloat16 in products
    report = json.loads((Path(config.output_folder) / "full" / "training.json").read_text())
    assert all(math.isfinite(entry["loss"]) for entry in report["history"])


def test_another_head_on_its_body(tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path) -> None:
    """Of the same rows, with the body shared on disk."""
    config = run_config(tmp_path)
    train_drafter(config, FULL, tiny_target, answers, answers)
    entry = DrafterEntry(
        name="low_rank",
        drafter=parse_drafter(EAGLE),
        base="full",
        draft_head=parse_head({"kind": "specvocab", "rank": 8, "size": 40}),
    )
    train_drafter(config, entry, tiny_target, answers, answers)
    drafter, info = load_drafter(Path(config.output_folder) / "low_rank")
    assert isinstance(drafter, EagleDrafter)
    assert "fc.weight" in info.shares[0].tensors


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"drafter": {"kind": "eagle", "positions": 3}},
            r"unknown key 'drafter\.positions'; known under drafter: none",
        ),
        ({"tree": {"kind": "static", "nodes": 4}}, "does not fit a drafter of kind eagle"),
    ],
)
def test_options_that_it_has_not_are_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(DrafterEntry, {"name": "x", "drafter": EAGLE, "draft_head": {"kind": "full"}, **entry})
