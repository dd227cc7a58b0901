"""Endpoints as a side of the gate: what is asked of a server, what its answers become, and what each failure says."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from openai_server import TOKENS, Manners, openai_server

from rayspec.gate.config import GateConfig
from rayspec.gate.decision import Verdict
from rayspec.gate.endpoint import MAX_BODY, MAX_TOKEN_BYTES, EndpointSide, checked_address, endpoint_key
from rayspec.gate.rounds import Gate
from rayspec.gate.run import EndpointOptions, endpoints
from rayspec.gate.sides import MeasureFailed
from rayspec.gate.wire import Chunk
from rayspec.workloads import Conversation

PROMPT = Conversation(id="p1", category="c", turns=("four words of text",))
TWO_TURNS = Conversation(id="p2", category="c", turns=("one", "two"), system="be brief")


def side(
    address: str, *, model: str | None = None, key: str | None = None, ready_by: float | None = None, **settings: Any
) -> EndpointSide:
    return EndpointSide("candidate", address, GateConfig(**settings), model=model, key=key, ready_by=ready_by)


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_whatever_a_server_calls_it_is_output(field: str) -> None:
    assert Chunk.model_validate_json(json.dumps({"choices": [{"delta": {field: "so"}}]})).text == "so"


@contextmanager
def connected(manners: Manners, **settings: Any) -> Iterator[EndpointSide]:
    with openai_server(manners) as address:
        one = side(address, **settings)
        try:
            one.connect(PROMPT)
            yield one
        finally:
            one.stop()


def test_sglang_tells_tau_with_each_answer() -> None:
    manners = Manners()
    with openai_server(manners) as address:
        one = side(address, ignore_eos=True, max_new_tokens=9)
        one.connect(PROMPT)
        block = one.answer([PROMPT, TWO_TURNS])
        one.stop()
    assert one.tells_tau
    assert [(a.prompt_id, a.turn) for a in block.answers] == [("p1", 0), ("p2", 0), ("p2", 1)]
    assert {(a.tokens, a.verify_steps, a.accepted_drafts, a.output) for a in block.answers} == {
        (TOKENS, 6, 6, "a" * TOKENS)
    }
    assert block.answers[0].prompt_tokens == 4
    assert all(0 < a.ttft_s < a.e2e_s <= block.wall_s for a in block.answers)
    asked = manners.requests[-1]
    assert (asked["model"], asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == ("demo", 9, True, 0)
    last = next(r for r in manners.requests if len(r["messages"]) == 4)
    assert [m["role"] for m in last["messages"]] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("info", "adapts"),
    [
        (b'{"speculative_adaptive": false, "speculative_adaptive_config": null}', False),
        (b'{"speculative_adaptive": true}', True),
        (b'{"speculative_adaptive_config": "/policy.json"}', True),
        (b"Not Found", False),
    ],
)
def test_a_server_that_chooses_its_draft_length_is_judged_by_speed_alone(info: bytes, adapts: bool) -> None:
    with openai_server(Manners()) as fixed, openai_server(Manners(info=info)) as other:
        asked = [fixed, other], [EndpointOptions()] * 2
        with endpoints(GateConfig(), *asked, deadline=time.monotonic() + 60) as ready:
            assert ready.has_tau is not adapts
    named = f"{other} chooses its draft length as it goes (rayspec serve --no-policy keeps one)"
    assert list(ready.notes) == [named] * adapts


def test_vllm_tells_tau_by_its_counters() -> None:
    with openai_server(Manners(owner="vllm", verify_steps=5, accepted=3)) as address:
        one = side(address)
        one.connect(PROMPT)
        answers = one.answer([PROMPT, TWO_TURNS]).answers
        one.stop()
    assert one.tells_tau
    assert [(a.verify_steps, a.accepted_drafts) for a in answers] == [(15, 9), (0, 0), (0, 0)]  # of three requests


@pytest.mark.parametrize(
    ("accepted", "verdict"), [(20, Verdict.PASS), (16, Verdict.REGRESSION)], ids=["same", "tau -10%"]
)
def test_four_streams_of_vllm_have_a_verdict_about_tau(accepted: int, verdict: Verdict) -> None:
    """Their counters tell a block's counts; 16 more streams would have no speed to be judged by here."""
    manners = Manners(owner="vllm", seconds_per_token=0, tokens=2, verify_steps=20, accepted=20)
    with ExitStack() as stack:
        sides = [stack.enter_context(connected(m)) for m in (manners, replace(manners, accepted=accepted, requests=[]))]
        prompts = [Conversation(id=f"p{i}", category="c", turns=(f"text {i}",)) for i in range(48)]
        gate = Gate(GateConfig(concurrency=4, speed_loss=0.99), sides, prompts, has_tau=True)
        gate.run(time.monotonic() + 100)
    assert all(s.counts_blocks for s in sides)
    assert gate.tau is not None
    assert gate.tau.verdict is verdict
    assert len(gate.measured.counts.steps) == 12


