"""Files for those who serve elsewhere."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fixture_models import TARGET
from mlflow import MlflowClient

from rayspec.report.adaptive import adaptive_config
from rayspec.report.page import check_report
from rayspec.report.promote import winner
from rayspec.report.ready_files import acceptance, emit, vllm_command
from rayspec.serving.policy import measured_policy
from rayspec.sweep.record.stored import find_sweep
from rayspec.sweep.shape import DraftShape
from sglang_ext.folder_kinds import POLICY
from sglang_ext.policy.table import read_table

MODEL = "models:/drafter-target@canary"


def test_ready_files_of_the_winners(champion_client: MlflowClient, tmp_path: Path) -> None:
    sweep = find_sweep(champion_client)
    written = emit(sweep, tmp_path / "ready", MODEL)
    names = {file.name for file in written}
    assert {"serve.sh", "acceptance.json", "rayservice.yaml"} <= names
    for file in written:
        text = file.read_text()
        if file.name == "acceptance.json":
            found = json.loads(text)
            result = next(r for r in sweep.results if r.trial.name == file.parent.name)
            assert found["tokens_per_step_by_draft_steps"][str(found["draft_steps"])] == pytest.approx(
                result.metrics["tau"]
            )
            assert len(found["tokens_per_step_by_draft_steps"]) == len(found["accepted_at_least"]), "it is a chain"
            assert np.cumprod(found["accepted_if_reached"]) == pytest.approx(found["accepted_at_least"])
            assert len(found["accepted_at_least"]) == result.trial.draft_steps
        elif file.name == "rayservice.yaml":
            (servers, _) = yaml.safe_load(yaml.safe_load(text)["spec"]["serveConfigV2"])["applications"]
            assert servers["args"]["source"] == MODEL
            assert servers["args"]["target"] == str(TARGET)
        elif file.name == "serve.sh":
            assert text.splitlines()[1].startswith("python -m sglang.launch_server --model-path ")
            assert os.access(file, os.X_OK)
    slow = dataclasses.replace(sweep, results=tuple(r for r in sweep.results if r.trial.label == "plain"))
    with pytest.raises(ValueError, match="is clearly faster than plain decoding: nothing to emit"):
        emit(slow, tmp_path / "none")


@pytest.mark.parametrize("label", ["/ABSOLUTE", "../outside", "a/../../../outside", "a\0b"])
def test_names_of_a_store_lead_nowhere_else(label: str, champion_client: MlflowClient, tmp_path: Path) -> None:
    """Whoever may write to the store chooses them."""
    sweep = find_sweep(champion_client)
    label = label.replace("/ABSOLUTE", str(tmp_path / "outside"))
    best = winner(sweep.results)
    assert best.trial.candidate is not None
    candidate = dataclasses.replace(best.trial.candidate, label=label)
    named = dataclasses.replace(best, trial=dataclasses.replace(best.trial, candidate=candidate))
    results = tuple(named if r is best else r for r in sweep.results)
    run_ids = {**sweep.run_ids, named.trial: sweep.run_ids[best.trial]}
    with pytest.raises(ValueError, match="the name of a trial, which MLflow holds, must be a plain folder name"):
        emit(dataclasses.replace(sweep, results=results, run_ids=run_ids), tmp_path / "ready" / "here")
    assert not list(tmp_path.rglob("serve.sh"))


def test_ready_files_replace_their_own_alone(champion_client: MlflowClient, tmp_path: Path) -> None:
    sweep = find_sweep(champion_client)
    place = emit(sweep, tmp_path)[0].parent
    (place / "vllm.sh").write_text("of an earlier drafter")
    assert place / "vllm.sh" not in emit(sweep, tmp_path) or "earlier" not in (place / "vllm.sh").read_text()
    (place / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="beside the files of a winner that is there lies notes\\.txt; nothing"):
        emit(sweep, tmp_path)
    assert (place / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("label", ["a tree", "drafts made of each other"])
def test_of_other_drafts_than_chains_only_what_was_measured_is_said(label: str, champion_client: MlflowClient) -> None:
    sweep = find_sweep(champion_client)
    best = next(r for r in sweep.results if r.trial.candidate is not None and r.error is None)
    assert best.trial.candidate is not None
    changes: dict[str, dict[str, Any]] = {
        "a tree": {"shape": DraftShape(topk=4, num_draft_tokens=10)},
        "drafts made of each other": {"family": "specformer"},
    }
    candidate = dataclasses.replace(best.trial.candidate, **changes[label])
    other = dataclasses.replace(best, trial=dataclasses.replace(best.trial, candidate=candidate))
    steps = str(best.trial.draft_steps)
    assert acceptance(sweep, other)["tokens_per_step_by_draft_steps"] == {steps: best.metrics["tau"]}


def test_a_report_replaces_no_other_file(tmp_path: Path) -> None:
    check_report(tmp_path)
    (tmp_path / "report.md").write_text("# Sweep one\n")
    check_report(tmp_path)
    (tmp_path / "report.md").write_text("my thesis")
    with pytest.raises(ValueError, match=r"report\.md is no report of a sweep, and is not replaced"):
        check_report(tmp_path)


def test_the_adaptive_file_is_sglangs(champion_client: MlflowClient, tmp_path: Path) -> None:
    """SGLang's own loader reads it, and what it routes to is what the policy would take."""
    from sglang.srt.speculative.adaptive_spec_params import (
        AdaptiveSpeculativeParams,
        resolve_candidate_steps_from_config,
    )

    from sglang_ext.policy.choice import MeasuredPolicy

    sweep = find_sweep(champion_client)
    files = [file for file in emit(sweep, tmp_path) if file.name == "adaptive.json"]
    assert files
    for file in files:
        table = read_table(file.parent / POLICY)
        steps = resolve_candidate_steps_from_config(str(file))
        assert steps
        assert set(steps) <= set(table.lengths)
        read = AdaptiveSpeculativeParams(initial_steps=table.lengths[-1], cfg_path=str(file))
        policy = MeasuredPolicy(table, start=table.lengths[-1])
        for requests in {n for curve in table.curves for n in curve.requests}:
            best = max(table.lengths, key=lambda k: policy.tokens_per_ms(k, requests))
            assert best in read._route(requests).candidate_steps
    best = winner(sweep.results)
    policy = measured_policy(sweep, best)
    assert policy is not None
    dear = dataclasses.replace(
        policy,
        curves=[
            dataclasses.replace(c, step_ms=[ms * (1 + 9 * c.draft_steps) for ms in c.step_ms]) for c in policy.curves
        ],
    )
    plain = adaptive_config(dear, best.trial, draws=False)
    assert plain is not None
    assert {tuple(entry["candidate_steps"]) for entry in plain.values()} == {(0,)}
    drawn = adaptive_config(dear, best.trial, draws=True)
    assert drawn is not None
    assert all(min(entry["candidate_steps"]) > 0 for entry in drawn.values())


def test_vllm_serves_nothing_where_the_export_fails(
    champion_client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of the export is looked at by the script alone, not when it is written."""
    sweep = find_sweep(champion_client)
    monkeypatch.chdir(tmp_path)
    best = winner(sweep.results)
    assert best.trial.candidate is not None
    in_the_way = tmp_path / "stock_drafters" / Path(best.trial.candidate.path).name
    in_the_way.mkdir(parents=True)
    (in_the_way / "export.json").write_text('{"drafter": "another"}')
    script = vllm_command(sweep, best)
    assert script is not None
    (tmp_path / "vllm.sh").write_text(script)
    for name, does in (("rayspec", "exit 2"), ("vllm", f"touch {tmp_path}/served")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert subprocess.run(["sh", "vllm.sh"], check=False).returncode == 2
    assert not (tmp_path / "served").exists()
    (tmp_path / "rayspec").write_text("#!/bin/sh\n")
    assert subprocess.run(["sh", "vllm.sh"], check=False).returncode == 0
    assert (tmp_path / "served").exists()
