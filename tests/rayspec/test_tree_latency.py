"""What of a head's latency a tree is: its own question, on its own rows, against a full head that is asked the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayspec.farm.head_latency import head_latencies
from rayspec.farm.load import Traffic
from rayspec.records import StepSeconds
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.trials import Trial
from rayspec.sweep.record.results import TrialResult, score
from rayspec.sweep.shape import DraftShape
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.counting import StepShape
from sglang_ext.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from sglang_ext.drafters.hydra import HydraConfig, HydraDrafter
from sglang_ext.drafters.medusa import MedusaConfig, MedusaDrafter
from sglang_ext.drafters.rope import Rope
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.heads import head_from_target, parse_head
from sglang_ext.heads.full import FullHead
from sglang_ext.trees.static import StaticTree

H, V = 16, 64
TREE = DraftShape(topk=8, num_draft_tokens=32)


def drafter_folders(folder: Path) -> dict[str, str]:
    body = Eagle3Config(
        hidden_size=H,
        vocab_size=V,
        max_position_embeddings=64,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        target_hidden_size=H,
        tap_layers=(2, 4, 5),
        rope=Rope(),
    )
    drafters: dict[str, Any] = {
        "eagle3": Eagle3Drafter(body, head_from_target(parse_head({"kind": "full"}), torch.randn(V, H)))
    }
    of_target = {"hidden_size": H, "vocab_size": V, "positions": 3}
    static = StaticTree([[0], [1], [0, 0], [2], [1, 0], [0, 1], [0, 0, 0]])
    for name, make, own, tree in (
        ("medusa", MedusaDrafter, MedusaConfig(**of_target), static),
        ("hydra", HydraDrafter, HydraConfig(**of_target), static),
    ):
        heads = own.heads(lambda: head_from_target(parse_head({"kind": "full"}), torch.randn(V, H)))
        drafters[name] = make(own, heads, tree)
    for name, drafter in drafters.items():
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter)
        taps = body.tap_layers if name == "eagle3" else ()
        target = TargetInfo(name="toy", hidden_size=H, vocab_size=V, tokenizer_sha256="abc", tap_layers=taps)
        save_drafter(folder / name, drafter, target)
    return {name: str(folder / name) for name in drafters}


@pytest.mark.parametrize(
    ("topk", "rows_and_candidates"),
    [
        (1, {"eagle3": [(2, 1)] * 3, "medusa": [(2, 1)] * 3, "hydra": [(2, 1)] * 3}),
        # of the static tree three, two and one candidates: Medusa's positions are a row each, Hydra's one a parent
        (
            4,
            {
                "eagle3": [(2, 4), (8, 4), (8, 4)],
                "medusa": [(2, 3), (2, 2), (2, 1)],
                "hydra": [(2, 3), (4, 2), (2, 1)],
            },
        ),
    ],
    ids=["chain", "tree"],
)
def test_a_head_is_asked_what_the_draft_loop_asks(
    topk: int, rows_and_candidates: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, expected = recorded(monkeypatch), list[Any]()
    monkeypatch.setattr(FullHead, "expect_rows", lambda head, rows_by_step: expected.append(rows_by_step))
    monkeypatch.setattr("rayspec.farm.head_latency.MIN_ROUND_S", 1e-4)
    shape = StepShape(draft_steps=3, topk=topk, num_draft_tokens=4 if topk == 1 else 8)
    for name, folder in drafter_folders(tmp_path).items():
        asked.clear()
        found = head_latencies({name: folder}, requests=2, shape=shape, dtype=torch.float32, num_threads=1)
        assert found[name] > 0
        assert asked[:3] == rows_and_candidates[name]
        # rows of a request, by which heads with clusters choose
        assert expected.pop() == [rows // 2 for rows, _ in asked[:3]]


def test_a_tree_asks_its_drafter_the_questions_that_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, sizes = recorded(monkeypatch), (3, 4, 8)
    embedding_VH = torch.randn(V, H)
    for name in ("medusa", "hydra"):
        drafter = load_drafter(drafter_folders(tmp_path / name)[name], torch.float32)[0]
        proposer = drafter.draft_tree.fit(*sizes, torch.device("cpu"))
        asked.clear()
        with torch.inference_mode():
            proposer.propose(drafter, torch.randn(2, H), torch.tensor([1, 2]), embedding_VH.__getitem__)
        assert asked == [(2 * q.rows, q.candidates) for q in drafter.questions(*sizes)]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where full heads write down (rows, candidates) of what they are asked."""
    asked: list[tuple[int, int]] = []
    best, propose = FullHead.best, FullHead.propose

    def best_of(head: FullHead, hidden_TH: torch.Tensor, *rest: Any) -> Any:
        asked.append((len(hidden_TH), 1))
        return best(head, hidden_TH, *rest)

    def proposal_of(head: FullHead, hidden_TH: torch.Tensor, step: int, k: int, *rest: Any) -> Any:
        asked.append((len(hidden_TH), k))
        return propose(head, hidden_TH, step, k, *rest)

    monkeypatch.setattr(FullHead, "best", best_of)
    monkeypatch.setattr(FullHead, "propose", proposal_of)
    return asked