COUNTERS = b"""# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total %s
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total %s
"""


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (COUNTERS % (b"3", b"9"), "counted -7 verify steps and 4 accepted drafts at /metrics over a block"),
        (COUNTERS % (b"NaN", b"9"), "counted nan verify steps"),
        (COUNTERS % (b"1e300", b"9"), "counted 1e\\+300 verify steps"),
        (COUNTERS % (b"20", b"+Inf"), "counted 10 verify steps and inf accepted"),
        (b"\xff{{{", "no longer tells its verify steps at /metrics; look whether it was restarted"),
        (b"a{", "no longer tells its verify steps"),
    ],
    ids=["back", "nan", "huge", "inf", "garbage", "cut"],
)
def test_counters_that_cannot_be_are_no_counts(later: bytes, message: str) -> None:
    manners = Manners(owner="vllm", metrics=[COUNTERS % (b"10", b"5")])
    with connected(manners) as one:
        manners.metrics = [later]
        with pytest.raises(MeasureFailed, match=message):
            one.answer([PROMPT])


@pytest.mark.parametrize("metrics", [b"\xff{{{", b"a{", b"<html>", b"\n".join([b"#"] * 3)])
def test_metrics_that_are_none_tell_no_tau(metrics: bytes) -> None:
    with connected(Manners(owner="vllm", metrics=[metrics])) as one:
        assert (one.tells_tau, one.counts_blocks) == (False, False)


def test_another_server_is_asked_for_nothing_that_it_may_not_know() -> None:
    manners = Manners(owner="somebody")
    with openai_server(manners) as address:
        one = side(address, ignore_eos=True, chat_template=False)
        one.connect(PROMPT)
        one.stop()
    assert not one.tells_tau
    known = {"model", "max_tokens", "temperature", "stream", "stream_options", "prompt"}
    assert set(manners.requests[0]) == known
    assert manners.paths == ["/v1/completions"]


@pytest.mark.parametrize(
    ("manners", "message"),
    [
        (Manners(raw=b"data: " + b"x" * (MAX_BODY + 65 * MAX_TOKEN_BYTES)), "sent more than 17 MiB for prompt p1"),
        (Manners(status=500, error=b"x" * (MAX_BODY + 1)), "sent more than 16 MiB for prompt p1"),
        (Manners(listing=b" " * (MAX_BODY + 1)), "sent more than 16 MiB for /models"),
    ],
    ids=["stream", "error", "listing"],
)
def test_what_has_no_end_is_not_kept(manners: Manners, message: str) -> None:
    with openai_server(manners) as address:
        one = side(address)
        with pytest.raises(MeasureFailed, match=message):
            one.connect(PROMPT)
        one.stop()


def test_a_key_that_a_server_repeats_is_not_told() -> None:
    with openai_server(Manners(key="correct-horse", status=500, error=b"of correct-horse: \x1b[2Jno")) as address:
        one = side(address, key="correct-horse")
        with pytest.raises(MeasureFailed, match=r"with status 500: of \*\*\*: \\x1b\[2Jno$"):
            one.connect(PROMPT)
        one.stop()


