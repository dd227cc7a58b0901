"""What is counted of a step; and the clock of an accelerator, on events that end when the test says so: it waits for
none of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch
from head_cases import SPECS, Rows, make_head, toy_body, toy_target
from torch import nn

from sglang_ext.adapter import metrics as metrics_module
from sglang_ext.adapter import step_clock
from sglang_ext.adapter.engine import StepTimes, step_times
from sglang_ext.adapter.models import hosted_head
from sglang_ext.adapter.models.hosted_head import HeadLogits, HeadRequest
from sglang_ext.adapter.step_clock import CLOCK, StepClock
from sglang_ext.adapter.workers.last_hidden import CarriedDrafting
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.heads import DraftHead


class Event:
    """One of a stream whose time moves by a second with each event, and which has come as far as `reached`."""

    recorded = 0
    reached = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.time = Event.recorded

    def query(self) -> bool:
        return self.time <= Event.reached

    def synchronize(self) -> None:
        Event.reached = max(Event.reached, self.time)

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "it has not ended"
        return 1e3 * (end.time - self.time)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(Event, "reached", 0)
    clock = StepClock()
    clock.on_device = clock.is_running = clock.is_decoding = clock.has_events = True
    return clock


def step(clock: StepClock) -> None:
    """Four events: 3 s, of which verification is one."""
    with clock.part("step_s"), clock.part("verify_s"):
        pass


def seconds(clock: StepClock) -> tuple[float, float]:
    return clock.totals.step_s, clock.totals.verify_s


def test_what_a_head_takes_is_counted_for_every_request_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock()
    clock.on_device, clock.is_running, clock.is_decoding = False, True, True
    ticks = iter(range(100))
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(ticks))
    for clock.running in (4, 1):
        with clock.part("step_s"), clock.head():
            pass
        with clock.part("step_s"), clock.routing():
            pass
    assert (clock.totals.head_s, clock.totals.head_request_s) == (8, 20)


def test_steps_are_read_whole_once_they_have_ended(clock: StepClock) -> None:
    step(clock)
    step(clock)
    clock.read_ended()
    assert seconds(clock) == (0, 0)
    Event.reached = 3  # the first verification is over, its step is not
    clock.read_ended()
    assert seconds(clock) == (0, 0)
    Event.reached = 7
    clock.read_ended()
    assert seconds(clock) == (3, 1)
    clock.read()
    assert (seconds(clock), Event.reached) == ((6, 2), 8)


def test_metrics_of_an_accelerator_wait_for_no_step(clock: StepClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "CLOCK", clock)
    clock.is_running = False
    registry = prometheus_client.CollectorRegistry()  # other tests have such counters, too
    monkeypatch.setattr(prometheus_client, "Counter", partial(prometheus_client.Counter, registry=registry))
    counters = metrics_module.ServingMetrics()
    for reached in (0, 4, 6):
        step(clock)
        Event.reached = reached
        counters.stepped(2, 3)
        assert Event.reached == reached
    parts: dict[str, Any] = {
        part: registry.get_sample_value("rayspec_step_seconds_total", {"part": part})
        for part in ("head", "draft", "verify")
    }
    assert parts == {"head": 0, "draft": 2, "verify": 1}


def host_clock() -> StepClock:
    """As where there is no accelerator, whatever this machine has."""
    clock = StepClock()
    clock.on_device, clock.is_running = False, True
    return clock


@pytest.mark.parametrize("name", ["dynaspec", "dynaspec_request", "truncated_by_step"])
def test_what_a_tree_scores_is_counted_at_each_position(name: str) -> None:
    """One row of each of two requests at the root, three later; of eight steps one is counted."""
    head, clock = make_head(SPECS[name]).double(), host_clock()
    head.expect_rows((1, 3))
    clock.is_decoding = True
    expected = []
    for number in range(1, 10):
        clock.totals.steps = number
        for position, rows in enumerate((2, 6, 6)):
            drawn = Rows.draw(rows, seed=number + 10 * position)
            routed = drawn.routed(head, position)
            clock.count_shortlist(head, drawn.hidden_TH, position, routed)
            expected.append(head.scored(drawn.hidden_TH, position, routed).tolist())
    counted = expected[:3], expected[24:]
    assert clock.totals.scoring_rows == [4, 12, 12]
    assert clock.totals.scored_tokens == [sum(counted[0][i] + counted[1][i]) for i in range(3)]
    assert clock.totals.most_scored == max(tokens for step in counted for rows in step for tokens in rows)
    read = clock.totals.copy()
    clock.totals.count_scored(1, [1])
    assert read.scoring_rows == [4, 12, 12]


@pytest.mark.parametrize("name", [name for name in SPECS if make_head(SPECS[name]).shortlist_size(1) is not None])
def test_where_nothing_is_chosen_sizes_say_what_is_counted(name: str) -> None:
    head, clock, rows = make_head(SPECS[name]).double(), host_clock(), (1, 3, 3)
    clock.is_decoding, clock.totals.steps = True, 1
    for position, n in enumerate(rows):
        drawn = Rows.draw(n)
        clock.count_shortlist(head, drawn.hidden_TH, position, drawn.routed(head, position))
    sizes = [head.shortlist_size(position) for position in range(3)]
    assert clock.totals.scored_tokens == [n * (size or 0) for n, size in zip(rows, sizes, strict=True)]


def test_a_reading_has_the_most_scored_since_the_reading_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that a block's is not that of a trial which the engine answered earlier; sums are of all its life."""
    clock = host_clock()
    monkeypatch.setattr(step_clock, "CLOCK", clock)
    monkeypatch.setattr(step_clock, "get_parallel", lambda: SimpleNamespace(tp_rank=0))

    def collective_rpc(name: str, path: str) -> None:
        assert name == "rayspec_write_step_clock"
        step_clock.write_step_clock(None, path)

    def reading() -> StepTimes:
        times = step_times(SimpleNamespace(collective_rpc=collective_rpc))
        assert times is not None
        return times

    clock.totals.count_scored(0, [7, 90])
    before = reading()
    clock.totals.count_scored(0, [5, 6])
    clock.totals.count_scored(1, [8])
    spent = reading() - before
    assert (before.most_scored, spent.most_scored, spent.scored_tokens_by_position) == (90, 8, (11, 8))


