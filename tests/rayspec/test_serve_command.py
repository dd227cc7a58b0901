"""What `rayspec serve` says and starts, before there is a server."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fixture_models import TARGET
from mlflow import MlflowClient

from rayspec.commands import serve as command
from rayspec.farm.ranks import ranks_of
from rayspec.serving.access import check_is_free
from rayspec.serving.champion import find_champion
from rayspec.serving.events import Standing, standing_tag
from rayspec.serving.launch import MAX_QUEUED, server_command
from rayspec.tracking import TrackingError

MODEL, NOBODY = "models:/drafter-target@champion", "models:/nobody@champion"


def test_the_command_has_the_measured_settings(champion_client: MlflowClient) -> None:
    champion = find_champion(MODEL, champion_client)
    words = server_command(champion, "127.0.0.1", 31000, ["--log-level", "warning"])
    words.remove("--enable-metrics")
    quiet = words.index("--uvicorn-access-log-exclude-prefixes")
    assert words[quiet + 1 : quiet + 3] == ["/metrics", "/health"]
    del words[quiet : quiet + 3]
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
        ["--revision", "x"],
    ],
)
def test_flags_that_undo_the_checks_are_refused(words: list[str], champion_client: MlflowClient) -> None:
    with pytest.raises(ValueError, match=r"behind -- would undo what was checked"):
        server_command(find_champion(MODEL, champion_client), "127.0.0.1", 30000, words)


@pytest.mark.parametrize("words", [["--tokenizer-worker-num", "2"], ["--delete-ckpt=true"]])
def test_flags_that_harm_are_refused(words: list[str], champion_client: MlflowClient) -> None:
    with pytest.raises(ValueError, match=r"^--(tokenizer-worker-num|delete-ckpt-after-loading) behind -- .*; leave it"):
        server_command(find_champion(MODEL, champion_client), "127.0.0.1", 30000, words)


def test_flags_that_change_what_the_policy_was_measured_with_are_refused(champion_client: MlflowClient) -> None:
    champion, words = find_champion(MODEL, champion_client), ["--speculative-num-steps", "2"]
    with pytest.raises(ValueError, match=r"--speculative-num-steps behind -- would change .*add --no-policy"):
        server_command(champion, "127.0.0.1", 30000, words)
    assert server_command(champion, "127.0.0.1", 30000, words, follows_policy=False)[-2:] == words


@pytest.mark.parametrize(
    ("host", "port"), [("", 1), ("a b", 1), ("999.999.1.1", 1), ("a\0b", 1), ("::1", 0), ("::1", 65536)]
)
def test_addresses_that_are_none_are_refused(host: str, port: int, champion_client: MlflowClient) -> None:
    with pytest.raises(ValueError, match=r"--(port|host) must be"):
        server_command(find_champion(MODEL, champion_client), host, port)


def test_a_port_that_is_taken_is_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"nothing can listen on --host 127\.0\.0\.1 --port {port} \(.*in use"):
            check_is_free("127.0.0.1", port)
    check_is_free("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"--host 192\.0\.2\.1 --port 1234 \(Cannot assign"):
        check_is_free("192.0.2.1", 1234)


def test_the_plan_of_the_command(
    champion_client: MlflowClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSPEC_API_KEY", "correct-horse")
    assert command.main([MODEL, "--plan", "--port", "31000", "--", "--log-level", "warning"]) == 0
    said = capsys.readouterr().out
    assert "of plain decoding" in said
    assert "--port 31000 --log-level warning" in said
    assert "correct-horse" not in said
    assert command.main(["models:/nobody@champion", "--plan"]) == 2
    assert "has no models:/nobody@champion" in capsys.readouterr().err


def test_a_flag_that_sglang_does_not_know_is_found_by_the_plan(
    champion_client: MlflowClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([MODEL, "--plan", "--", "--log-level", "warning", "--enable-metrisc"]) == 2
    assert "SGLang's server does not take this: sglang: error: unrecognized arguments: --enable-metrisc" in (
        capsys.readouterr().err
    )


def test_a_champion_of_one_load_is_told_of(
    champion_client: MlflowClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_champion(MODEL, champion_client)
    monkeypatch.setattr("rayspec.serving.champion.find_champion", lambda *_, **__: replace(found, policy=None))
    assert command.main([MODEL, "--plan"]) == 0
    assert "warning: drafter-target version 1: its sweep measured no two loads" in capsys.readouterr().err
    assert command.main([MODEL, "--plan", "--no-policy"]) == 0
    assert "no two loads" not in capsys.readouterr().err


def test_the_log_of_the_command_as_objects(champion_client: MlflowClient, promoted: Path) -> None:
    """A process of its own, whatever else is imported in it; also for what may not be served."""
    words = ["--plan", "--log-format", "json", "--host", "0.0.0.0", "--replicas", "2"]
    twice = f"from rayspec.cli import main; print([main(['serve', s, *{words}]) for s in {[MODEL, NOBODY]}])"
    done = subprocess.run([sys.executable, "-c", twice], capture_output=True, text=True, check=True)
    *said, statuses = done.stdout.splitlines()
    assert statuses == "[0, 2]"
    lines = [json.loads(line) for line in [*said, *done.stderr.splitlines()]]
    assert {line["logger"] for line in lines} == {"rayspec.serve"}
    assert all({"time", "level", "process", "message"} <= line.keys() for line in lines)
    levels = {line["level"]: line for line in lines}
    assert levels["INFO"]["message"].startswith("through Ray Serve")
    assert "set RAYSPEC_API_KEY" in levels["WARNING"]["message"]
    assert lines[0]["version"] == "drafter-target version 1"
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
    "--poll-seconds 5": "--poll-seconds, --watch-seconds and --canary-mismatches are of --follow",
    "--canary-mismatches 1": "--poll-seconds, --watch-seconds and --canary-mismatches are of --follow",
    "--follow --canary-mismatches 16": "--canary-mismatches must be in 0..15 (there are 16 canary prompts), got 16",
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
    options: str, champion_client: MlflowClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([MODEL, "--plan", *options.split()]) == 2
    assert BAD_OPTIONS[options] in capsys.readouterr().err


def test_folders_are_said_in_full(champion_client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's actors look from other folders."""
    folder = find_champion(MODEL, champion_client).folder
    monkeypatch.chdir(folder.parent)
    options = command._parser().parse_args([folder.name, "--replicas", "1", "--target", os.path.relpath(TARGET)])
    asked = command._checked(options, [])
    assert (asked.source, asked.serving.target) == (str(folder), str(TARGET))