def test_a_key_is_sent_and_never_told() -> None:
    with openai_server(Manners(key="correct-horse")) as address:
        right = side(address, key="correct-horse")
        right.connect(PROMPT)
        right.stop()
        wrong = side(address, key="battery-staple")
        with pytest.raises(
            MeasureFailed, match=r"candidate http.* refused the key \(status 401\); set RAYSPEC_CAND"
        ) as e:
            wrong.connect(PROMPT)
        wrong.stop()
    assert "battery" not in repr(e.value) + repr(e.value.__cause__) + repr(vars(wrong)["label"])


@pytest.mark.parametrize(
    ("manners", "message"),
    [
        (Manners(models=("x", "y")), r"has several models \(it has x, y\); name one with --candidate-model"),
        (Manners(models=()), r"has several models \(it has none\)"),
        (Manners(status=500), "failed on prompt p1 with status 500: .*out of memory"),
        (Manners(status=503), "failed on prompt p1 with status 503"),
        (Manners(status=400), "refused prompt p1 with status 400: .*out of memory"),
        (Manners(status=404), r"has no model 'demo' at this address \(status 404"),
        (Manners(status=429), "limits its requests"),
        (Manners(hangs_s=1.0), "did not complete prompt p1 within request_timeout_s=0.5|sent nothing for"),
        (
            Manners(seconds_per_token=0.2),
            "did not complete prompt p1 within request_timeout_s=0.5; it hangs or is over",
        ),
        (Manners(tokens=0), "answered the first prompt with nothing"),
        (Manners(sends_usage=False), "ended the stream of prompt p1 without usage"),
        (Manners(raw=b"data: <html>\n\n"), "sent what is no JSON object in the stream of prompt p1"),
        (Manners(raw=b'data: {"error": {"message": "aborted"}}\n\n'), "broke off prompt p1: .*aborted"),
        (Manners(raw=b"hello"), "ended the stream of prompt p1 without usage"),
        (Manners(cuts_off_after=0), r"is gone \(RemoteProtocolError, prompt p1\); look whether it runs"),
    ],
    ids=lambda value: (
        None if isinstance(value, str) else str(replace(value, requests=[], paths=[], authorizations=[]) != Manners())
    ),
)
def test_each_failure_has_words_of_its_own(manners: Manners, message: str) -> None:
    with openai_server(manners) as address:
        one = side(address, request_timeout_s=0.5)
        with pytest.raises(MeasureFailed, match=message) as caught:
            one.connect(PROMPT)
        one.stop()
    assert str(caught.value).startswith(f"candidate {address} ")


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": [3]},
        {"choices": {"0": {"text": "x"}}},
        {"choices": [{"delta": "x"}]},
        {"choices": [{"text": ["x"]}]},
        {"usage": [1]},
        {"usage": "many"},
        {"usage": 5},
        {"usage": {"prompt_tokens": "x", "completion_tokens": 3}},
        {"usage": {"prompt_tokens": 3, "completion_tokens": 10**400}},
        {"usage": {"prompt_tokens": 3, "completion_tokens": -1}},
        {"usage": {"prompt_tokens": 3, "completion_tokens": 2.5}},
        {"usage": {"prompt_tokens": True, "completion_tokens": 2}},
        {"sglext": "x"},
        {"sglext": {"spec_tokens_details": "many"}},
        {"sglext": {"spec_tokens_details": {"spec_verify_ct": None}}},
        {"sglext": {"spec_tokens_details": {"spec_verify_ct": 10**10}}},
        {"sglext": {"spec_tokens_details": {"spec_num_correct_drafts": -3}}},
    ],
    ids=lambda chunk: json.dumps(chunk)[:60],
)
def test_what_is_no_answer(chunk: dict[str, Any]) -> None:
    with (
        openai_server(Manners(raw=f"data: {json.dumps(chunk)}\n\n".encode())) as address,
        pytest.raises(MeasureFailed, match=r"sent what is no answer in the stream of prompt p1: \{"),
    ):
        side(address).connect(PROMPT)


