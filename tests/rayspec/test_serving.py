"""Which champions may take traffic, and what they are served with."""

import dataclasses
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fixture_models import TARGET
from mlflow import MlflowClient
from published import publish
from safetensors.torch import load_file, save_file
from synthetic import make_synthetic_sweep

from rayspec.commands import serve as command
from rayspec.report.adaptive import adaptive_config
from rayspec.report.page import check_report, write_report
from rayspec.report.promote import promote, winner
from rayspec.report.ready_files import acceptance, emit
from rayspec.serving.access import Access, api_key, check_is_free
from rayspec.serving.champion import PINNED, find_champion
from rayspec.serving.launch import MAX_QUEUED, serve, server_command
from rayspec.serving.policy import beside_plain, measured_policy
from rayspec.serving.record import MEASURED, NOT_OF_A_RECORD, RECORD
from rayspec.sweep.plan.trials import PLAIN
from rayspec.sweep.record.stored import find_sweep
from rayspec.sweep.shape import DraftShape
from rayspec.tracking import Tracker, TrackingError
from sglang_ext.adapter.server_fields import server_fields
from sglang_ext.artefacts import POLICY
from sglang_ext.policy.table import read_table

MODEL = "models:/drafter-target@champion"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store with a champion of a synthetic sweep on the fixture target, and the file of its run's id."""
    folder = tmp_path_factory.mktemp("store")
    tracker = Tracker(f"sqlite:///{folder}/mlflow.db", "tests", (folder / "artifacts").as_uri())
    sweep = make_synthetic_sweep()
    sweep = dataclasses.replace(sweep, config=dataclasses.replace(sweep.config, target=str(TARGET)))
    stored = find_sweep(tracker.client, publish(tracker, sweep))
    write_report(stored, folder / "report")
    done = promote(stored, folder / "report", winner(stored.results), "drafter-target")
    (folder / "run").write_text(stored.run_ids[done.winner.trial])
    return folder


@pytest.fixture
def client(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowClient]:
    """With a home of its own."""
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place}/mlflow.db")
    return MlflowClient(f"sqlite:///{place}/mlflow.db")


def test_a_champion_is_found_by_each_of_its_names(client: MlflowClient, place: Path) -> None:
    by_alias = find_champion(MODEL, client)
    assert by_alias.target == str(TARGET)
    assert by_alias.record.evidence["clearly_faster_than_plain"] == "yes"
    assert (by_alias.folder / "model.safetensors").is_file()
    for source in ("models:/drafter-target/1", (place / "run").read_text(), str(by_alias.folder)):
        assert find_champion(source, client).record == by_alias.record


def test_the_command_has_the_measured_settings(client: MlflowClient) -> None:
    champion = find_champion(MODEL, client)
    words = server_command(champion, "127.0.0.1", 31000, ["--log-level", "warning"])
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert words[1:3] == ["-m", "sglang.launch_server"]
    assert flags["--model-path"] == str(TARGET)
    assert flags["--speculative-draft-model-path"] == str(champion.folder)
    assert flags["--speculative-algorithm"] == "EAGLE3"
    assert int(flags["--speculative-num-draft-tokens"]) == int(flags["--speculative-num-steps"]) + 1
    assert (flags["--host"], flags["--port"], flags["--log-level"]) == ("127.0.0.1", "31000", "warning")
    assert int(flags["--max-queued-requests"]) == MAX_QUEUED
    more = server_command(champion, "127.0.0.1", 31000, ["--max-queued-requests", "5"])
    assert more[-2:] == ["--max-queued-requests", "5"], "what the user says comes last and wins"


def tampered_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)


