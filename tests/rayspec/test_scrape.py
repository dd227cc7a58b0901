"""The counters of several replicas as one text."""

from rayspec.serving.figures import read_totals
from rayspec.serving.kinds import KINDS
from rayspec.serving.scrape import Told, merged, rollovers

TOLD = """\
# HELP rayspec_verified_requests_total Verify steps.
# TYPE rayspec_verified_requests_total counter
rayspec_verified_requests_total{{draft_steps="4"}} {steps}
# HELP rayspec_accepted_drafts_total Drafts.
# TYPE rayspec_accepted_drafts_total counter
rayspec_accepted_drafts_total{{position="1"}} {accepted}
# HELP sglang:e2e_request_latency_seconds Time.
# TYPE sglang:e2e_request_latency_seconds histogram
sglang:e2e_request_latency_seconds_bucket{{le="1.0"}} 1.0
sglang:e2e_request_latency_seconds_bucket{{le="+Inf"}} {requests}
sglang:e2e_request_latency_seconds_sum 3.0
sglang:e2e_request_latency_seconds_count {requests}
# HELP sglang:token_usage Share.
# TYPE sglang:token_usage gauge
sglang:token_usage 0.25
"""


def test_samples_say_whose_they_are_and_add_up() -> None:
    one, other = TOLD.format(steps=10, accepted=6, requests=2), TOLD.format(steps=30, accepted=10, requests=4)
    text = merged([Told("a", "drafter version 1", one), Told("b", "drafter version 2", other)]).decode()
    assert read_totals(text) == read_totals(one) + read_totals(other)
    lines = text.splitlines()
    assert 'rayspec_verified_requests_total{draft_steps="4",replica="b",version="drafter version 2"} 30.0' in lines
    assert 'sglang:e2e_request_latency_seconds_bucket{le="+Inf",replica="a",version="drafter version 1"} 2.0' in lines
    assert [line for line in lines if line.startswith("sglang:token_usage{")] == [
        'sglang:token_usage{replica="a",version="drafter version 1"} 0.25',
        'sglang:token_usage{replica="b",version="drafter version 2"} 0.25',
    ]
    described = [line for line in lines if line.startswith("# TYPE")]
    assert len(described) == len(set(described)) == 4, "a metric is one group"


def test_no_counters_are_none() -> None:
    assert merged([Told("a", "1", ""), Told("b", "1", "# nothing\n")]) == b""


def test_events_of_roll_overs_stand_beside_them_and_begin_with_none() -> None:
    text = merged(
        [Told("a", "drafter version 1", TOLD.format(steps=10, accepted=6, requests=2))], rollovers({"kept": 2})
    )
    counted = [line for line in text.decode().splitlines() if line.startswith("rayspec_rollover_events_total{")]
    assert len(counted) == len(KINDS)
    assert 'rayspec_rollover_events_total{event="kept"} 2.0' in counted
    assert 'rayspec_rollover_events_total{event="rolled_back"} 0.0' in counted
