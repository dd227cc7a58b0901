"""What the counters of servers say of a version under traffic."""

import dataclasses

import numpy as np
import pytest
from rollover_cases import METRICS, traffic
from volume import volume

from rayspec.serving.board import Board
from rayspec.serving.figures import (
    FALSE_ALARM,
    Totals,
    WatchBounds,
    pooled,
    read_totals,
    silent,
    spent,
    window,
    worse,
)


def test_totals_of_a_servers_metrics() -> None:
    totals = read_totals(METRICS)
    assert totals.tau == pytest.approx(2.5)
    assert totals.tau_of_first == pytest.approx(1.9)
    assert totals.token_s == pytest.approx(0.1)
    assert totals.first_token_s == pytest.approx(0.2)
    assert (totals.asked, totals.prompt_tokens) == (12, 300)
    assert read_totals("").tau is None
    assert (totals + totals - totals) == totals


def parts(requests: float = 100, **figures: float) -> list[Totals]:
    return [traffic(requests / 10, **figures)] * 10


BEFORE = parts()
UNEVEN = [traffic(10, accepted=accepted) for accepted in (0.2, 2.6)] * 5  # tau as low as 1.1's below, but by chance


@pytest.mark.parametrize(
    ("now", "of_first_drafts", "message"),
    [
        (parts(), False, None),
        (parts(accepted=1.3), False, None),
        (parts(accepted=1.1), False, "tau under traffic is 2.100, 16% below the 2.500"),
        (parts(accepted=1.1), True, None),
        (parts(first=0.5), True, None),
        (parts(first=0.4), True, "tau of first drafts alone under traffic is 1.400, 13% below the 1.600"),
        (parts(first=0.4), False, None),
        ([*UNEVEN[:4], *parts(60, accepted=0.9)[:2]], False, None),
        (parts(token_s=0.014), False, None),
        (parts(token_s=0.016), True, "a token takes 16.0 ms under traffic, 60% more than the 10.0 ms"),
        (parts(19, accepted=0.1), False, None),
        ([traffic(accepted=0.1)], False, None),  # of one part nobody knows by how much it is chance
        ([], False, None),
    ],
)
def test_what_traffic_says(now: list[Totals], of_first_drafts: bool, message: str | None) -> None:
    found = worse(now, BEFORE, WatchBounds(), of_first_drafts=of_first_drafts, level=0.001)
    assert (found is None) == (message is None)
    assert message is None or (found is not None and message in found)


def waits(requests: float = 100, *, seconds: float, prompt_tokens: float) -> list[Totals]:
    part = traffic(requests / 10)
    return [dataclasses.replace(part, ttft_s=seconds * part.requests, prompt_tokens=prompt_tokens * part.requests)] * 10


@pytest.mark.parametrize(
    ("seconds", "prompt_tokens", "is_worse"),
    [
        (0.19, 40, False),
        (0.21, 40, True),
        (0.21, 400, False),  # whose prompts are no longer in the cache, or longer
        (0.05, 4, False),  # short ones
    ],
)
def test_the_first_token(seconds: float, prompt_tokens: float, is_worse: bool) -> None:
    now = waits(seconds=seconds, prompt_tokens=prompt_tokens)
    found = worse(now, BEFORE, WatchBounds(), of_first_drafts=False, level=0.001)
    assert found == (
        "the first token takes 210.0 ms under traffic, 110% more than the 100.0 ms of the version before (bound 100%)"
        if is_worse
        else None
    )


@pytest.mark.parametrize(
    ("now", "before", "message"),
    [
        (Totals(asked=20), BEFORE, "none of 20 requests got a token, where the version before answered 100"),
        (Totals(asked=19), BEFORE, None),
        (Totals(asked=20, first_tokens=1), BEFORE, None),
        (Totals(asked=20), [Totals(asked=100)], None),  # requests that are refused, by either
        (Totals(), BEFORE, None),
    ],
)
def test_a_version_that_answers_nothing(now: Totals, before: list[Totals], message: str | None) -> None:
    assert silent([now], before, WatchBounds()) == message


def test_deaths_of_servers() -> None:
    """Judged by themselves: what dies at each request answers none."""
    found = [
        worse([Totals(deaths=own)], [Totals(deaths=other)], WatchBounds(), of_first_drafts=False, level=0)
        for own, other in ((2, 0), (3, 0), (3, 1))
    ]
    assert found == [
        None,
        "3 of its servers died under traffic, where 0 of the version before did (bound: 2 more)",
        None,
    ]


def drawn(rng: np.random.Generator, rate: float, looks: int, mean: float) -> list[Totals]:
    """What the counters say every 5 s of `rate` requests a second, of unlike acceptance."""
    marks = [Totals()]
    for count in rng.poisson(5 * rate, looks):
        accepted = (10 * np.clip(mean * rng.gamma(5, 0.2, count), 0, 4)).sum()
        marks.append(marks[-1] + dataclasses.replace(traffic(count), accepted=accepted))
    return marks


@pytest.mark.parametrize(("rate", "loss", "low", "high"), [(0.1, 0, 0, 0.015), (1, 0, 0, 0.015), (1, 0.3, 0.97, 1)])
def test_looking_again_and_again_gives_few_false_alarms(rate: float, loss: float, low: float, high: float) -> None:
    """Of versions that are watched for five minutes each. `loss`: share of the accepted drafts."""
    rng, alarms, versions = np.random.default_rng(7), 0, volume(200, 50)
    for _ in range(versions):
        before, marks = window(drawn(rng, rate, 60, 1.5)), drawn(rng, rate, 60, 1.5 * (1 - loss))
        alarms += any(
            worse(
                window(marks[: look + 1]),
                before,
                WatchBounds(),
                of_first_drafts=False,
                level=spent(look / 60) - spent((look - 1) / 60),
            )
            for look in range(1, 61)
        )
    assert low <= alarms / versions <= high


def test_looks_spend_no_more_than_all() -> None:
    assert sum(spent(n / 60) - spent((n - 1) / 60) for n in range(1, 61)) == pytest.approx(FALSE_ALARM)


def test_a_window_is_what_was_counted_between_two_times() -> None:
    marks = [traffic(n) for n in (5, 7, 20)]
    assert [part.requests for part in window(marks)] == [2, 13]
    assert pooled(window(marks)).tau == pytest.approx(2.5)
    assert pooled(window(marks[:1])) == Totals()


def test_a_board_adds_replicas_up() -> None:
    board = Board()
    for replica, count in (("x", 1.0), ("y", 2.0), ("x", 5.0)):
        board.put("a", replica, Totals(requests=count))
    board.put("b", "z", Totals(requests=100.0))
    assert board.totals("a").requests == 7
    assert board.totals("none") == Totals()
