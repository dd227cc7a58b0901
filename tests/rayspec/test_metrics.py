"""Metrics against numbers worked out by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from rayspec.metrics import (
    Slo,
    break_even_rho,
    head_kappa,
    output_mismatches,
    scored_by_position,
    tau_by_category,
    trial_metrics,
)
from rayspec.records import BlockRecord, Measured, RequestRecord, StepSeconds
from rayspec.sweep.record.metric_names import metric_key, metric_name

MakeRequest = Callable[..., RequestRecord]


def block(*requests: RequestRecord, wall_s: float = 2.0, step_seconds: StepSeconds | None = None) -> BlockRecord:
    measured = Measured(wall_s=wall_s, requests=requests, step_seconds=step_seconds)
    return BlockRecord(index=0, prompt_block=0, measured=measured)


def test_acceptance_by_hand(make_request: MakeRequest) -> None:
    # 4 steps accepting 0, 1, 2, 2 of 2 drafts, and 1 step accepting 2: accepted 7 in 5 steps
    m = trial_metrics([block(make_request("a", (1, 1, 2), 0.1), make_request("b", (0, 0, 1), 0.1))], 2)
    assert (m["accepted_drafts"], m["verify_steps"]) == (7, 5)
    assert m["tau"] == pytest.approx(1 + 7 / 5)
    assert m["tau_request_mean"] == pytest.approx(((1 + 5 / 4) + (1 + 2 / 1)) / 2)
    assert m["accept_pos_1"] == pytest.approx(4 / 5)
    assert m["accept_pos_2"] == pytest.approx(3 / 5)
    assert m["accept_cond_2"] == pytest.approx(3 / 4)
    assert m["tau"] == pytest.approx(1 + m["accept_pos_1"] + m["accept_pos_2"])


def test_emitted_tau_counts_only_what_left_the_server(make_request: MakeRequest) -> None:
    from dataclasses import replace

    whole = make_request("a", (0, 0, 2), 0.1)  # 1 + 2 * 3 tokens
    cut = replace(whole, output_ids=whole.output_ids[:-1])
    m = trial_metrics([block(cut)], 2)
    assert (m["tau"], m["tau_emitted"]) == (3.0, 2.5)


def test_latency_by_hand(make_request: MakeRequest) -> None:
    m = trial_metrics([block(make_request("a", (2, 0, 1), 0.1, ttft_s=0.05))], 2)
    assert m["output_tokens"] == 6  # prefill's, 3 steps, 2 drafts
    assert m["output_tokens_per_s"] == pytest.approx(6 / 2.0)
    assert m["ttft_ms_p50"] == pytest.approx(50)
    assert m["tpot_ms_p50"] == pytest.approx(1e3 * 0.3 / 5)
    assert m["itl_ms_p99"] == pytest.approx(100)
    assert m["cycle_ms"] == pytest.approx(100)


def test_goodput_counts_requests_that_keep_both_limits(make_request: MakeRequest) -> None:
    fast, slow = make_request("a", (2, 0, 1), 0.1, ttft_s=0.05), make_request("b", (2, 0, 1), 0.3, ttft_s=0.05)
    late = make_request("c", (2, 0, 1), 0.1, ttft_s=0.5)  # 60 ms a token, as `fast`; `slow` takes 180
    blocks = [block(fast, slow, wall_s=2.0), block(late, wall_s=2.0)]
    m = trial_metrics(blocks, 2, Slo(ttft_ms=100, tpot_ms=60.001))
    assert m["goodput_share"] == pytest.approx(1 / 3)
    assert m["goodput_requests_per_s"] == pytest.approx(1 / 4)
    assert m["requests_per_s"] == pytest.approx(3 / 4)
    assert trial_metrics(blocks, 2, Slo(tpot_ms=60.001))["goodput_share"] == pytest.approx(2 / 3)
    assert trial_metrics(blocks, 2, Slo(ttft_ms=100))["goodput_share"] == pytest.approx(2 / 3)
    assert "goodput_share" not in trial_metrics(blocks, 2)


def test_the_largest_peak_of_memory_counts(make_request: MakeRequest) -> None:
    requests = (make_request("a", (1,), 0.1),)
    peaks = [Measured(wall_s=1, requests=requests, peak_memory_bytes=n << 30) for n in (2, 3, 1)]
    blocks = [BlockRecord(index=i, prompt_block=i, measured=m) for i, m in enumerate(peaks)]
    assert trial_metrics(blocks, 2)["peak_host_memory_gib"] == 3


def test_plain_decoding_has_no_acceptance(make_request: MakeRequest) -> None:
    m = trial_metrics([block(make_request("a", (), 0.01))], 0)
    assert "tau" not in m
    assert m["tpot_ms_p50"] == pytest.approx(10)


def test_answers_of_the_prefill_alone_have_no_tau(make_request: MakeRequest) -> None:
    from dataclasses import replace

    one = replace(make_request("a", (), 0.01), output_ids=(1,), chunk_gaps_s=(), e2e_s=0.01)
    m = trial_metrics([block(one)], 4)
    assert m["verify_steps"] == 0
    assert not {"tau", "tpot_ms_p50", "itl_ms_p50"} & set(m)


def test_step_clock_is_pooled_over_blocks(make_request: MakeRequest) -> None:
    request = make_request("a", (1,), 0.1)
    short = StepSeconds(steps=1, requests=1, verified_tokens=5, head_s=0.001, routing_s=0.0005, embedding_s=0.0001,
                        draft_s=0.002, verify_s=0.004)  # fmt: skip
    long = StepSeconds(steps=3, requests=4, verified_tokens=40, head_s=0.011, routing_s=0.0015, embedding_s=0.0003,
                       draft_s=0.022, verify_s=0.044)  # fmt: skip
    counted = (
        replace(short, scoring_rows=2, scored_tokens=9, most_scored=6),
        replace(long, scoring_rows=4, scored_tokens=33, most_scored=20),
    )
    blocks = [block(request, step_seconds=steps) for steps in counted]
    m = trial_metrics(blocks, 4)
    assert m["step_verified_tokens"] == 9
    assert (m["shortlist_mean"], m["shortlist_max"]) == (7, 20)
    assert metric_name(metric_key("shortlist_max")) == "shortlist_max"
    assert metric_key("shortlist_max") == "tradeoff/shortlist_max"
    uncounted = block(request, step_seconds=short)
    assert not {"shortlist_mean", "shortlist_max"} & set(trial_metrics([uncounted], 4))
    assert trial_metrics([*blocks, uncounted], 4)["shortlist_max"] == 20
    older = block(request, step_seconds=replace(counted[0], most_scored=0))
    assert "shortlist_max" not in trial_metrics([*blocks, older], 4), "it may have been there"
    parts = ("head", "routing", "embedding", "draft", "verify")
    assert [m[f"step_{part}_ms"] for part in parts] == pytest.approx([3, 0.5, 0.1, 6, 12])


def test_what_requests_wait_for_the_head_is_a_mean_over_requests(make_request: MakeRequest) -> None:
    """Four requests wait 3 ms, then one that is left 1 ms: 13 / 5 in the mean over requests, 2 over the two steps."""
    clock = StepSeconds(steps=2, requests=5, verified_tokens=25, head_s=0.004, head_request_s=0.013, draft_s=0.01,
                        verify_s=0.02)  # fmt: skip
    request = make_request("a", (1,), 0.1)
    m = trial_metrics([block(request, step_seconds=clock)], 4)
    assert (m["step_requests"], m["step_head_ms"]) == (2.5, pytest.approx(2))
    assert m["request_head_ms"] == pytest.approx(2.6)
    assert metric_key("request_head_ms") == "step/request_head_ms"
    older = block(request, step_seconds=replace(clock, head_request_s=None))
    assert "request_head_ms" not in trial_metrics([block(request, step_seconds=clock), older], 4)


def test_an_engine_that_counts_alone_has_no_times(make_request: MakeRequest) -> None:
    counts = StepSeconds(steps=4, requests=5, verified_tokens=25, head_s=0, draft_s=0, verify_s=0, choice_s=0,
                         scoring_rows=2, scored_tokens=9, most_scored=6)  # fmt: skip
    m = trial_metrics([block(make_request("a", (1,), 0.1), step_seconds=counts)], 4)
    assert (m["step_verified_tokens"], m["shortlist_mean"], m["shortlist_max"]) == (5, 4.5, 6)
    assert not [name for name in m if name.startswith("step_") and name.endswith("_ms")]


def test_the_choice_is_pooled_where_every_block_has_clocked_it(make_request: MakeRequest) -> None:
    old = StepSeconds(steps=1, requests=1, verified_tokens=5, head_s=0.001, draft_s=0.002, verify_s=0.004)
    clocks = replace(old, choice_s=0.0006), replace(old, steps=3, choice_s=0.001)
    request = make_request("a", (1,), 0.1)
    blocks = [block(request, step_seconds=steps) for steps in (*clocks, None)]
    assert trial_metrics(blocks, 4)["step_choice_ms"] == pytest.approx(0.4)
    assert "step_choice_ms" not in trial_metrics([*blocks, block(request, step_seconds=old)], 4)
    assert metric_name(metric_key("step_choice_ms")) == "step_choice_ms"
    assert metric_key("step_choice_ms") == "step/step_choice_ms"


def test_what_was_scored_is_pooled_at_each_position(make_request: MakeRequest) -> None:
    """Rows differ between positions, and a block may have counted fewer of these, or none (it is an older one's)."""
    old = StepSeconds(steps=1, requests=1, verified_tokens=5, head_s=0, draft_s=0, verify_s=0, scoring_rows=2,
                      scored_tokens=9)  # fmt: skip
    new = replace(old, scoring_rows_by_position=(1, 10), scored_tokens_by_position=(40, 200))
    more = replace(old, scoring_rows_by_position=(3, 0, 10), scored_tokens_by_position=(60, 0, 70))
    none = replace(old, scoring_rows_by_position=(0, 0, 0, 0), scored_tokens_by_position=(0, 0, 0, 0))
    blocks = [block(make_request("a", (1,), 0.1), step_seconds=steps) for steps in (old, new, more, none, None)]
    assert scored_by_position(blocks) == (25, 20, 7, None)
    assert scored_by_position(blocks[:1]) == ()


def test_tau_by_category(make_request: MakeRequest) -> None:
    assert tau_by_category([make_request("a", (1, 1), 0.1), make_request("b", (0, 2), 0.1)]) == {"python": 1.75}


def test_mismatches_are_counted_per_request(make_request: MakeRequest) -> None:
    plain = [block(make_request("a", (), 0.1), make_request("b", (), 0.1))]
    same, short = make_request("a", (), 0.1), make_request("b", (1,), 0.1)
    assert output_mismatches([block(same, short), block(same, short)], plain) == 2
    assert output_mismatches([block(same)], plain) == 0


def test_a_turn_after_a_different_answer_is_not_compared(make_request: MakeRequest) -> None:
    from dataclasses import replace

    first = make_request("a", (), 0.1)
    second, third = replace(first, turn=1, output_ids=(7, 8)), replace(first, turn=2, output_ids=(9,))
    plain = [block(first, second, third)]
    other = replace(second, output_ids=(7, 9))
    assert output_mismatches([block(first, second, third)], plain) == 0
    assert output_mismatches([block(first, other, replace(third, output_ids=(1,)))], plain) == 1
    assert output_mismatches([block(first, second, replace(third, output_ids=(1,)))], plain) == 1


def test_kappa_and_break_even() -> None:
    kappa = head_kappa(head_s=0.002, cycle_s=0.010)
    assert kappa == pytest.approx(0.25)
    assert head_kappa(head_s=0.011, cycle_s=0.010) is None
    assert break_even_rho(1.0, 0.25) == pytest.approx(1)  # no cheaper: nothing may be lost
    assert break_even_rho(0.0, 0.25) == pytest.approx(0.8)  # free: the head's whole share may be
