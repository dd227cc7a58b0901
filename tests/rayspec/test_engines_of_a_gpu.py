"""What engines that share a GPU are told to take of it, and the order in which they start; none of them runs."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from fixture_models import DRAFTERS, PROMPTS, TARGET

from rayspec.farm.gpu_share import FOR_ENGINES, check_room
from rayspec.farm.runtime import EngineFailed, EngineSpec
from rayspec.gate.config import GateConfig
from rayspec.gate.engines import PreparedDrafter, prepare_drafters, running_drafters
from rayspec.gate.sides import MeasureFailed
from rayspec.sweep.candidate import Candidate, Head
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.measure.engines import Engines
from rayspec.sweep.plan.placement import MEMORY_SHARE, place
from rayspec.sweep.plan.trials import make_plan
from rayspec.training.data.answer_engines import AnswerEnginesConfig, answer_engines


class Card:
    """A GPU, or several, on which handles take what their fraction of the free rest is; 1 is a whole GPU."""

    def __init__(self) -> None:
        self.taken: dict[Any, list[float]] = {}  # by the place on which engines are put
        self.log: list[str] = []
        self.bundles: list[dict[str, float]] = []
        self.fails: set[str] = set()
        self.made: list[Any] = []
        self.nodes: list[float] = []  # GPUs of each

    def handle(self) -> type:
        card = self

        class Handle:
            def __init__(self, spec: EngineSpec, log_path: Path, *, place: Any = None, **options: Any) -> None:
                self.name, self.place, self.is_alive = log_path.stem, place, True
                self.fraction = spec.overrides.get("mem_fraction_static")
                self.dtype, self.num_gpus = spec.overrides.get("dtype"), options["num_gpus"]
                card.made.append(self)

            def begin_start(self) -> "Handle":
                card.log.append(f"{self.name} begins")
                return self

            def finish_start(self, ref: Any, timeout_s: float) -> dict[str, Any]:
                if self.name in card.fails:
                    raise EngineFailed("out of memory")
                if self.fraction is not None:
                    taken = card.taken.setdefault(self.place, [])
                    taken.append(self.fraction * (1 - sum(taken)))
                card.log.append(f"{self.name} is up")
                return {"start_s": 1.0, "machine": {}}

            def warm_up(self, load: Any) -> None:
                pass

            def stop(self) -> None:
                self.is_alive = False

            kill = stop

        return Handle


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()

    @contextmanager
    def one_gpu_each(bundles: Sequence[Mapping[str, float]]) -> Iterator[list[str]]:
        card.bundles += [dict(bundle) for bundle in bundles]
        yield [f"gpu {n}" for n in range(len(bundles))]

    @contextmanager
    def cluster(*_: Any, **__: Any) -> Iterator[None]:
        yield

    for module in ("rayspec.sweep.measure.engines", "rayspec.farm.actor"):
        monkeypatch.setattr(f"{module}.RuntimeHandle", card.handle())
    for module in ("rayspec.gate.engines", "rayspec.training.data.answer_engines"):
        monkeypatch.setattr(f"{module}.one_gpu_each", one_gpu_each)
    for module in ("rayspec.gate.engines", "rayspec.farm.actor"):
        monkeypatch.setattr(f"{module}.cluster", cluster)
    monkeypatch.setattr("rayspec.gate.engines.node_gpus", lambda: [1.0])
    monkeypatch.setattr("rayspec.farm.actor.node_gpus", lambda: card.nodes)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs[:1], refs[1:]))
    return card


GATE = GateConfig(target=str(TARGET), workload=f"{PROMPTS}:24")


def needing_an_engine_each() -> tuple[PreparedDrafter, PreparedDrafter]:
    full = [str(DRAFTERS["full"])] * 2
    baseline, candidate = prepare_drafters(GATE, full)[0], prepare_drafters(replace(GATE, draft_steps=2), full)[1]
    assert not baseline.shares_engine_with(candidate)
    return baseline, candidate


def test_both_sides_of_a_gate_take_the_same_of_their_gpu(card: Card, tmp_path: Path) -> None:
    sides = needing_an_engine_each()
    with running_drafters(*sides, tmp_path):
        pass
    assert card.taken == {"gpu 0": [pytest.approx(MEMORY_SHARE, abs=1e-3)] * 2}
    begun, up, begun_later, up_later = card.log
    assert begun.endswith("begins") and up.endswith("is up"), "the first one has taken its part"  # noqa: PT018
    assert (begun.split()[0], begun_later.split()[0]) == (up.split()[0], up_later.split()[0])
    assert card.bundles == [{"CPU": 2, "GPU": 1}], "one GPU for both"


def test_both_engines_of_a_sweep_take_the_same_of_their_gpu(card: Card, tmp_path: Path) -> None:
    config = SweepConfig(target=str(TARGET), draft_steps=[2])
    full = Candidate(label="full", path=str(DRAFTERS["full"]), head=Head(kind="full"), draft_steps=2)
    (cohort,) = make_plan(config, 8, [full]).cohorts
    engines = Engines(config, place(config, [1.0]), str(TARGET), tmp_path)
    engines.begin_plain(cohort)
    engines.wait_for_plain()
    engines.start_speculative(cohort, full)
    assert card.taken == {None: [pytest.approx(MEMORY_SHARE, abs=1e-3)] * 2}


def test_a_side_that_does_not_start_ends_the_other(card: Card, tmp_path: Path) -> None:
    sides = needing_an_engine_each()
    card.fails = {f"{sides[1].cohort.name}.candidate"}
    with pytest.raises(MeasureFailed, match="out of memory"), running_drafters(*sides, tmp_path):
        pass
    assert card.made
    assert not any(handle.is_alive for handle in card.made)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([{"CPU": 24.0, "GPU": 1.0}, {"CPU": 64.0}], "need a node with 32 CPUs and 1 GPUs, but the nodes have 24 CPUs"),
        ([{"CPU": 32.0, "GPU": 1.0}], "are to share 2 GPUs, but the cluster has 1; start fewer engines"),
        ([{"CPU": 32.0, "GPU": 1.0}] * 2, None),
        ([{"CPU": 64.0, "GPU": 2.0}], None),
    ],
)
def test_where_there_is_no_room_it_is_said(nodes: list[dict[str, float]], message: str | None) -> None:
    """Ray would wait for it."""
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_room([{"CPU": 32.0, "GPU": 1.0}] * 2, nodes)


@pytest.mark.parametrize(
    ("settings", "per_gpu", "share"),
    [
        ({"count": 4, "num_gpus": 0.5}, [2, 2], FOR_ENGINES / 2),
        ({"count": 4, "num_gpus": 1 / 3}, [3, 1], FOR_ENGINES / 3),
        ({"count": 2, "num_gpus": 0.1}, [2], FOR_ENGINES / 2),
        ({"count": 2, "num_gpus": 0.5, "extra": {"mem_fraction_static": 0.3}}, [2], 0.3),
    ],
    ids=["halves", "thirds", "fewer_than_fit", "asked_for"],
)
def test_engines_for_answers_take_the_same_of_their_gpu(
    card: Card, tmp_path: Path, settings: dict[str, Any], per_gpu: list[int], share: float
) -> None:
    config = AnswerEnginesConfig(**settings)
    with answer_engines(config, str(TARGET), 64, [2], tmp_path, 0) as pool:
        for _ in range(config.count):
            if any(place.ref is not None for place in pool._places):
                pool._settle(deque())
    assert [len(taken) for taken in card.taken.values()] == per_gpu
    assert [f for taken in card.taken.values() for f in taken] == [pytest.approx(share, abs=2e-3)] * config.count
    starting: dict[int, int] = {}
    for line in card.log:
        name, event = line.split(maxsplit=1)
        gpu = int(name.split("-")[1]) // config.per_gpu
        starting[gpu] = starting.get(gpu, 0) + (1 if event == "begins" else -1)
        assert starting[gpu] in (0, 1), "one after the other"
    assert all(bundle["GPU"] <= 1 for bundle in card.bundles)
    assert [bundle["CPU"] for bundle in card.bundles] == per_gpu


@pytest.mark.parametrize("settings", [{"count": 2}, {"count": 2, "num_gpus": 1.0}, {"count": 1, "num_gpus": 0.5}])
def test_an_engine_without_a_neighbour_takes_what_sglang_gives_it(
    card: Card, tmp_path: Path, settings: dict[str, Any]
) -> None:
    with answer_engines(AnswerEnginesConfig(**settings), str(TARGET), 64, [2], tmp_path, 0):
        pass
    assert card.taken == {}
    assert card.bundles == []


@pytest.mark.parametrize(
    ("settings", "nodes", "num_gpus"),
    [
        ({}, [0.0, 8.0], 1.0),
        ({"extra": {"tp_size": 2}}, [8.0], 2.0),
        ({}, [0.0], 0.0),
        ({"num_gpus": 0.0}, [8.0], 0.0),
        ({"num_gpus": 0.5}, [8.0], 0.5),
    ],
    ids=["one", "one_a_rank", "no_gpu", "none_asked_for", "half_asked_for"],
)
def test_engines_take_gpus_where_there_are_any(
    card: Card, tmp_path: Path, settings: dict[str, Any], nodes: list[float], num_gpus: float
) -> None:
    card.nodes = nodes
    with answer_engines(AnswerEnginesConfig(**settings), str(TARGET), 64, [2], tmp_path, 0):
        pass
    assert [handle.num_gpus for handle in card.made] == [num_gpus]


@pytest.mark.parametrize("num_gpus", [None, 0.0, 1.0])
def test_engines_on_a_gpu_answer_in_bfloat16_whatever_the_processor(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_gpus: float | None
) -> None:
    """SGLang finds a GPU also where none is reserved, and its norms do not start there in float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    card.nodes = [1.0]
    with answer_engines(AnswerEnginesConfig(num_gpus=num_gpus), str(TARGET), 64, [2], tmp_path, 0):
        pass
    assert [handle.dtype for handle in card.made] == ["bfloat16"]


@pytest.mark.parametrize(("count", "num_gpus", "room"), [(8, 1.0, 5), (8, None, 5), (3, 2.0, 2), (5, 1.0, None)])
def test_more_engines_than_gpus_are_warned_of(
    card: Card, tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int, num_gpus: float | None, room: int | None
) -> None:
    card.nodes = [3.0, 2.0]
    with answer_engines(AnswerEnginesConfig(count=count, num_gpus=num_gpus), str(TARGET), 64, [2], tmp_path, 0):
        pass
    warned = f"the Ray cluster has GPUs for {room} now; engines that find none within engines.start_timeout_s are left"
    assert (warned in caplog.text) == (room is not None)
    assert len(card.made) == count, "the cluster may grow"


@pytest.mark.parametrize("share", [0.6, 0.0, "much"])
def test_shares_that_are_more_than_a_gpu_are_refused(share: object) -> None:
    with pytest.raises(ValueError, match=r"mem_fraction_static must be below 1/2, .* raise engines.num_gpus"):
        AnswerEnginesConfig(count=2, num_gpus=0.5, extra={"mem_fraction_static": share})
    assert AnswerEnginesConfig(count=2, num_gpus=1.0, extra={"mem_fraction_static": 0.6}).memory(beside=1) == {}
