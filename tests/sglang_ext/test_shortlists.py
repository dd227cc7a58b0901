"""What heads score on an accelerator: noted in the pass, also in a replayed one, and added up without waiting."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from carried_workers import NODES, batch_of, made, replayed
from head_cases import SPECS, H, Rows, make_head
from test_draft_worker import verified
from torch import Tensor

from sglang_ext import COUNT_SHORTLISTS
from sglang_ext.adapter import shortlists, step_clock
from sglang_ext.adapter.engine import StepTimes, step_times
from sglang_ext.adapter.longest_draft import LongestDraft
from sglang_ext.adapter.models import hosted_head
from sglang_ext.adapter.step_clock import StepClock
from sglang_ext.adapter.workers import last_hidden, timed
from sglang_ext.adapter.workers.extend_graphs import HeadExtendGraphs
from sglang_ext.adapter.workers.policy import FollowsPolicy
from sglang_ext.heads import DraftHead
from sglang_ext.trees.base import Picked, most_likely

ROUTED = [
    "dynaspec",
    "dynaspec_union",
    "dynaspec_request",
    "dynaspec_all",
    "coral",
    "coral_union",
    "rdk_dynaspec_request",
]
Count = tuple[list[int], list[int], int]


def clock_of(monkeypatch: pytest.MonkeyPatch, *, asked: bool) -> StepClock:
    """Of a worker on an accelerator, which is this CPU."""
    monkeypatch.setenv(COUNT_SHORTLISTS, str(int(asked)))
    monkeypatch.setattr(LongestDraft, "of_server", lambda: LongestDraft(steps=3, topk=4, nodes=NODES))
    monkeypatch.setattr(step_clock, "get_device", lambda: SimpleNamespace(device="cpu"))
    clock = StepClock()
    clock.on_device, clock.is_running = True, False
    clock.start_noting()
    for module in (step_clock, last_hidden, hosted_head, timed):
        monkeypatch.setattr(module, "CLOCK", clock)
    return clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StepClock:
    return clock_of(monkeypatch, asked=True)


def served(name: str, clock: StepClock) -> DraftHead:
    """In a tree: a row of each request at the root, three later."""
    head = make_head(SPECS[name]).double()
    head.expect_rows((1, 3))
    clock.watch(head)
    return head


def ask(head: DraftHead, rows: int, position: int, seed: int = 1) -> Tensor:
    """What the head scores for these rows; it has been asked for their best tokens."""
    drawn = Rows.draw(rows, seed)
    routed = drawn.routed(head, position)
    head.best(drawn.hidden_TH, position, routed)
    return head.scored(drawn.hidden_TH, position, routed)


def counted(scored: list[Tensor]) -> Count:
    """`scored`: at each position."""
    return [x.numel() for x in scored], [int(x.sum()) for x in scored], max(int(x.max()) for x in scored)


@torch.no_grad()
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ROUTED)
def test_a_head_notes_what_it_scores(name: str, is_packed: bool, clock: StepClock) -> None:
    """In whatever way it reads its matrix, and whatever it is asked."""
    head = served(name, clock).float()
    if is_packed:
        head.pack()
    assert clock.shortlists is not None
    for step, rows in ((0, 0), (0, 1), (0, 2), (1, 3), (1, 6), (2, 21)):
        drawn = Rows.draw(rows).to(torch.float32)
        routed = drawn.routed(head, step)
        scored_T = head.scored(drawn.hidden_TH, step, routed)
        for question in (
            lambda *asked: head.best(*asked),
            lambda *asked: head.propose(*asked[:2], 2, *asked[2:]),
            lambda *asked: head.target_distribution(*asked),
            lambda *asked: head.target_logits(*asked),
        ):
            clock.shortlists.clear()
            if rows:
                question(drawn.hidden_TH, step, routed)
            else:
                head.candidates(drawn.hidden_TH, step, routed)
            noted = clock.shortlists.noted_PBR[step]
            assert noted[noted > 0].tolist() == scored_T.tolist()
            assert bool((noted[: rows // (1, 3, 3)[step], : (1, 3, 3)[step]] > 0).all())


def test_of_more_requests_than_there_is_room_for_the_first_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortlists, "MOST_REQUESTS", 2)
    clock = clock_of(monkeypatch, asked=True)
    assert clock.shortlists is not None
    scored_T = ask(served("dynaspec", clock), 9, 1)
    clock.shortlists.add(3)
    assert clock.shortlists.read() == ([0, 6, 0], [0, int(scored_T[:6].sum()), 0], int(scored_T[:6].max()))


def test_every_eighth_step_counts_the_rows_of_its_requests(clock: StepClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, in passes for three; not what a prefill and the steps before have noted."""
    head, scored = served("dynaspec", clock), []

    def step(worker: Any, batch: Any) -> None:
        number = clock.totals.steps
        scored.append([ask(head, rows, i, number)[: 2 * rows // 3] for i, rows in enumerate(batch.rows)])

    monkeypatch.setattr(FollowsPolicy, "forward_batch_generation", step)
    monkeypatch.setattr(timed, "metrics", lambda: None)
    worker: Any = object.__new__(timed.TimedEagleWorker)

    def run(*rows: int, is_extend: bool = False, requests: int = 2) -> None:
        mode = SimpleNamespace(is_extend=lambda: is_extend)
        worker.forward_batch_generation(SimpleNamespace(forward_mode=mode, rows=rows, batch_size=lambda: requests))

    for number in range(1, 10):
        run(6, is_extend=True)
        run(3, 9, *([9] if number % 8 != 1 else []))
    assert (clock.totals.steps, clock.totals.step_s) == (9, 0)
    of_steps = [step for step in scored if len(step) > 1]
    expected = counted([torch.cat(position) for position in zip(of_steps[0], of_steps[8], strict=True)])
    found = clock.read()
    assert (found.scoring_rows, found.scored_tokens) == ([4, 12, 0], [*expected[1], 0])
    assert found.most_scored == expected[2]
    for _ in range(7):
        run(3, 9, 9)
    before = clock.read().copy()
    assert before.most_scored == 0, "no step was counted since the last reading"
    run(requests=0)  # of a rank without requests
    assert clock.read() == clock.totals
    assert clock.totals.scoring_rows == before.scoring_rows


@torch.no_grad()
@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("head", ["dynaspec", "dynaspec_request", "dynaspec_union", "coral", "rdk_dynaspec"])
@pytest.mark.parametrize("name", ["medusa", "medusa-slim", "hydra", "hydra-chain"])
def test_a_replay_counts_the_rows_of_its_requests(name: str, head: str, clock: StepClock) -> None:
    """Three, in a graph of four."""
    worker, scored = made(name, head), []
    worker._capture_cuda_graphs()
    worker.draft(batch_of(4))
    batch = batch_of(3)
    clock.is_decoding, clock.totals.steps = True, 1
    with clock.noting(3):
        worker.draft(batch)
    assert replayed(worker) == [4, 4]

    def pick(head: DraftHead, state_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Picked:
        scored.append(head.scored(state_TH, step, routed).view(4, -1)[:3])
        return most_likely(head, state_TH, step, k, routed)

    hidden_BH = torch.cat([batch.spec_info.hidden_states, torch.zeros(1, H)])
    root_B = torch.cat([batch.spec_info.bonus_tokens.long(), torch.zeros(1, dtype=torch.int64)])
    found = clock.read()
    worker.proposers[3].propose(worker.drafter, hidden_BH, root_B, worker._embed, pick)
    assert (found.scoring_rows, found.scored_tokens, found.most_scored) == counted(scored)


def test_a_replayed_extend_counts_the_rows_of_its_requests(worker: Any, clock: StepClock) -> None:
    head = worker.draft_runner.model.head = served("dynaspec", clock).float()
    graphs, hidden_BH = HeadExtendGraphs(worker), torch.randn(3, H)
    graphs.execute(*verified(torch.randn(4, H)))
    clock.is_decoding, clock.totals.steps = True, 1
    with clock.noting(3):
        graphs.execute(*verified(hidden_BH))
    found = clock.read()
    (rows,), (tokens,), most = counted([head.scored(hidden_BH, 0, head.route(hidden_BH, hidden_BH, 0))])
    assert (found.scoring_rows, found.scored_tokens, found.most_scored) == ([rows, 0, 0], [tokens, 0, 0], most)


def test_a_worker_counts_from_before_it_captures(clock: StepClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its heads note into is there when they are loaded, and captured."""
    clock.shortlists, found = None, []
    monkeypatch.setattr(FollowsPolicy, "__init__", lambda worker: found.append(clock.shortlists))
    monkeypatch.setattr(timed, "metrics", lambda: None)
    timed.TimedEagleWorker()
    assert isinstance(found[0], shortlists.Shortlists)


def read(monkeypatch: pytest.MonkeyPatch) -> StepTimes | None:
    monkeypatch.setattr(step_clock, "get_parallel", lambda: SimpleNamespace(tp_rank=0))

    def collective_rpc(name: str, path: str) -> None:
        step_clock.write_step_clock(None, path)

    return step_times(SimpleNamespace(collective_rpc=collective_rpc))


def test_an_engine_that_counts_tells_no_times(clock: StepClock, monkeypatch: pytest.MonkeyPatch) -> None:
    head = served("dynaspec", clock)
    clock.is_decoding, clock.totals.steps = True, 1
    with clock.noting(2), clock.part("step_s"):
        scored_T = ask(head, 2, 0)
    found = read(monkeypatch)
    assert found is not None
    assert (found.steps, found.draft_s, found.verify_s) == (1, 0, 0)
    assert (found.scoring_rows, found.scored_tokens) == (2, int(scored_T.sum()))
    assert found.most_scored == int(scored_T.max())
    assert found.scoring_rows_by_position == (2, 0, 0)


def test_a_server_that_nobody_asks_notes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_of(monkeypatch, asked=False)
    assert clock.shortlists is None
    head = served("dynaspec", clock)
    monkeypatch.setattr(head, "note", lambda *_: pytest.fail("nobody reads it"))
    clock.is_decoding, clock.totals.steps = True, 1
    with clock.noting(2):
        ask(head, 2, 0)
    assert read(monkeypatch) is None
