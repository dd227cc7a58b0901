"""What a new version must answer before it takes traffic."""

import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from canary_answers import as_measured
from fixture_models import TARGET
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    OutOfMemoryError,
    RayTaskError,
)
from versions import EVIDENCE, answers, champion

from rayspec.serving import canary_server, cluster
from rayspec.serving.access import Access
from rayspec.serving.canary import (
    Answer,
    CanaryBounds,
    below_evidence,
    expected_ratio,
    measured_tau,
    passed,
    refusal,
    requests,
    tau,
)
from rayspec.serving.canary_actor import _readable
from rayspec.serving.canary_server import NOT_ALONE, answers_of, check_promise, check_words, try_version
from rayspec.serving.champion import Champion
from rayspec.serving.cluster import RayStage
from rayspec.serving.process import ServerFailed
from rayspec.serving.rollover import Postponed
from rayspec.serving.scale import Scale
from rayspec.serving.version import ServedVersion
from rayspec.workloads.canary import CANARY_PROMPTS
from sglang_ext.adapter.server_fields import server_fields


def test_tau_is_pooled() -> None:
    one, two = (Answer(output_ids=(), verify_steps=v, accepted_drafts=a) for v, a in ((10, 5), (30, 35)))
    assert tau([one, two]) == pytest.approx(2.0)
    assert tau([Answer(output_ids=(1,), verify_steps=0, accepted_drafts=0)]) is None


