"""A sweep of two families under a trace of lengths, at its own speed and twice as fast: real Ray, real SGLang, a real
MLflow store."""

import json
from pathlib import Path

import pytest
import torch
from fixture_models import DRAFTERS, PROMPTS, TARGET, drafters_setting
from small_world import untrained
from test_sweep import Sweep, metrics_of, sweep

from rayspec.report.page import write_report
from rayspec.sweep.record.stored import find_sweep
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint import save_drafter

pytestmark = pytest.mark.slow
LENGTHS = [(0.0, 40, 12), (0.3, 25, 1), (0.4, 60, 16), (1.0, 12, 5)]
TRIALS = [f"{name}-{speed}" for name in ("plain", "full-s2", "medusa-s2") for speed in ("x1", "x2")]


def new_medusa(folder: Path) -> Path:
    """Untrained, so that it is hardly ever accepted."""
    target = FrozenTarget.load(TARGET, torch.float32)
    drafter = untrained(target, "medusa", {"positions": 2}, {"kind": "slimspec", "rank": 16})
    save_drafter(folder, drafter, target.info(tap_layers=()))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    folder = tmp_path_factory.mktemp("trace")
    lines = ["timestamp,input_length,output_length", *(f"{at},{given},{asked}" for at, given, asked in LENGTHS)]
    (folder / "trace.csv").write_text("\n".join(lines))
    medusa = new_medusa(folder / "medusa")
    process = sweep(
        folder / "home",
        *(f"target={TARGET}", drafters_setting(DRAFTERS["full"], medusa), "draft_steps=[2]", "head_latency=false"),
        *("concurrency=[]", f"trace.path={folder}/trace.csv", "trace.unit=s", "trace.speed=[1,2]"),
        *(f"workload={PROMPTS}:8", "block_prompts=4", "ignore_eos=true", "engine.max_total_tokens=8192"),
    )
    return Sweep(process, folder / "home")


def test_every_request_has_the_trace_s_lengths(finished: Sweep) -> None:
    assert finished.process.returncode == 0, finished.process.stderr
    assert set(finished.children) == set(TRIALS)
    for child in finished.children.values():
        lines = finished.artifact(child, "requests.jsonl").read_text().splitlines()
        found = [(r["prompt_tokens"], len(r["output_ids"])) for r in map(json.loads, lines)]
        cohorts = 2 if child.info.run_name.startswith("plain") else 1  # plain decoding stands in both families'
        assert sorted(found) == sorted(cohorts * [(given, asked) for _, given, asked in LENGTHS])


@pytest.mark.parametrize("name", TRIALS)
def test_the_arrivals_are_the_trace_s(finished: Sweep, name: str) -> None:
    """A block takes at least as long as its last arrival."""
    metrics = metrics_of(finished, name)
    assert metrics["wall_s"] >= 1.0 / float(name[-1])
    assert metrics["ttft_ms_p50"] > 0
    assert finished.children[name].data.params["trace_speed"] == f"{float(name[-1])}"


def test_a_drafter_of_another_body_is_compared_with_plain_decoding_alone(finished: Sweep) -> None:
    for speed in ("x1", "x2"):
        full, medusa = (metrics_of(finished, f"{name}-s2-{speed}") for name in ("full", "medusa"))
        assert {"rho", "kappa"} & full.keys() == {"rho", "kappa"}
        assert {"rho", "kappa"} & medusa.keys() == set()
        assert {"tau", "speedup_vs_plain", "output_mismatches"} <= medusa.keys()


def test_report_and_resume_know_the_trace(finished: Sweep, tmp_path: Path) -> None:
    stored = find_sweep(finished.client, finished.parent.info.run_id)
    assert sorted(r.trial.traffic.label for r in stored.results) == [*3 * ["x1"], *3 * ["x2"]]
    write_report(stored, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "trace.csv, up to 64 tokens an answer where the trace does not say" in text
    assert "the trace at 1x and 2x" in text