def edit_record(folder: Path, **values: object) -> None:
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps(record | values))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "tampered": (tampered_weights, r"is not what was promoted: model\.safetensors was changed"),
    "cut short": (cut_short, r"is not what was promoted: model\.safetensors was cut short"),
    "added": (lambda f: (f / "more.py").write_text(""), r"is not what was promoted: more\.py was added"),
    "gone": (lambda f: (f / "config.json").unlink(), r"is not what was promoted: config\.json is gone"),
    "no record": (lambda f: (f / RECORD).unlink(), r"carries no evidence .*serving\.json is missing"),
    "half a record": (lambda f: (f / RECORD).write_text('{"head":'), r"serving\.json is damaged"),
    "another target": (lambda f: edit_record(f, target_sha256="0" * 64), "was measured on target .* are others"),
    "several nodes": (lambda f: edit_record(f, nodes=2), "was measured with engines over 2 nodes each"),
    "a link": (lambda f: (f / "more").symlink_to("/etc"), r"more, which are no plain files"),
    "a linked record": (
        lambda f: ((f / RECORD).rename(f.parent / RECORD), (f / RECORD).symlink_to(f.parent / RECORD)),
        r"serving\.json, which are no plain files",
    ),
    "a target of its own": (
        lambda f: edit_record(f, flags={"model_path": "/evil"}),
        "flags must be without model_path",
    ),
    "code of others": (lambda f: edit_record(f, flags={"trust_remote_code": True}), "flags must be without trust_re"),
    "code by name": (
        lambda f: edit_record(f, flags={"forward_hooks": '[{"hook_factory": "os:system"}]'}),
        "flags must be without forward_hooks: no setting of speed that a champion may bring",
    ),
    "no weights": (lambda f: edit_record(f, flags={"load_format": "dummy"}), "flags must be without load_format"),
    "logits by requests": (
        lambda f: edit_record(f, flags={"enable_custom_logit_processor": True}),
        "flags must be without enable_custom_logit_processor",
    ),
    "no shape": (lambda f: edit_record(f, flags={}), "does not say speculative_algorithm, speculative_num_steps"),
    "no flag": (lambda f: edit_record(f, flags={"--x": 1}), r"flags\.--x is no argument of SGLang"),
    "no threads": (lambda f: edit_record(f, num_threads=0), "num_threads must be at least 1, got 0"),
    "evidence that is no text": (lambda f: edit_record(f, evidence={"tau": 2}), r"evidence\.tau must be text, got 2"),
    "not faster": (
        lambda f: edit_record(f, evidence={"clearly_faster_than_plain": "no", "speedup_vs_plain": "0.93"}),
        r"was not clearly faster than plain decoding .*speed-up 0\.93.*--force",
    ),
}