def test_a_trees_nu_is_against_a_tree_of_the_full_head(results: list[TrialResult], synthetic_sweep: Any) -> None:
    blocks = {}
    latency = {"full": 900e-6, "full@8x32": 2000e-6, "slimspec-r64@8x32": 500e-6}
    for trial, own in synthetic_sweep.blocks.items():
        if trial.label in ("full", "slimspec-r64") and trial.draft_steps == 4:
            assert trial.candidate is not None
            candidate = replace(trial.candidate, label=f"{trial.label}@8x32", shape=TREE)
            blocks[replace(trial, candidate=candidate)] = own
            blocks[trial] = own
    found = {r.trial.name: r for r in score(SweepConfig(), blocks, {}, {Traffic(concurrency=1): latency})}
    tree = found["slimspec-r64@8x32-s4-c1"].metrics
    assert tree["nu"] == pytest.approx(0.25)
    assert "speedup_vs_baseline" in tree
    full = found["full@8x32-s4-c1"].metrics
    head_ms = 4 * 2.0
    assert full["kappa"] == pytest.approx(head_ms / (full["cycle_ms"] - head_ms))
    assert isinstance(found["full-s4-c1"].trial, Trial)
    assert found["full-s4-c1"].metrics["nu"] == 1


def test_kappa_is_of_what_requests_wait_for_as_the_cycle_is(synthetic_sweep: Any) -> None:
    """Not of the mean over steps, of which some serve few requests."""
    clock = StepSeconds(steps=4, requests=10, verified_tokens=50, head_s=0.004, head_request_s=0.03, draft_s=0.02,
                        verify_s=0.1)  # fmt: skip
    blocks = {
        trial: [replace(b, measured=replace(b.measured, step_seconds=clock)) for b in own]
        for trial, own in synthetic_sweep.blocks.items()
        if trial.label in ("full", "slimspec-r64") and trial.draft_steps == 4
    }
    found = {r.trial.name: r.metrics for r in score(SweepConfig(), blocks, {}, {})}["full-s4-c1"]
    assert (found["step_head_ms"], found["request_head_ms"]) == (pytest.approx(1), pytest.approx(3))
    assert found["kappa"] == pytest.approx(3 / (found["cycle_ms"] - 3))


@pytest.mark.parametrize("verified", [32, 20])
def test_no_gain_is_predicted_for_a_tree_of_another_size(synthetic_sweep: Any, verified: int) -> None:
    """rho, nu and kappa know nothing of what a step saves in verification."""
    blocks = {}
    for trial, own in synthetic_sweep.blocks.items():
        if trial.label in ("full", "slimspec-r64") and trial.draft_steps == 4:
            nodes = verified if trial.label == "slimspec-r64" else 32
            clock = StepSeconds(steps=2, requests=2, verified_tokens=2 * nodes, head_s=0.01, draft_s=0.02, verify_s=0.1)
            blocks[trial] = [replace(b, measured=replace(b.measured, step_seconds=clock)) for b in own]
    latency = {"full": 900e-6, "slimspec-r64": 450e-6}
    found = {r.trial.name: r for r in score(SweepConfig(), blocks, {}, {Traffic(concurrency=1): latency})}
    assert {"rho", "nu"} <= set(found["slimspec-r64-s4-c1"].metrics)
    predicts = "speedup_vs_baseline_predicted" in found["slimspec-r64-s4-c1"].metrics
    assert predicts == (verified == 32)
