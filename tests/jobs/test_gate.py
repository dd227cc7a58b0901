"""The command `rayspec gate` on servers that speak OpenAI's protocol."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rayspec"))  # the server of the endpoint tests

from fixture_models import DRAFTERS, PROMPTS, TARGET
from openai_server import Manners, openai_server

from rayspec.cli import main

KEY = "correct-horse-battery"
SHORT = ("--max-minutes", "2", f"workload={PROMPTS}:48")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    for name in ("MLFLOW_TRACKING_URI", "RAYSPEC_API_KEY", "RAYSPEC_BASELINE_API_KEY", "RAYSPEC_CANDIDATE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_a_slower_endpoint_of_lower_tau_fails_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSPEC_BASELINE_API_KEY", KEY)
    file = tmp_path / "gate.json"
    slow = Manners(seconds_per_token=0.02, accepted=4)
    with openai_server(Manners(key=KEY, seconds_per_token=0.002)) as base, openai_server(slow) as own:
        assert main(["gate", base, own, "--json", str(file), "--mlflow", *SHORT]) == 1
    said = capsys.readouterr().out
    assert "verdict: regression" in said
    assert "greedy outputs: 0 of" in said
    found = json.loads(file.read_text())
    assert found["verdict"] == "regression"
    assert found["speed"]["loss"] > 0.5
    assert found["tau"]["baseline"] == 2.0
    assert all([side for side, _, _ in r] in ([0, 1, 1, 0], [1, 0, 0, 1]) for r in found["blocks"])
    assert found["command"].startswith("rayspec gate http://")
    home = [f for f in (tmp_path / "home").rglob("*") if f.is_file()]
    assert home, "the MLflow run"
    assert all(KEY.encode() not in f.read_bytes() for f in [*home, file])
    assert set(slow.authorizations) == {None}, "the baseline's key is not the candidate's"


def test_servers_of_other_models_are_judged_by_speed_and_what_differs_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Which verdict so short a time gives is the machine's; that it is one of the three is ours."""
    other = Manners(owner="somebody", models=("other",))
    with openai_server(Manners()) as base, openai_server(other) as own:
        assert main(["gate", base, own, "ignore_eos=true", *SHORT]) in (0, 1, 3)
    said = capsys.readouterr().out
    assert "so speed alone was judged" in said
    assert "other models (demo, other): outputs were not compared" in said
    assert f"{own} is not known to take ignore_eos: not sent" in said


def test_different_answers_fail_where_identity_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(Manners()) as base, openai_server(Manners(word="b")) as own:
        assert main(["gate", base, own, "identity=require", *SHORT]) == 1
    assert "prompts differ; the first is prompt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (Manners(key=KEY), r"error: candidate http://\S+ refused the key (status 401)"),
        (Manners(cuts_off_after=9), "is gone (RemoteProtocolError, prompt "),
        (Manners(prompt_tokens=3), "they have other tokenizers or chat templates"),
    ],
    ids=["401", "gone on the way", "another tokenizer"],
)
def test_what_cannot_be_measured(candidate: Manners, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server(Manners()) as base, openai_server(candidate) as own:
        assert main(["gate", base, own, *SHORT]) == 2
    said = capsys.readouterr()
    assert message.replace(r"\S+", own.removeprefix("http://")) in said.err
    assert "verdict" not in said.out


HTTP = "http://127.0.0.1:9/v1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([HTTP, "full"], "are not measured alike; serve the drafter"),
        ([HTTP, HTTP, "--tau-loss", "2"], "tau_loss must be a share between 0 and 1 (0.02 is 2%), got 2"),
        ([HTTP, HTTP, "--speed-loss", "x"], "speed_loss must be a number, got 'x'"),
        ([HTTP, HTTP, "--max-minutes", "0"], "max_minutes must be positive"),
        ([HTTP, HTTP, "identity=maybe"], "identity must be one of report, require, off"),
        ([HTTP, HTTP, "identity=require", "temperature=1"], "where outputs are drawn"),
        ([HTTP, HTTP, "wrokload=chat"], "unknown key 'wrokload'"),
        ([HTTP, HTTP, "workload=chat:8"], "has 8 prompts; a gate at concurrency=1 needs at least 24"),
        ([HTTP, HTTP, "draft_steps=3"], "draft_steps: settings of engines of ours, which endpoints do not take"),
        ([HTTP, "http://user:hidden@host/v1"], "an endpoint must be http(s)://HOST:PORT/v1 without user and password"),
        ([HTTP, HTTP, "--json", "/nowhere/x.json"], "--json /nowhere/x.json: there is no folder /nowhere"),
        ([HTTP, HTTP, "--json", "/usr"], "--json /usr: that is no file"),
        ([HTTP, HTTP, "--json", "/proc/x.json"], "--json /proc/x.json: nothing can be written to /proc"),
        (["HTTP://user:x@127.0.0.1:9/v1", HTTP], "an endpoint must be http"),
        ([HTTP, HTTP, "--candidate-key-file", "/nowhere"], "--candidate-key-file /nowhere cannot be read"),
        ([str(DRAFTERS["full"]), "/nowhere", f"target={TARGET}"], "no drafter '/nowhere'"),
        (["full", "full", "--baseline-model", "x"], "belong to endpoints (http://...)"),
        ([str(DRAFTERS["full"]), "models:/nothing@champion", f"target={TARGET}"], "MLflow"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "hidden" not in said


def test_a_trickling_server_ends_with_max_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    with openai_server(Manners(trickles_s=0.5)) as base:
        assert main(["gate", base, base, "--max-minutes", "0.1", f"workload={PROMPTS}:48"]) == 2
    assert "was not ready within max_minutes=0.1" in capsys.readouterr().err
    assert time.monotonic() - begin < 40


@pytest.mark.parametrize("error", [RuntimeError, KeyError, RecursionError, AssertionError])
def test_what_breaks_in_the_gate_is_no_regression(
    error: type[Exception], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit status of a traceback is that of a regression."""

    def broken(*arguments: object) -> None:
        raise error("on the way")

    monkeypatch.setattr("rayspec.gate.run.run_gate", broken)
    assert main(["gate", HTTP, HTTP]) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "error: the gate broke (above); nothing was decided" in said


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", HTTP, HTTP]) == 2
    assert f"baseline {HTTP} cannot be reached (ConnectError); look whether it runs" in capsys.readouterr().err