@pytest.mark.parametrize("name", ["dynaspec", "truncated_by_step"])
def test_an_accelerator_never_asks_a_head_what_it_scores(
    name: str, clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as it captures a pass, nor eagerly."""
    monkeypatch.setattr(hosted_head, "CLOCK", clock)
    head, drawn = make_head(SPECS[name]).double(), Rows.draw(2)
    monkeypatch.setattr(head, "scored", lambda *_: pytest.fail("the host would wait for it"))
    processor, request = object.__new__(HeadLogits), HeadRequest(1, 2)
    nn.Module.__init__(processor)
    processor.routing = lambda: drawn.routed(head, 1)
    clock.totals.steps = 1
    processor.answer(request, head, drawn.hidden_TH, SimpleNamespace())
    assert request.best is not None
    assert clock.totals.scoring_rows == []


CHOOSING = ["dynaspec", "dynaspec_union", "dynaspec_request", "coral", "specvocab", "rdk_dynaspec"]


@pytest.mark.parametrize("rows", [1, 2, 7], ids=["gathered", "few", "many"])
@pytest.mark.parametrize("name", CHOOSING)
def test_a_choice_is_timed_without_the_products_around_it(name: str, rows: int) -> None:
    """The router's before it, and the scores behind it: the head without router and choice is DynaSpec's index-GEMM."""
    head, drawn, clock, is_choosing = make_head(SPECS[name]).double(), Rows.draw(rows), host_clock(), [False]
    choosing = clock.choosing

    @contextmanager
    def noticed() -> Iterator[None]:
        assert not is_choosing[0]
        with choosing():
            is_choosing[0] = True
            yield
            is_choosing[0] = False

    def outside(product: Any) -> Any:
        def inside(*args: Any, **kwargs: Any) -> Any:
            assert not is_choosing[0]
            return product(*args, **kwargs)

        return inside

    clock.choosing = noticed  # type: ignore[method-assign]
    clock.watch(head)
    for part in (p for p in head.modules() if isinstance(p, DraftHead)):
        for product in ("project", "gather_dot", "rows_of"):
            setattr(part, product, outside(getattr(part, product)))
    head.expect_rows([rows])
    routed = drawn.routed(head, 0)
    for clock.is_decoding in (False, True):  # a prefill is not counted
        assert (clock.totals.choice_s, clock.totals.head_s) == (0, 0)
        with clock.head():
            head.best(drawn.hidden_TH, 0, routed)
    assert 0 < clock.totals.choice_s < clock.totals.head_s


@pytest.mark.parametrize("name", ["full", "slimspec", "truncated_by_step", "specvocab_all", "dynaspec_all"])
def test_a_head_that_chooses_nothing_takes_no_time_for_it(name: str) -> None:
    head, drawn, clock = make_head(SPECS[name]).double(), Rows.draw(2), host_clock()
    clock.is_decoding = True
    clock.watch(head)
    head.best(drawn.hidden_TH, 0, drawn.routed(head, 0))
    assert clock.totals.choice_s == 0


def test_every_head_that_is_served_has_its_choice_timed(tmp_path: Path) -> None:
    drafter = Eagle3Drafter(toy_body(), make_head(SPECS["rdk_dynaspec"]))
    save_drafter(tmp_path / "d", drafter, toy_target())
    loaded, info = load_drafter(tmp_path / "d")
    head = hosted_head._head_of(info)
    assert head.choosing == head.base.choosing == CLOCK.choosing
    worker: Any = object.__new__(CarriedDrafting)
    worker._proposers = worker._siblings = lambda *_: None
    assert loaded.lm_head.choosing != CLOCK.choosing
    worker._draft_with(info, loaded)
    assert loaded.lm_head.base.choosing == CLOCK.choosing


def test_an_accelerator_without_events_of_cuda_has_no_clock(clock: StepClock) -> None:
    clock.has_events = clock.is_running = False
    clock.start()
    step(clock)
    assert (seconds(clock), Event.recorded) == ((0, 0), 0)