@pytest.mark.parametrize(
    "listing",
    [
        b"[]",
        b"{",
        b'{"data": {"id": "demo"}}',
        b'{"data": [{"root": "demo"}]}',
        b'{"data": [{"id": 5}]}',
        b'{"data": [{"id": ["demo"]}]}',
        b'{"data": [{"id": "demo", "root": {"a": 1}}]}',
        b'{"data": [{"id": "demo", "owned_by": 3}]}',
        b'{"data": "\xff"}',
    ],
)
def test_what_is_no_list_of_models(listing: bytes) -> None:
    with (
        openai_server(Manners(listing=listing)) as address,
        pytest.raises(MeasureFailed, match="lists no models at /models; an endpoint's address ends with /v1"),
    ):
        side(address).connect(PROMPT)


@pytest.mark.parametrize(
    ("request_timeout_s", "left_s", "message"),
    [
        (0.5, 60.0, "did not answer /models within request_timeout_s=0.5; .* raise request_timeout_s"),
        (60.0, 0.5, "was not ready within max_minutes=10; .* raise max_minutes"),
        (60.0, -1.0, "was not ready within max_minutes=10"),
    ],
    ids=["request", "gate", "over"],
)
def test_a_list_of_models_that_trickles_ends_by_the_limit_that_it_names(
    request_timeout_s: float, left_s: float, message: str
) -> None:
    """A byte every 50 ms: in all 5 s, none of which is without an answer."""
    with openai_server(Manners(trickles_s=0.05)) as address:
        one = side(address, request_timeout_s=request_timeout_s, ready_by=time.monotonic() + left_s)
        begin = time.monotonic()
        with pytest.raises(MeasureFailed, match=message):
            one.connect(PROMPT)
        assert time.monotonic() - begin < 4
        one.stop()


def test_first_answers_end_with_the_gate_s_time_and_later_ones_do_not() -> None:
    with openai_server(Manners(seconds_per_token=0.2)) as address:
        one = side(address, ready_by=time.monotonic() + 1)
        with pytest.raises(MeasureFailed, match="was not ready within max_minutes=10"):
            one.connect(PROMPT)
        one.stop()
    manners = Manners()
    with openai_server(manners) as address:
        one = side(address, ready_by=time.monotonic() + 3)
        one.connect(PROMPT)
        one.warm_up([PROMPT])
        manners.seconds_per_token = 0.3
        assert one.answer([PROMPT]).wall_s > 3, "the gate's loop looks after the rest"
        one.stop()


def test_who_is_not_there() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        one = side(f"http://127.0.0.1:{s.getsockname()[1]}/v1")
        with pytest.raises(MeasureFailed, match=r"cannot be reached \(ConnectError\); look whether it runs"):
            one.connect(PROMPT)
        one.stop()


def test_a_model_is_named() -> None:
    with openai_server(Manners(models=("x", "y"))) as address:
        one = side(address, model="y")
        one.connect(PROMPT)
        other = side(address, model="z")
        with pytest.raises(MeasureFailed, match=r"has no model 'z' \(it has x, y\)"):
            other.connect(PROMPT)
        assert one.model.name == "y"
        for s in (one, other):
            s.stop()


@pytest.mark.parametrize(
    "address",
    ["http://", "http://user:secret@host/v1", "http://host:99999/v1", "http://h/v1?key=secret", "http://[::1"],
)
def test_what_is_no_address_is_not_repeated(address: str) -> None:
    with pytest.raises(ValueError, match="an endpoint must be") as caught:
        checked_address(address)
    assert "secret" not in str(caught.value)


def test_keys(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYSPEC_API_KEY", "RAYSPEC_BASELINE_API_KEY", "RAYSPEC_CANDIDATE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert endpoint_key("baseline", None) is None
    monkeypatch.setenv("RAYSPEC_API_KEY", "both")
    monkeypatch.setenv("RAYSPEC_CANDIDATE_API_KEY", "own")
    assert (endpoint_key("baseline", None), endpoint_key("candidate", None)) == ("both", "own")
    (tmp_path / "key").write_text("of-the-file\n")
    assert endpoint_key("candidate", str(tmp_path / "key")) == "of-the-file"
    monkeypatch.setenv("RAYSPEC_CANDIDATE_API_KEY", "two secret words")
    with pytest.raises(ValueError, match="the key of RAYSPEC_CANDIDATE_API_KEY must be one word") as caught:
        endpoint_key("candidate", None)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read"):
        endpoint_key("candidate", str(tmp_path / "nowhere"))