def test_a_tag_that_is_no_fingerprint_names_no_folder(client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    version = client.get_model_version_by_alias("drafter-target", "champion")
    version.tags[PINNED] = "/../../../elsewhere"
    monkeypatch.setattr(client, "get_model_version_by_alias", lambda *_: version)
    with pytest.raises(ValueError, match=r"its tag serving\.sha256 is no SHA-256"):
        find_champion(MODEL, client)


def test_a_version_of_one_file_is_no_drafter(
    client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.txt").write_text("none")
    monkeypatch.setattr(client, "get_model_version_download_uri", lambda *_: (tmp_path / "notes.txt").as_uri())
    with pytest.raises(ValueError, match="is no folder of a drafter; promote a champion again"):
        find_champion(MODEL, client)


def test_what_a_champion_may_bring_is_of_sglang() -> None:
    """A name that is none would allow nothing, and hide that one has moved."""
    assert set(MEASURED) <= set(server_fields())
    assert not set(MEASURED) & NOT_OF_A_RECORD


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_folder_takes_no_traffic(fault: str, client: MlflowClient) -> None:
    damage, message = BAD[fault]
    folder = find_champion(MODEL, client).folder
    damage(folder)
    with pytest.raises(ValueError, match=message):
        find_champion(str(folder), client)


def test_a_record_other_than_the_promoted_one_is_refused(client: MlflowClient, place: Path) -> None:
    """Who can write the files can write their fingerprints, but not the tag of the version."""
    (file,) = place.rglob(RECORD)
    promoted = file.read_text()
    edit_record(file.parent, head="another")
    try:
        with pytest.raises(ValueError, match=r"is not the one that was promoted .*serving\.sha256"):
            find_champion(MODEL, client)
    finally:
        file.write_text(promoted)


def test_a_damaged_copy_is_fetched_again(client: MlflowClient) -> None:
    folder = find_champion(MODEL, client).folder
    tampered_weights(folder)
    assert find_champion(MODEL, client).folder == folder


@pytest.mark.parametrize(
    "words",
    [
        ["--load-format", "dummy"],
        ["--tokenizer-path=/x"],
        ["--api-key", "x"],
        ["--api-key=x"],
        ["--model", "/x"],
        ["--speculative-draft-model", "/x"],
        ["--host=::"],
    ],
)
def test_flags_that_undo_the_checks_are_refused(words: list[str], client: MlflowClient) -> None:
    with pytest.raises(ValueError, match=r"behind -- would undo what was checked"):
        server_command(find_champion(MODEL, client), "127.0.0.1", 30000, words)


@pytest.mark.parametrize(
    ("host", "port"), [("", 1), ("a b", 1), ("999.999.1.1", 1), ("a\0b", 1), ("::1", 0), ("::1", 65536)]
)
def test_addresses_that_are_none_are_refused(host: str, port: int, client: MlflowClient) -> None:
    with pytest.raises(ValueError, match=r"--(port|host) must be"):
        server_command(find_champion(MODEL, client), host, port)


def test_a_port_that_is_taken_is_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"nothing can listen on --host 127\.0\.0\.1 --port {port} \(.*in use"):
            check_is_free("127.0.0.1", port)
    check_is_free("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"--host 192\.0\.2\.1 --port 1234 \(Cannot assign"):
        check_is_free("192.0.2.1", 1234)


def test_numbers_that_are_none_are_refused(client: MlflowClient, tmp_path: Path) -> None:
    from rayspec.serving.record import files_sha256

    folder = find_champion(MODEL, client).folder
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    edit_record(folder, files=files_sha256(folder))
    with pytest.raises(ValueError, match=r"fc\.weight holds NaN or Inf"):
        find_champion(str(folder), client)


def test_ready_files_of_the_winners(client: MlflowClient, tmp_path: Path) -> None:
    sweep = find_sweep(client)
    written = emit(sweep, tmp_path / "ready", "drafter-target")
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


def test_ready_files_replace_their_own_alone(client: MlflowClient, tmp_path: Path) -> None:
    sweep = find_sweep(client)
    place = emit(sweep, tmp_path)[0].parent
    (place / "vllm.sh").write_text("of an earlier drafter")
    assert place / "vllm.sh" not in emit(sweep, tmp_path) or "earlier" not in (place / "vllm.sh").read_text()
    (place / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="beside the files of a winner that is there lies notes\\.txt; nothing"):
        emit(sweep, tmp_path)
    assert (place / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("label", ["a tree", "drafts made of each other"])
def test_of_other_drafts_than_chains_only_what_was_measured_is_said(label: str, client: MlflowClient) -> None:
    sweep = find_sweep(client)
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


def test_the_adaptive_file_is_sglangs(client: MlflowClient, tmp_path: Path) -> None:
    """SGLang's own loader reads it, and what it routes to is what the policy would take."""
    from sglang.srt.speculative.adaptive_spec_params import (
        AdaptiveSpeculativeParams,
        resolve_candidate_steps_from_config,
    )

    from sglang_ext.policy.choice import MeasuredPolicy

    sweep = find_sweep(client)
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


def test_what_is_not_there_is_named(client: MlflowClient, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="has no models:/nobody@champion"):
        find_champion("models:/nobody@champion", client)
    for source in ("nowhere", "", "http://user:correct-horse@host/x"):
        with pytest.raises(ValueError, match="neither a folder nor models:/NAME@ALIAS") as error:
            find_champion(source, client)
        assert "correct-horse" not in str(error.value)
    client.create_registered_model("stranger")
    client.create_model_version("stranger", tmp_path.as_uri())
    with pytest.raises(ValueError, match=r"carries no evidence .*tag serving\.sha256 is missing"):
        find_champion("models:/stranger/1", client)


def test_the_plan_of_the_command(
    client: MlflowClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSPEC_API_KEY", "correct-horse")
    assert command.main([MODEL, "--plan", "--port", "31000", "--", "--log-level", "warning"]) == 0
    said = capsys.readouterr().out
    assert "of plain decoding" in said
    assert "--port 31000 --log-level warning" in said
    assert "correct-horse" not in said
    assert command.main(["models:/nobody@champion", "--plan"]) == 2
    assert "has no models:/nobody@champion" in capsys.readouterr().err


def test_the_log_of_the_command_as_objects(client: MlflowClient, place: Path) -> None:
    """A process of its own, whatever else is imported in it; also for what may not be served."""
    for source, status in ((MODEL, 0), ("models:/nobody@champion", 2)):
        words = ["serve", source, "--plan", "--log-format", "json", "--host", "0.0.0.0", "--replicas", "2"]
        done = subprocess.run(
            [sys.executable, "-m", "rayspec.cli", *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stderr
        lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
        assert {line["logger"] for line in lines} == {"rayspec.serve"}
        assert all({"time", "level", "process", "message"} <= line.keys() for line in lines)
        levels = {line["level"]: line for line in lines}
        if status == 0:
            assert levels["INFO"]["message"].startswith("through Ray Serve")
            assert "set RAYSPEC_API_KEY" in levels["WARNING"]["message"]
            assert lines[0]["version"] == "drafter-target version 1"
        else:
            assert "has no models:/nobody@champion" in levels["ERROR"]["message"]


BAD_OPTIONS = {
    "--replicas 0": "--replicas must be in 1..1000, got 0",
    "--replicas 1001": "--replicas must be in 1..1000, got 1001",
    "--replicas 2 --min-replicas 1 --max-replicas 2": "--replicas is a fixed number",
    "--min-replicas 2": "--min-replicas and --max-replicas go together",
    "--min-replicas 0 --max-replicas 2": "must be 1 <= min <= max <= 1000, got 0 and 2",
    "--min-replicas 3 --max-replicas 2": "must be 1 <= min <= max <= 1000, got 3 and 2",
    f"--min-replicas 1 --max-replicas {10**25}": "must be 1 <= min <= max <= 1000, got 1 and 1",
    "--router prefix": "--router is of Ray Serve, which --replicas or --follow begins",
    "--replicas 2 --router fastest": "--router must be one of balanced, prefix, got 'fastest'",
    "--replicas 2 --drain-seconds 0": "--drain-seconds must be above 0 and at most 86400 (a day), got 0",
    "--replicas 2 --drain-seconds nan": "--drain-seconds must be above 0 and at most 86400 (a day), got nan",
    "--replicas 2 --drain-seconds inf": "--drain-seconds must be above 0 and at most 86400 (a day), got inf",
    "--replicas 2 --requests-each 4": "--requests-each goes with --min-replicas and --max-replicas",
    "--scale-down-seconds 9": "--scale-down-seconds is of Ray Serve",
    "--min-replicas 1 --max-replicas 2 --scale-down-seconds inf": "--scale-down-seconds must be above 0 and at most",
    "--min-replicas 1 --max-replicas 2 --requests-each 0": "--requests-each must be in 1..2048",
    f"--min-replicas 1 --max-replicas 2 --requests-each {10**25}": "--requests-each must be in 1..2048",
    "--poll-seconds 5": "--poll-seconds and --watch-seconds are of --follow",
    "--follow --poll-seconds 0": "--poll-seconds must be above 0 and at most 86400 (a day), got 0",
    "--follow --poll-seconds nan": "--poll-seconds must be above 0 and at most 86400 (a day), got nan",
    "--follow --watch-seconds inf": "--watch-seconds must be in 0..86400 (a day), got inf",
    f"--port {10**25}": "--port must be in 1..65535",
    "--webhook-port 31001": "add --follow, or leave --webhook-port out",
    "--follow --webhook-host ::": "--webhook-host goes with --webhook-port",
    "--follow --webhook-port 31001 --webhook-host=": "--webhook-host must be an address of this machine or a name",
    "--follow --webhook-port 30000": "--webhook-port must be another than --port, got 30000 for both",
    "--follow --webhook-port 0": "--webhook-port must be in 1..65535, got 0",
    "--follow --webhook-port 31001": "needs the secret of MLflow's webhook in RAYSPEC_WEBHOOK_SECRET",
}


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_options_of_ray_serve_that_make_no_sense(
    options: str, client: MlflowClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([MODEL, "--plan", *options.split()]) == 2
    assert BAD_OPTIONS[options] in capsys.readouterr().err


def test_a_folder_is_served_without_mlflow(
    client: MlflowClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find_champion(MODEL, client).folder
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens there
    for options in ([], ["--replicas", "1"]):
        assert command.main([str(folder), "--plan", *options]) == 0
    assert command.main([MODEL, "--plan"]) == 2
    assert "http://127.0.0.1:9" in capsys.readouterr().err
    assert command.main([str(folder), "--plan", "--follow"]) == 2
    assert "--follow needs models:/NAME@ALIAS" in capsys.readouterr().err


def test_the_servers_of_a_ray_service(client: MlflowClient) -> None:
    """Built as Ray Serve does from its configuration: checked, and pinned to a version."""
    from rayspec.serving.service import servers

    built = servers({"source": MODEL, "min_replicas": 1, "max_replicas": 3, "gpus": 1})._bound_deployment
    (version, board), options = built.init_args, built._deployment_config.autoscaling_config
    assert (version.source, version.name, board) == ("models:/drafter-target/1", "drafter-target version 1", None)
    assert (options.min_replicas, options.max_replicas) == (1, 3)
    assert built.ray_actor_options["num_gpus"] == 1
    with pytest.raises(TrackingError, match="has no models:/nobody@champion"):
        servers({"source": "models:/nobody@champion"})
    with pytest.raises(ValueError, match="must be 1 <= min <= max <= 1000, got 2 and 1"):
        servers({"source": MODEL, "min_replicas": 2})


def test_the_plan_of_replicas(
    client: MlflowClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSPEC_WEBHOOK_SECRET", "correct-horse-battery")
    assert command.main([MODEL, "--plan", "--follow", "--webhook-port", "31001", "--webhook-host", "::1"]) == 0
    said = capsys.readouterr().out
    assert "MLflow's webhook tells of a new version at http://[::1]:31001/webhook" in said
    assert "correct-horse" not in said
    assert command.main([MODEL, "--plan", "--follow", "--min-replicas", "1", "--max-replicas", "3"]) == 0
    said = capsys.readouterr().out
    assert "through Ray Serve: 1 to 3 replica(s), router balanced" in said
    assert "drafter-target version 1" in said
    assert command.main(["models:/drafter-target/1", "--plan", "--follow"]) == 2
    assert "--follow needs models:/NAME@ALIAS" in capsys.readouterr().err


def test_the_key_is_of_a_file_or_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYSPEC_API_KEY", raising=False)
    assert api_key(None) is None
    monkeypatch.setenv("RAYSPEC_API_KEY", "from-there")
    assert api_key(None) == "from-there"
    (tmp_path / "key").write_text("from-a-file\n")
    assert api_key(str(tmp_path / "key")) == "from-a-file"
    for text in ("", "two words", "\x07", "schlüssel", "-begins-like-an-option"):
        (tmp_path / "key").write_text(text)
        with pytest.raises(ValueError, match="must be one word of printable ASCII characters"):
            api_key(str(tmp_path / "key"))
    with pytest.raises(ValueError, match="cannot be read"):
        api_key(str(tmp_path / "nothing"))


def test_who_asks_has_another_key_than_who_changes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSPEC_API_KEY", "correct-horse")
    monkeypatch.setenv("RAYSPEC_ADMIN_KEY", "correct-horse")
    with pytest.raises(ValueError, match="RAYSPEC_ADMIN_KEY must be another key") as caught:
        Access.given(None, 5)
    assert "horse" not in str(caught.value)


def test_the_server_finds_the_key_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSPEC_API_KEY", "correct-horse")
    monkeypatch.setenv("RAYSPEC_ADMIN_KEY", "battery-staple")
    out = tmp_path / "out"
    script = tmp_path / "server.sh"
    lines = [
        f'env > "{out}.env"',
        f'cat "$2" > "{out}"',
        f'stat -c %a "$2" > "{out}.mode"',
        f'echo "$2" > "{out}.path"',
    ]
    script.write_text("\n".join(["#!/bin/sh", *lines, "exit 7\n"]))
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    assert serve([str(script)], Access.given(None, 5), num_threads=3) == 7
    assert yaml.safe_load(out.read_text()) == {"api-key": "correct-horse", "admin-api-key": "battery-staple"}
    assert Path(f"{out}.mode").read_text().strip() == "600"
    variables = Path(f"{out}.env").read_text()
    assert "OMP_NUM_THREADS=3" in variables
    assert "RAYSPEC_MAX_BODY_MIB=5" in variables
    assert not any(key in variables for key in ("correct-horse", "battery-staple"))
    assert not os.path.exists(Path(f"{out}.path").read_text().strip())


def test_without_an_administrators_key_nobody_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would leave the routes that exchange weights open to whoever may ask for completions."""
    monkeypatch.delenv("RAYSPEC_ADMIN_KEY", raising=False)
    script, found = tmp_path / "server.sh", []
    script.write_text(f'#!/bin/sh\ncat "$2" > "{tmp_path}/out"\n')
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    for _ in range(2):
        assert serve([str(script)], Access(), num_threads=None) == 0
        found.append(yaml.safe_load((tmp_path / "out").read_text()))
    keys = [entry.pop("admin-api-key") for entry in found]
    assert found == [{}, {}]
    assert keys[0] != keys[1]
    assert min(map(len, keys)) >= 32


def rate(requests: Sequence[Mapping[str, Any]]) -> float:
    """Tokens after the first, a second of a request."""
    return sum(r["output_tokens"] - 1 for r in requests) / sum(r["e2e_s"] - r["ttft_s"] for r in requests)


def test_a_machine_that_slows_down_changes_no_cost() -> None:
    def answer(block: int, seconds: float, verify_steps: int) -> dict[str, Any]:
        steps = {"verify_steps": verify_steps, "accepted_drafts": 20 - verify_steps}
        return {"block": block, "ttft_s": 0.1, "e2e_s": 0.1 + seconds, "output_tokens": 21, **steps}

    plain = [answer(0, 2.0, 0), answer(1, 4.0, 0)]  # while the second was measured, everything took twice as long
    for block, seconds in ((0, 1.5), (1, 3.0)):
        assert beside_plain([answer(block, seconds, 10)], 2, plain) == pytest.approx(225.0)
    assert beside_plain(plain, 0, plain) == pytest.approx(150.0)
    assert beside_plain([answer(7, 1.5, 10)], 2, plain) is None, "nothing was decoded plainly beside it"


def test_the_champions_policy_is_what_was_measured(client: MlflowClient, tmp_path: Path) -> None:
    """Its expected rates against plain decoding, at the acceptance of the sweep, are those of the same blocks."""
    sweep = find_sweep(client)
    plain = {r.trial.traffic: sweep.requests(r.trial) for r in sweep.results if r.trial.label == PLAIN}
    files = [file for file in emit(sweep, tmp_path / "ready") if file.name == POLICY]
    assert files
    for file in files:
        table = read_table(file)
        best = next(r for r in sweep.results if r.trial.name == file.parent.name)
        assert table.lengths == [0, 2, 4]
        assert table.about["drafter"] == best.trial.label
        for result in (r for r in sweep.results if r.trial.label == best.trial.label):
            trial = result.trial
            requests = sweep.requests(trial)
            beside = [r for r in plain[trial.traffic] if r["block"] in {r["block"] for r in requests}]
            streams = trial.traffic.concurrency
            expected = result.metrics["tau"] * table.step_ms(0, streams) / table.step_ms(trial.draft_steps, streams)
            assert expected == pytest.approx(rate(requests) / rate(beside), rel=1e-3)
            assert table.step_ms(0, streams) == pytest.approx(1e3 / rate(plain[trial.traffic]), rel=1e-3)
        longest = [r for r in sweep.results if r.trial.label == best.trial.label and r.trial.draft_steps == 4]
        shares = [r.metrics["accept_cond_1"] for r in longest]
        assert min(shares) - 1e-3 <= table.accepted_if_reached[0] <= max(shares) + 1e-3


def test_a_champion_is_served_with_its_policy(client: MlflowClient) -> None:
    champion = find_champion(MODEL, client)
    assert champion.policy is not None
    words = server_command(champion, "127.0.0.1", 31000)
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags["--speculative-adaptive-config"] == str(champion.folder / POLICY)
    assert (flags["--speculative-num-steps"], flags["--speculative-num-draft-tokens"]) == ("4", "5")
    fixed = server_command(champion, "127.0.0.1", 31000, follows_policy=False)
    assert "--speculative-adaptive-config" not in fixed
    assert fixed[fixed.index("--speculative-num-steps") + 1] == champion.record.evidence["draft_steps"]


def test_a_damaged_policy_takes_no_traffic(client: MlflowClient) -> None:
    folder = find_champion(MODEL, client).folder
    (folder / POLICY).write_text("{}")
    with pytest.raises(ValueError, match=r"is not what was promoted: policy\.json was changed"):
        find_champion(str(folder), client)


def test_one_load_gives_no_policy(client: MlflowClient) -> None:
    sweep = find_sweep(client)
    best = winner(sweep.results)
    alone = [r for r in sweep.results if r.trial.traffic == best.trial.traffic]
    assert measured_policy(dataclasses.replace(sweep, results=tuple(alone)), best) is None
