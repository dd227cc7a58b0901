"""What a sweep must leave in MLflow beside its runs: logged models, traces and versions. For any store."""

import json
from pathlib import Path

import mlflow.artifacts
from published import MEASURED_AT_S
from synthetic import SyntheticSweep

from rayspec.driver.publish import representatives
from rayspec.logged_models import find_models
from rayspec.serving.record import files_sha256, read_record
from rayspec.sweep.record.metric_names import metric_key
from rayspec.sweep.record.stored import StoredSweep


def check_logged(stored: StoredSweep, sweep: SyntheticSweep) -> None:
    """One model for each drafter, with the metrics of its best trial on the workload."""
    models = find_models(stored.client, stored.parent.info.experiment_id, stored.run_id)
    best = representatives(sweep.results)
    assert set(models) == {*best, "broken"}
    (dataset,) = stored.datasets
    run_ids = {trial.name: id_ for trial, id_ in stored.run_ids.items()}
    for label, result in best.items():
        model = models[label]
        assert (model.status.value, model.model_type) == ("READY", "drafter")
        assert model.tags["trial"] == result.trial.name
        speedups = [r.metrics["speedup_vs_plain"] for r in sweep.results if r.trial.label == label]
        assert result.metrics["speedup_vs_plain"] == max(speedups)
        found = {m.key: m for m in model.metrics or ()}
        assert {k: m.value for k, m in found.items()} == {metric_key(k): v for k, v in result.metrics.items()}
        for metric in found.values():
            assert metric.run_id == run_ids[result.trial.name]
            assert (metric.dataset_name, metric.dataset_digest) == (dataset.name, dataset.digest)
        assert model.params["head.kind"] == label.partition("-r")[0]
        assert "draft_steps" not in model.params
        for trial, run_id in stored.run_ids.items():
            used = [m.model_id for m in stored.client.get_run(run_id).inputs.model_inputs]
            assert (used == [model.model_id]) == (trial.label == label)


def check_traces(stored: StoredSweep, sweep: SyntheticSweep) -> None:
    """The first requests of each trial, which say what was counted and neither what was asked nor, without
    `keep_output_ids`, what was answered."""
    limit, experiment = sweep.config.traces, stored.parent.info.experiment_id
    models = find_models(stored.client, experiment, stored.run_id)
    for trial, run_id in stored.run_ids.items():
        blocks = sweep.blocks.get(trial, [])
        requests = [r for b in blocks for r in b.requests][:limit]
        found = stored.client.search_traces(locations=[experiment], run_id=run_id, max_results=100)
        assert len(found) == len(requests)
        by_prompt = {t.data.spans[0].inputs["prompt_id"]: t for t in found}
        for request in requests:
            trace = by_prompt[request.prompt_id]
            root, first, rest = sorted(trace.data.spans, key=lambda s: (s.start_time_ns, s.parent_id is not None))
            assert [root.name, first.name, rest.name] == ["request", "first token", "other tokens"]
            assert first.parent_id == rest.parent_id == root.span_id
            assert abs((root.end_time_ns - root.start_time_ns) / 1e9 - request.e2e_s) < 1e-6
            assert abs((first.end_time_ns - first.start_time_ns) / 1e9 - request.ttft_s) < 1e-6
            assert MEASURED_AT_S - 60 < root.start_time_ns / 1e9 < MEASURED_AT_S + 60
            given = root.outputs
            assert given["output_tokens"] == request.output_tokens
            assert given.get("output_ids") == (list(request.output_ids) if sweep.config.keep_output_ids else None)
            assert trace.info.token_usage["output_tokens"] == request.output_tokens
            text = json.dumps(trace.to_dict())
            assert f"prompt {request.prompt_id}" not in text, "the prompt's text"
            metadata = trace.info.trace_metadata
            assert metadata["mlflow.sourceRun"] == run_id
            label = None if trial.candidate is None else models[trial.label].model_id
            assert metadata.get("mlflow.modelId") == label
            if trial.candidate is not None:
                assert root.get_attribute("accepted_drafts") == request.accepted_drafts
    for label in {t.label for t in sweep.blocks if t.candidate}:
        own = [t for t in sweep.blocks if t.label == label]
        traces = stored.client.search_traces(locations=[experiment], model_id=models[label].model_id, max_results=100)
        assert len(traces) == min(limit, 32) * len(own)


def check_version(stored: StoredSweep, name: str, version: str, folder: Path) -> None:
    """A registered version says which logged model it is, and its files are there, whole and nothing beside them."""
    found = stored.client.get_model_version(name, version)
    model = stored.client.get_logged_model(found.tags["model_id"])
    assert found.run_id == found.tags["trial_run_id"]
    assert model.tags["head"] == found.tags["head"]
    assert {"name": name, "version": version} in json.loads(model.tags["mlflow.modelVersions"])
    source = stored.client.get_model_version_download_uri(name, version)
    folder.mkdir(parents=True, exist_ok=True)
    uri = stored.client.tracking_uri
    got = Path(mlflow.artifacts.download_artifacts(source, dst_path=str(folder / "version"), tracking_uri=uri))
    assert files_sha256(got) == read_record(got).files