REFUSALS: dict[str, tuple[dict[str, Any], str | None]] = {
    "the same": ({}, None),
    "better": ({"new": answers(2.0)}, None),
    "another answer": ({"new": answers(1.5, different=[3])}, r"answers to 1 of 16 .* prompt 4, token 20; 0 may differ"),
    "one that may differ": ({"new": answers(1.5, different=[3]), "bounds": CanaryBounds(mismatches=1)}, None),
    "another answer, which the running version gave while it was measured": (
        {"new": answers(1.5, different=[3]), "running": as_measured(answers(1.5, different=[3]))},
        None,
    ),
    "another answer, which it gave itself while it was measured": (
        {"new": answers(1.5, different=[3]), "canary": as_measured(answers(1.5, different=[3]))},
        "answers to 1 of 16",
    ),
    "a random head": (
        {"new": answers(0.0)},
        r"below 1\.750: less than 50% of the accepted drafts .*\(tau 2\.500 on chat",
    ),
    "no speculation": (
        {"new": [dataclasses.replace(a, verify_steps=0) for a in answers(1.5)]},
        "was served without speculation",
    ),
    "8% less tau": (
        {"new": answers(1.3)},
        r"0\.920 of the running version's 2\.4.*at least 0\.950 .*1\.000 by the evid",
    ),
    "8% less, as its evidence says": ({"new": answers(1.3), "evidence": {"tau": "2.3"}}, None),
    "8% less on another workload": ({"new": answers(1.3), "evidence": {"workload": "code"}}, None),
    "30% less on another workload": (
        {"new": answers(0.75), "evidence": {"workload": "code", "tau": "2.0"}},
        "at least 0.800 was allowed .as their evidence cannot be compared",
    ),
    "beside a policy": ({"new": answers(1.3), "compares_tau": False}, None),
    "evidence without tau": ({"new": answers(1.45), "evidence": {"tau": "?"}}, None),
    "4% less than measured on these prompts": ({"new": answers(1.4), "canary": as_measured(answers(1.5))}, None),
    "8% less than measured on these prompts": (
        {"new": answers(1.3), "canary": as_measured(answers(1.5))},
        r"the 16 canary prompts that it answers as when .* is 2\.294, 0\.920 of the 2\.494 .* at least 0\.950",
    ),
    "less than the running one, as measured": ({"new": answers(1.3), "canary": as_measured(answers(1.3))}, None),
    "less than measured, beside a policy": (
        {"new": answers(1.3), "canary": as_measured(answers(1.5)), "compares_tau": False},
        "the 16 canary prompts",
    ),
    "less than measured on half of the prompts": (
        {"new": answers(1.3), "canary": as_measured(answers(1.5, different=range(8)))},
        "on the 8 canary prompts",
    ),
    "most answers are others than those measured": (
        {"new": answers(1.3), "canary": as_measured(answers(1.5, different=range(9)))},
        "of the running version's",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_canary_refuses(case: str) -> None:
    given, message = REFUSALS[case]
    options = {"new": answers(1.5), "evidence": {}, "bounds": CanaryBounds(), "compares_tau": True}
    options |= {"canary": (), "running": ()} | given
    record = dataclasses.replace(champion("2", **options["evidence"]).record, canary=options["canary"])
    found = refusal(
        options["new"],
        answers(1.5),
        record,
        dataclasses.replace(champion("1").record, canary=options["running"]),
        options["bounds"],
        compares_tau=options["compares_tau"],
    )
    if message is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(message, found), found


def test_tau_is_that_of_prompts_and_answers_that_were_measured() -> None:
    record = champion("1").record
    assert measured_tau(answers(1.5), record) is None
    known = as_measured(answers(1.0))
    others = tuple(dataclasses.replace(a, prompt=f"{a.prompt}?") for a in known)
    for canary, prompts in ((known, 16), (known[::-1], 16), (known[:8], 8), (known[:7], 0), (others, 0)):
        found = measured_tau(answers(1.5), dataclasses.replace(record, canary=canary))
        assert (found.prompts if found else 0) == prompts
        if found:
            assert found.now - found.measured == pytest.approx(0.5)


def test_what_is_said_of_one_that_passed() -> None:
    record = dataclasses.replace(champion("1").record, canary=as_measured(answers(1.5)))
    said = passed(answers(1.45, different=[3]), answers(1.5), record)
    of_tau = "tau on the canary prompts is 2.462"
    assert said == f"15 of 16 answers are the running version's; {of_tau}, 0.987 of what it was when it was measured"
    others = dataclasses.replace(record, canary=as_measured(answers(1.5, different=range(9))))
    assert f"{of_tau}; most answers are others than when" in passed(answers(1.45), answers(1.5), others)
    assert passed(answers(1.45), answers(1.5), champion("1").record).endswith(of_tau)


def test_the_ratio_that_evidence_promises() -> None:
    assert expected_ratio({**EVIDENCE, "tau": "2.0"}, EVIDENCE) == pytest.approx(0.8)
    assert expected_ratio({**EVIDENCE, "workload": "code"}, EVIDENCE) is None
    assert expected_ratio({}, {}) is None


def test_canary_prompts_follow_the_targets_template() -> None:
    class Tokenizer:
        chat_template = "x"

        def apply_chat_template(self, conversation: list[dict[str, str]], **kwargs: Any) -> list[int]:
            return [len(conversation[0]["content"])]

    assert [set(body) for body in requests(None)] == [{"text", "sampling_params"}] * len(CANARY_PROMPTS)
    assert requests(Tokenizer())[0]["input_ids"] == [len(CANARY_PROMPTS[0])]
    assert {body["sampling_params"]["temperature"] for body in requests(None)} == {0}


def test_the_first_version_is_held_against_its_evidence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    check_promise(champion("1"), answers(0.8))
    assert "drafter version 1: tau on the canary prompts is 1.794" in caplog.text
    refused: dict[str, list[Answer]] = {
        r"version 1 takes no traffic: tau .* is 1\.\d+, below 1\.750: .*with --no-canary": answers(0.1),
        "takes no traffic: it was served without speculation": [
            dataclasses.replace(a, verify_steps=0) for a in answers(1.5)
        ],
    }
    for message, found in refused.items():
        with pytest.raises(ValueError, match=message):
            check_promise(champion("1"), found)
    for no_tau in ("?", "nan", "inf", "0.5", "-1"):
        caplog.clear()
        check_promise(champion("1", tau=no_tau), answers(0.1))
        assert "its evidence holds no tau" in caplog.text
    check_promise(champion("1"), answers(0.1), ["--speculative-num-steps=1"])
    assert "--speculative-num-steps: its evidence is of another draft length" in caplog.text
    first = champion("1")
    measured = dataclasses.replace(first, record=dataclasses.replace(first.record, canary=as_measured(answers(1.5))))
    check_promise(measured, answers(1.45))
    assert "tau on the canary prompts is 2.462, 0.987 of what" in caplog.text
    with pytest.raises(ValueError, match=r"takes no traffic: .* 0\.920 of the 2\.494 .*with --no-canary"):
        check_promise(measured, answers(1.3))
    check_promise(measured, answers(1.3), ["--speculative-num-steps=1"])


@pytest.mark.parametrize(("words", "is_held"), [((), True), (("--speculative-num-steps=1",), False)])
def test_no_evidence_is_held_against_another_draft_length(
    words: tuple[str, ...], is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = dataclasses.replace(
        champion("2"), record=dataclasses.replace(champion("2").record, canary=as_measured(answers(1.5)))
    )
    monkeypatch.setattr(cluster, "find_champion", lambda *args, **kwargs: measured)
    nothing: Any = None
    serving: Any = SimpleNamespace(follows_policy=False, scale=Scale(), target=None, force=False, more=words)
    live: Any = SimpleNamespace(folder="m-1")
    found = RayStage("drafter", nothing, serving, nothing, live).check("2").record
    assert (below_evidence(answers(0.5), found, CanaryBounds()) is not None) == is_held
    assert found.target_sha256 == measured.record.target_sha256


def served(**given: Any) -> ServedVersion:
    about: dict[str, Any] = {
        "name": "drafter version 1",
        "source": "models:/drafter/1",
        "folder": "drafter-1",
        "record_sha256": "a" * 64,
        "target": None,
        "force": False,
        "follows_policy": True,
        "more": (),
        "num_threads": 2,
        "tracking_uri": None,
        "access": Access(),
    }
    return ServedVersion(**about | given)


def test_a_replica_tries_a_version_until_it_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here without a server; with one in tests/jobs/test_serve_deploy.py."""
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path))
    tried, drafts = list[ServedVersion](), 0.1

    def asked(version: ServedVersion) -> tuple[Champion, list[Answer]]:
        tried.append(version)
        return dataclasses.replace(champion("1"), name="/home/champions/drafter-1"), answers(drafts)

    monkeypatch.setattr(canary_server, "_asked", asked)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^drafter version 1 takes no traffic: .* another version in source"):
            try_version(served())
    assert len(tried) == 2
    assert not tried[0].follows_policy, "its evidence is of one draft length"
    drafts = 1.5
    for _ in range(2):
        try_version(served())
    assert len(tried) == 3
    for other in (served(more=("--speculative-num-steps=1",)), served(num_threads=1), served(record_sha256="b" * 64)):
        try_version(other)
        try_version(other)
    assert len(tried) == 6
    try_version(served())  # other settings have passed since, under the same fingerprint
    (mark,) = (file for file in tmp_path.rglob("*.passed") if file.name.startswith("a"))
    found = json.loads(mark.read_text())
    found["terms"]["releases"]["sglang"] = "0.0"
    for count, damaged in enumerate(("", "\0", "[]", "null", '"a"', "{}", '{"terms": 1}', json.dumps(found)), start=8):
        mark.write_text(damaged)
        try_version(served())
        assert len(tried) == count, damaged
    mark.unlink()
    mark.mkdir()
    try_version(served())
    assert len(tried) == 16
    assert "cannot be written" in caplog.text, "and it is served all the same"


@pytest.mark.parametrize(
    "words", [["--ssl-keyfile", "key"], ["--ssl-certfile=cert"], ["--nnodes", "2"], ["--grpc-mode"]]
)
def test_flags_under_which_no_canary_can_be_asked(words: list[str]) -> None:
    assert {flag.replace("-", "_") for flag in NOT_ALONE} <= set(server_fields())
    for on_ray in (False, True):
        check_words(["--log-level", "warning", "--trust-remote-code", "--enable-metrics"], on_ray=on_ray)
    with pytest.raises(ValueError, match=rf"^{words[0].partition('=')[0]} behind --: the canary .* add --no-canary"):
        check_words(words, on_ray=False)
    with pytest.raises(ValueError, match=r"behind --: Ray Serve's replicas .* cannot be asked"):
        check_words(words, on_ray=True)


@contextmanager
def answering(status: int, body: bytes) -> Iterator[Any]:
    """What answers every request so, in the place of a server's process; a status of 0 closes the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if status:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield SimpleNamespace(address=address, log=Path("server.log"), was_killed=False)
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "message"), [(400, "refused with status 400: too long"), (0, r"got no answer[^-]*--- end of server.log")]
)
def test_a_canary_that_does_not_answer(status: int, message: str) -> None:
    version = SimpleNamespace(access=Access(), log_format="text", more=())
    with answering(status, b"too long") as server, pytest.raises(ServerFailed, match=message):
        answers_of(server, str(TARGET), version)  # type: ignore[arg-type]


def _died_with_its_node() -> ActorDiedErrorContext:
    return ActorDiedErrorContext(
        class_name="Canary", actor_id=16 * b"1", error_message="The actor died because its node has died."
    )


def test_what_ray_says_of_a_canary() -> None:
    """A fault of the version, or of the machine."""
    for error, meant, message in (
        (RayTaskError("answers", "", ValueError("NaN")), ValueError, "did not serve: NaN"),
        (RayTaskError("answers", "", ServerFailed("it ended (signal 11)")), ValueError, r"serve: it ended \(signal 11"),
        (ActorDiedError(_died_with_its_node()), Postponed, r"lost \(ActorDiedError: .* its node has died"),
        (ActorUnavailableError("Socket closed", None), Postponed, r"lost \(ActorUnavailableError: .*Socket closed"),
        (NodeDiedError("it was drained"), Postponed, r"lost \(NodeDiedError: it was drained"),
        (GetTimeoutError(), Postponed, "no room for the canary of v within 5 s"),
        (OutOfMemoryError("the node is full"), Postponed, r"was lost \(OutOfMemoryError: the node is full"),
    ):
        with pytest.raises(meant, match=message), _readable("v", 5):
            raise error
