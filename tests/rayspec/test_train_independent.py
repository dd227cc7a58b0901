"""Training of an independent drafter: what a row reads, what learns, what is measured, and what is stored."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answerers import short_answers
from safetensors.torch import load_file
from small_world import untrained

from rayspec import export
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.drafters import inspect_drafter
from rayspec.training.acceptance import measure
from rayspec.training.data.answers import AnswersConfig, AnswerSet
from rayspec.training.drafter import train_drafter
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig
from rayspec.training.drafter_runs import is_exported, plan
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.origin import Origin, new_drafter
from rayspec.training.recipe import Recipe
from rayspec.training.ttt import backward_batch, roll_out
from sglang_ext.drafters import parse_drafter
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.independent import IndependentDrafter
from sglang_ext.drafters.independent.training import principal_rows
from sglang_ext.drafters.training import Batch
from sglang_ext.folder_kinds import WEIGHTS
from sglang_ext.heads import parse_head
from sglang_ext.settings import build

RECIPE = Recipe(num_steps=40, batch_size=8, warmup_steps=2, bfloat16=False, chunk_rows=16)
OPTIONS = {"kind": "independent", "hidden_size": 24, "num_layers": 2, "head_dim": 8, "intermediate_size": 20}
ARTIFACTS = {"ids": torch.arange(0, 257, 2), "cluster_of": torch.arange(257) % 9}
FULL = DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}), drafter=parse_drafter(OPTIONS))
HEADS = {
    "full": FULL,
    "truncated": replace(FULL, name="truncated", draft_head=parse_head({"kind": "truncated", "size": 129})),
    "truncated_by_step": replace(
        FULL,
        name="truncated_by_step",
        draft_head=parse_head({"kind": "truncated", "size": 129, "step_sizes": [129, 60, 30]}),
    ),
    "routed": replace(
        FULL,
        name="routed",
        draft_head=parse_head({"kind": "dynaspec", "clusters": 8, "first": 3, "later": 1, "router_width": 12}),
    ),
}


@pytest.fixture(scope="session")
def answers(tiny_target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> AnswerSet:
    folder = tmp_path_factory.mktemp("data") / "answers"
    return short_answers(folder, tiny_target, 8)


def random_drafter(target: FrozenTarget, head: DrafterEntry, answers: AnswerSet) -> Any:
    drafter = new_drafter(target, head, RECIPE, answers, Origin(ARTIFACTS))
    generator = torch.Generator().manual_seed(3)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return drafter


@torch.no_grad()
@pytest.mark.parametrize("name", ["full", "routed"])
def test_a_row_reads_the_tokens_that_sglang_shows(name: str, tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    """All but the first up to x_p; literally, as a server would have them, at every step of a draft."""
    drafter = random_drafter(tiny_target, HEADS[name], answers)
    batch = Batch.of(answers, torch.tensor([5, 0]))
    rows = roll_out(drafter, tiny_target, batch, 3)
    for n in (0, 7, len(batch.position_N) - 1):
        b, p = int(batch.sequence_N[n]), int(batch.position_N[n])
        shown = batch.ids_BT[b : b + 1, 1 : p + 1]
        embed_1H = drafter.model.embed_tokens.weight[batch.ids_BT[b, p]][None]
        last_hidden = tiny_target.model.get_decoder()(input_ids=batch.ids_BT[b : b + 1, : p + 1]).last_hidden_state
        torch.testing.assert_close(rows.last_hidden_NG[n], last_hidden[0, -1])
        for i in range(3):
            torch.testing.assert_close(rows.hidden_KNH[i, n], drafter(shown)[0, -1])
            routed = rows.route(drafter.lm_head, i)
            if name == "full":
                assert routed is None
            else:
                expected = drafter.lm_head.route(embed_1H, embed_1H, i)
                torch.testing.assert_close(routed[n : n + 1], expected)


@pytest.mark.parametrize("name", ["full", "truncated"])
def test_the_gradient_is_that_of_the_cross_entropy(name: str, tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    """Over all answer positions, by Hugging Face's Llama and plain torch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    drafter = random_drafter(tiny_target, HEADS[name], answers)
    batch = Batch.of(answers, torch.tensor([1, 2, 6]))
    loss = backward_batch(drafter, tiny_target, batch, num_steps=1, decay=0.5, chunk_rows=7)

    fields = {key: value for key, value in drafter.config.to_json().items() if key != "dtype"}
    model = LlamaForCausalLM(LlamaConfig(**fields, bos_token_id=None, eos_token_id=None))
    body = {key: t.detach() for key, t in drafter.state_dict().items() if not key.startswith("lm_head.")}
    model.load_state_dict(body, strict=False)
    kept = torch.arange(257) if name == "full" else drafter.lm_head.ids
    rows_SH = drafter.lm_head.weight.detach().clone().requires_grad_()
    hidden_BTH = model.model(input_ids=batch.ids_BT[:, 1:]).last_hidden_state
    p_BTV = tiny_target.model(input_ids=batch.ids_BT).logits.softmax(dim=-1)
    mask_BT = torch.zeros(batch.ids_BT.shape, dtype=torch.bool)
    mask_BT[batch.sequence_N, batch.position_N] = True
    q_NS = (hidden_BTH @ rows_SH.T).log_softmax(dim=-1)[mask_BT[:, 1:]]
    p_NS = p_BTV[mask_BT][:, kept]
    counts_N = p_BTV[mask_BT].argmax(dim=-1).unsqueeze(1).eq(kept).any(dim=1)
    if name == "full":
        assert counts_N.all()
    cross_entropy_N = -(p_NS / p_NS.sum(dim=-1, keepdim=True) * q_NS).sum(dim=-1) * counts_N
    total = cross_entropy_N.sum() / len(counts_N)
    torch.testing.assert_close(loss.head_K, total.detach()[None], rtol=1e-4, atol=1e-4)
    total.backward()
    theirs = {key: parameter.grad for key, parameter in model.named_parameters() if key != "lm_head.weight"}
    theirs["lm_head.weight"] = rows_SH.grad
    for key, ours in drafter.named_parameters():
        assert theirs[key].abs().max() > 0, key
        torch.testing.assert_close(ours.grad, theirs[key], rtol=1e-3, atol=1e-5, msg=key)