def test_a_folder_is_served_without_mlflow(
    champion_client: MlflowClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find_champion(MODEL, champion_client).folder
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nobody listens there
    for options in ([], ["--replicas", "1"]):
        assert command.main([str(folder), "--plan", *options]) == 0
    assert command.main([MODEL, "--plan"]) == 2
    assert "http://127.0.0.1:9" in capsys.readouterr().err
    assert command.main([str(folder), "--plan", "--follow"]) == 2
    assert "--follow needs models:/NAME@ALIAS" in capsys.readouterr().err


def test_the_servers_of_a_ray_service(champion_client: MlflowClient) -> None:
    """Built as Ray Serve does from its configuration: checked, and pinned to a version."""
    from rayspec.serving.service import servers

    args = {"source": MODEL, "min_replicas": 1, "max_replicas": 3, "gpus": 1, "max_body_mib": 5, "log_format": "json"}
    built = servers(args)._bound_deployment
    (version, board), options = built.init_args, built._deployment_config.autoscaling_config
    assert (version.source, version.name, board) == ("models:/drafter-target/1", "drafter-target version 1", None)
    assert (options.min_replicas, options.max_replicas) == (1, 3)
    assert options.initial_replicas is None, "a roll-over keeps as many as there are"
    assert (version.access.max_body_mib, version.log_format, version.tries_first) == (5, "json", True)
    assert not servers({"source": MODEL, "canary": False})._bound_deployment.init_args[0].tries_first
    assert built.ray_actor_options["num_gpus"] == 1
    with pytest.raises(TrackingError, match="has no models:/nobody@champion"):
        servers({"source": "models:/nobody@champion"})
    flags = ["--max-queued-requests", "9"]
    built = servers({"source": "models:/drafter-target/1", "flags": flags})._bound_deployment
    assert built.init_args[0].more == tuple(flags)


def test_a_login_in_the_address_stays_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve's own process reads the environment of its pod, and no job has set it up."""
    from rayspec.serving.service import servers

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@127.0.0.1:9")  # nobody listens there
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "")
    with pytest.raises(TrackingError) as caught:
        servers({"source": MODEL})
    assert "hunter2" not in str(caught.value)
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:9"
    assert (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]) == ("me", "hunter2")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"min_replicas": 2}, "^min_replicas and max_replicas must be 1 <= min <= max <= 1000, got 2 and 1"),
        ({"router": "prefx"}, "^router must be one of balanced, prefix, got 'prefx'"),
        ({"scale_down_s": 0}, "^scale_down_s must be above 0"),
        ({"target": ""}, "^target must be a folder or a name, or left out, got ''"),
        ({"gpus": -1}, "^gpus must be 0, a part of one GPU or a whole number of them, got -1"),
        ({"gpus": 1.5}, "^gpus must be 0, a part"),
        ({"flags": "--tp 2"}, r"^flags must be a list, \[a, b\], got '--tp 2'"),
        ({"flags": ["--ssl-keyfile", "key"]}, "^--ssl-keyfile behind --: Ray Serve's replicas"),
        ({"flags": ["--model-path", "x"]}, "^--model-path behind -- would undo what was checked"),
        ({"flags": ["--hf-token", "hunter2"]}, "unrecognized arguments: --hf-token;"),
    ],
)
def test_arguments_of_a_ray_service_that_make_no_sense(
    args: dict[str, Any], message: str, champion_client: MlflowClient
) -> None:
    from rayspec.serving.service import servers

    with pytest.raises(ValueError, match=message):
        servers({"source": MODEL, **args})
    with pytest.raises(ValueError, match=r"^args must be a mapping, \{key: value\}, got None"):
        servers(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measured_with", "ranks"),
    [
        ({"tp_size": 2}, 2),
        ({"tp_size": 2, "dp_size": 2}, 4),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, 2),
    ],
)
def test_a_replica_needs_a_gpu_for_each_rank(
    measured_with: dict[str, Any], ranks: int, champion_client: MlflowClient
) -> None:
    from rayspec.serving.service import ServiceArgs, _check

    champion = find_champion(MODEL, champion_client)
    flags = {**champion.record.flags, **measured_with}
    champion = replace(champion, record=replace(champion.record, flags=flags))
    for gpus in (0, ranks, 4):
        _check(champion, ServiceArgs(source=MODEL, gpus=gpus))
    for gpus in (0.5, 1, ranks - 1):
        with pytest.raises(ValueError, match=rf"^gpus must be at least {ranks}, the ranks that .*, got {gpus}"):
            _check(champion, ServiceArgs(source=MODEL, gpus=gpus))


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ([], 4),
        (["--tp-size", "1"], 2),
        (["--tensor-parallel-size=4", "--dp", "1", "--enable-metrics"], 4),
        (["--tp", "2", "--tp", "8"], 16),
        (["--enable-dp-attention"], 2),
    ],
)
def test_words_for_sglang_win_over_the_measured_ranks(words: list[str], ranks: int) -> None:
    assert ranks_of({"tp_size": 2, "dp_size": 2, "pp_size": None}, words) == ranks


def test_what_a_roll_over_has_refused_is_not_served(
    champion_client: MlflowClient, capsys: pytest.CaptureFixture[str]
) -> None:
    from rayspec.serving.service import servers

    standing = Standing(kept="7", tried="1", event="rolled_back", reason="a token takes 9 ms", time="2026-01-01")
    tag = ("drafter-target", standing_tag("champion"))
    champion_client.set_registered_model_tag(*tag, json.dumps(asdict(standing)))
    try:
        refused = "means version 1, and version 1 was rolled back (2026-01-01): a token takes 9 ms; move the alias"
        assert command.main([MODEL, "--plan"]) == 2
        assert refused in capsys.readouterr().err
        assert command.main([MODEL, "--plan", "--follow"]) == 2
        assert "version 7, which was there before, cannot be served: MLflow" in capsys.readouterr().err
        with pytest.raises(ValueError, match="version 1 was rolled back"):
            servers({"source": MODEL})
        assert command.main(["models:/drafter-target/1", "--plan"]) == 0
    finally:
        champion_client.delete_registered_model_tag(*tag)
    assert command.main([MODEL, "--plan"]) == 0


def test_the_plan_of_replicas(
    champion_client: MlflowClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
