"""What is said goes by the intervals."""

import dataclasses
from collections.abc import Callable

import pytest

from rayspec.driver.publish import standing
from rayspec.farm.load import Traffic
from rayspec.report.decision import choices, decision, enumeration, verdicts
from rayspec.report.table import summary
from rayspec.statistics import Interval, beats_one
from rayspec.sweep.record.metric_names import metric_name
from rayspec.sweep.record.results import TrialResult

ONE = Traffic(concurrency=1)
Results = list[TrialResult]
Speedups = dict[str, tuple[float, ...]]  # trial: (value,) or (value, low, high) over plain decoding


@pytest.fixture
def with_speedups(results: Results) -> Callable[[Speedups], Results]:
    """The trials of these names alone, with these speed-ups over plain decoding; -c8 stands for more streams."""

    def make(speedups: Speedups) -> Results:
        made = []
        for name, values in speedups.items():
            like, _, streams = name.rpartition("-c")
            template = next(r for r in results if r.trial.name == f"{like}-c1")
            keys = [f"speedup_vs_plain{end}" for end in ("", "_ci_low", "_ci_high")]
            trial = dataclasses.replace(template.trial, traffic=Traffic(concurrency=int(streams)))
            made.append(dataclasses.replace(template, trial=trial, metrics=dict(zip(keys, values, strict=False))))
        return made

    return make


@pytest.mark.parametrize(
    ("low", "high", "claim"),
    [(1.1, 1.3, True), (0.7, 0.9, False), (0.9, 1.1, None), (1.004, 1.4, None), (0.5, 0.996, None), (None, None, None)],
    ids=["above", "below", "around", "shown as 1.00", "shown as 1.00 from below", "no interval"],
)
def test_a_claim_needs_the_whole_interval(low: float | None, high: float | None, claim: bool | None) -> None:
    assert beats_one(Interval(value=1.2, low=low, high=high)) is claim


def test_decision_by_load(with_speedups: Callable[[Speedups], Results]) -> None:
    made = with_speedups(
        {
            "slimspec-r64-s2-c1": (1.18, 1.10, 1.27),
            "full-s2-c1": (1.05, 1.01, 1.09),
            "slimspec-r64-s2-c2": (1.12, 1.05, 1.2),
            "slimspec-r64-s2-c4": (0.99, 0.9, 1.1),
            "slimspec-r64-s2-c8": (0.8, 0.7, 0.9),
            "full-s2-c8": (0.7, 0.6, 0.8),
            "slimspec-r64-s2-c16": (0.6, 0.5, 0.7),
        }
    )
    assert decision(made) == (
        "slimspec-r64 at 2 steps: 1.18x [1.10, 1.27] over plain decoding at 1 stream, 1.12x [1.05, 1.20] at 2 streams; "
        "at 8 and 16 streams turn speculation off (the best, slimspec-r64 at 2 steps 0.80x [0.70, 0.90]; slimspec-r64 "
        "at 2 steps 0.60x [0.50, 0.70], is slower than plain decoding); at 4 streams nothing is clearly faster than "
        "plain decoding, so leave speculation off (the best: slimspec-r64 at 2 steps 0.99x [0.90, 1.10]; the interval "
        "includes 1)."
    )


def test_rivals_whose_intervals_overlap_are_counted(with_speedups: Callable[[Speedups], Results]) -> None:
    made = with_speedups({"full-s2-c1": (1.2, 1.1, 1.3), "slimspec-r64-s2-c1": (1.15, 1.05, 1.25)})
    assert "(its interval overlaps with that of 1 other setting)" in decision(made)
    apart = with_speedups({"full-s2-c1": (1.2, 1.1, 1.3), "slimspec-r64-s2-c1": (1.02, 1.01, 1.05)})
    assert "overlaps" not in decision(apart)


def test_what_is_sure_goes_before_what_seems_faster(with_speedups: Callable[[Speedups], Results]) -> None:
    made = with_speedups({"full-s2-c1": (1.4, 0.9, 2.0), "slimspec-r64-s2-c1": (1.1, 1.05, 1.15)})
    (choice,) = choices(made)
    assert choice.best is made[1]
    assert choice.pays


def test_too_few_blocks_are_named(with_speedups: Callable[[Speedups], Results]) -> None:
    text = decision(with_speedups({"full-s2-c1": (1.4,)}))
    assert "nothing is clearly faster" in text
    assert "1.40x; too few blocks" in text


def test_without_a_baseline(results: Results) -> None:
    bare = [dataclasses.replace(r, metrics={"output_tokens_per_s": 1.0}) for r in results if r.trial.traffic == ONE]
    assert decision(bare) == "at 1 stream no speed-up could be measured."
    assert verdicts(bare) == {ONE: "1 stream: no speed-up could be measured."}
    assert decision([]) == "Nothing was measured."


@pytest.mark.parametrize(
    ("low", "high", "claim"),
    [
        (1.1, 1.3, "speculation pays."),
        (0.7, 0.9, "speculation does NOT pay"),
        (0.9, 1.1, "not clearly different from plain decoding"),
    ],
)
def test_verdict_goes_by_the_interval(
    with_speedups: Callable[[Speedups], Results], low: float, high: float, claim: str
) -> None:
    text = verdicts(with_speedups({"slimspec-r64-s4-c1": (1.0, low, high)}))[ONE]
    assert text.startswith("1 stream: ")
    assert claim in text


def test_loads_are_enumerated() -> None:
    loads = [Traffic(concurrency=c) for c in (1, 4, 8)] + [Traffic(request_rate=r) for r in (2.5, 5)]
    assert enumeration(loads[:1]) == "1 stream"
    assert enumeration(loads[1:3]) == "4 and 8 streams"
    assert enumeration(loads) == "1, 4 and 8 streams and 2.5 and 5 requests/s"


def test_the_baseline_is_named_whatever_it_is(results: Results) -> None:
    made = [dataclasses.replace(r, baseline="slimspec-r64") for r in results]
    text = summary(made) + "".join(standing(r) for r in made if r.metrics)
    assert "baseline slimspec-r64" in text
    assert "vs slimspec-r64 [95% CI]" in text
    assert "relative to slimspec-r64's" in text
    assert "the full head" not in text
    assert "baseline full" not in text
    assert {r.trial.label for r in made if r.is_baseline} == {"slimspec-r64"}


def test_what_runs_called_the_full_head_is_read_as_their_baseline() -> None:
    assert metric_name("speedup_vs_full_ci_low") == "speedup_vs_baseline_ci_low"