def test_principal_rows_are_the_best_narrow_copy() -> None:
    rows_VG = torch.randn(60, 20, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, 20)
    for size in (20, 7):
        narrow = principal_rows(rows_VG, size)
        assert narrow.shape == (60, size)
        singular = torch.linalg.svdvals(rows_VG)
        # as many of its inner products as any rows of that width can have
        error = (rows_VG @ rows_VG.T - narrow @ narrow.T).norm()
        torch.testing.assert_close(error, singular[size:].pow(2).norm(), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=r"hidden_size must be at most the target's \(20\).* got 21"):
        principal_rows(rows_VG, 21)


def new_independent(target: FrozenTarget, head: DrafterEntry, seed: int) -> IndependentDrafter:
    return untrained(target, "independent", head.drafter.entry(), head.draft_head.spec(), ARTIFACTS, seed)


def test_one_seed_gives_one_body_whatever_the_head(tiny_target: FrozenTarget) -> None:
    made = [new_independent(tiny_target, HEADS[name], 3) for name in ("full", "truncated")]
    bodies = [drafter.model.state_dict() for drafter in made]
    assert all(torch.equal(t, bodies[1][name]) for name, t in bodies[0].items())
    other = new_independent(tiny_target, FULL, 4).model.state_dict()
    assert not torch.equal(other["layers.0.mlp.up_proj.weight"], bodies[0]["layers.0.mlp.up_proj.weight"])


def run_config(folder: Path, *heads: DrafterEntry, **changes: Any) -> DrafterTrainConfig:
    base = DrafterTrainConfig(
        target=str(folder / "tiny"),
        output_dir=str(folder / "out"),
        work_dir=str(folder / "work"),
        drafters=list(heads),
        answers=AnswersConfig(prompts="training", min_prompt_tokens=8, max_prompt_tokens=20, answer_tokens=14),
        held_out=AnswersConfig(prompts="held_out", min_prompt_tokens=8, max_prompt_tokens=20, answer_tokens=14),
        recipe=RECIPE,
        evaluation=EvaluationConfig(draft_steps=3, every=20, sequences=2),
        checkpoint_every=4,
        log_every=2,
        mlflow=False,
    )
    return replace(base, **changes)


@pytest.fixture(scope="module")
def trained(tiny_target: FrozenTarget, answers: AnswerSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train_drafter(run_config(folder, FULL), FULL, tiny_target, answers, answers)
    return folder


def test_training_learns_and_exports(
    trained: Path, tiny_target: FrozenTarget, answers: AnswerSet, draw_training: Any
) -> None:
    drafter, info = load_drafter(trained / "out" / "full")
    report = json.loads((trained / "out" / "full" / "training.json").read_text())
    assert report["history"][-1]["loss"] < report["history"][0]["loss"]
    assert [key for key in report["history"][0] if key.startswith("loss_step_")] == ["loss_step_0"]
    assert len(draw_training(report)) > 1000
    assert (info.kind, info.target) == ("independent", tiny_target.info("tiny", ()))
    assert info.provenance["drafter"] == {
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
        **OPTIONS,
    }
    again = measure(drafter, tiny_target, answers, num_steps=3, batch_size=4, chunk_rows=16)
    assert again.u == pytest.approx(report["held_out"]["u"], abs=0.03)  # stored in bfloat16


@torch.no_grad()
def test_held_out_acceptance_is_that_of_literal_drafting(
    trained: Path, tiny_target: FrozenTarget, answers: AnswerSet
) -> None:
    """Token by token, each draft read back, from every answer position on."""
    drafter, _ = load_drafter(trained / "out" / "full")
    assert isinstance(drafter, IndependentDrafter)
    K = 3
    found = measure(drafter, tiny_target, answers, num_steps=K, batch_size=4, chunk_rows=16)
    lengths = []
    for n in (answers.temperature_N == 0).nonzero().squeeze(1).tolist():
        ids = answers.token_ids_NL[n, : int(answers.length_N[n])].tolist()
        for place in range(int(answers.prompt_length_N[n]), len(ids) - K + 1):
            text = ids[1:place]
            accepted = 0
            while accepted < K:
                text.append(int(drafter.lm_head.best(drafter(torch.tensor([text]))[:, -1], accepted)))
                if text[-1] != ids[place + accepted]:
                    break
                accepted += 1
            lengths.append(accepted)
    u = [sum(length > i for length in lengths) / len(lengths) for i in range(K)]
    assert found.chains == len(lengths)
    assert found.u == pytest.approx(u)
    assert found.u[0] > 0, "something was to be accepted"


def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    trained: Path, tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    def stop(step: int) -> None:
        if step == 4:
            raise Stop

    config = run_config(tmp_path, FULL, target=str(trained / "tiny"))
    with pytest.raises(Stop):
        train_drafter(config, FULL, tiny_target, answers, answers, on_step=stop)
    train_drafter(config, FULL, tiny_target, answers, answers)
    whole, parts = (load_file(folder / "out" / "full" / WEIGHTS) for folder in (trained, tmp_path))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_an_exported_drafter_is_known_again_and_another_one_refused(
    trained: Path, tiny_target: FrozenTarget, tiny_target_folder: Path
) -> None:
    config = run_config(trained, FULL)
    assert is_exported(config, FULL, tiny_target.sha256)
    with pytest.raises(ValueError, match="holds a drafter with drafter"):
        is_exported(config, replace(FULL, drafter=parse_drafter({**OPTIONS, "num_layers": 1})), tiny_target.sha256)
    lines = plan(replace(config, target=str(tiny_target_folder)))
    assert any(line.startswith("full {'kind': 'independent', 'hidden_size': 24,") for line in lines)
    # the drafter's own width bounds a head, and not the target's of 32
    wide = replace(FULL, name="wide", draft_head=parse_head({"kind": "slimspec", "rank": 25}))
    with pytest.raises(ValueError, match=r"drafters\[wide\].*24"):
        plan(run_config(trained, wide, target=str(tiny_target_folder)))


def test_another_head_on_a_trained_base(trained: Path, tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    routed = replace(
        FULL, name="router", base="full", draft_head=parse_head({"kind": "specvocab", "rank": 4, "size": 20})
    )
    train_drafter(run_config(trained, routed), routed, tiny_target, answers, answers)
    assert set(load_file(trained / "out" / "router" / WEIGHTS)) == {"lm_head.down", "lm_head.up"}
    wrong = replace(routed, name="wrong", drafter=parse_drafter({**OPTIONS, "num_layers": 1}))
    with pytest.raises(ValueError, match="leave those options as they are there"):
        train_drafter(run_config(trained, wrong), wrong, tiny_target, answers, answers)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "option": ({"drafter": {"kind": "independent", "layers": 4}}, "unknown key 'drafter.layers'"),
    "type": ({"drafter": {"kind": "independent", "num_layers": 2.5}}, "num_layers must be a whole number, got 2.5"),
    "size": ({"drafter": {"kind": "independent", "num_layers": 0}}, r"drafter.num_layers must be in 1\.\.\d+, got 0"),
    "tree": ({"drafter": {"kind": "independent"}, "tree": {"kind": "static"}}, r"leave drafters\[x\]\.tree out"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_configs_are_refused(fault: str) -> None:
    changes, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        build(DrafterEntry, {"name": "x", "draft_head": {"kind": "full"}, **changes})


def test_a_drafter_wider_than_the_target_is_refused(tiny_target: FrozenTarget) -> None:
    with pytest.raises(ValueError, match=r"drafter.hidden_size must be at most the target's \(32\)"):
        new_independent(tiny_target, replace(FULL, drafter=parse_drafter({**OPTIONS, "hidden_size": 40})), 0)


def test_there_is_no_stock_form(trained: Path) -> None:
    with pytest.raises(ValueError, match=r"no stock form of a.* independent drafter"):
        export.prepare(export.ExportConfig(drafters=[str(trained / "out" / "full")]))


def test_a_sweep_plans_it_as_a_swap_group_its_own(trained: Path) -> None:
    folder = str(trained / "out" / "full")
    config = SweepConfig(drafters=[folder, f"{folder}@4x9"])
    chain, tree = (c for entry in config.drafters for c in inspect_drafter(entry, config))
    assert (chain.problem, chain.algorithm, chain.worker) == (None, "STANDALONE", "standalone")
    assert (tree.problem, tree.algorithm, tree.worker) == (None, "STANDALONE", "standalone-4x9")
