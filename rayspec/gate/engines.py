"""Sides that are drafters, each in an engine of ours: one engine that they are swapped in, where they are of one family
and shape, else one engine each."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ray.exceptions import RayError

from rayspec.farm.actor import RuntimeHandle, cluster, node_gpus
from rayspec.farm.gpu_share import one_gpu_each
from rayspec.farm.load import Traffic
from rayspec.farm.runtime import EngineFailed
from rayspec.gate.config import GateConfig
from rayspec.gate.sides import Answer, BlockAnswers, MeasureFailed, Side
from rayspec.home import tracking_uri
from rayspec.messages import first_line
from rayspec.records import Measured
from rayspec.serving.champion import MODEL, RUN, find_champion, is_folder
from rayspec.serving.flags import ENGINE_FLAGS
from rayspec.serving.record import RECORD, ServingRecord
from rayspec.shipped import drafter_label
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.measure.engines import Engines
from rayspec.sweep.plan.placement import place
from rayspec.sweep.plan.prepare import Prepared, prepare
from rayspec.sweep.plan.trials import Cohort
from rayspec.targets.catalogue import DEFAULT_TARGET
from rayspec.tracking import connect
from rayspec.workloads import Conversation

SHAPE = {  # settings, and the flags of a champion that they were measured with
    "draft_steps": "speculative_num_steps",
    "topk": "speculative_eagle_topk",
    "num_draft_tokens": "speculative_num_draft_tokens",
}


@dataclass(frozen=True, kw_only=True)
class PreparedDrafter:
    """A side that was checked: nothing runs yet."""

    label: str
    role: str
    prepared: Prepared

    @property
    def measured(self) -> Candidate:
        """The candidate, labelled by role: folders of one name are two drafters, and a swap is skipped by label."""
        return replace(self.prepared.plan.candidates[0], label=self.role)

    @property
    def cohort(self) -> Cohort:
        return self.prepared.plan.cohorts[0]

    def shares_engine_with(self, other: "PreparedDrafter") -> bool:
        """Whether the other can be swapped into this one's engine."""
        mine, theirs = self.prepared, other.prepared
        same = (mine.target, self.cohort.engine, mine.config.engine)
        return same == (theirs.target, other.cohort.engine, theirs.config.engine)


def prepare_drafters(config: GateConfig, sources: Sequence[str]) -> tuple[PreparedDrafter, PreparedDrafter]:
    """Baseline and candidate with their prompts. Raises ValueError for what cannot be measured or compared."""
    champions = [_champion(source, config) for source in sources]
    targets = {c[2] for c in champions if c is not None}
    target = config.target or min(targets, default=DEFAULT_TARGET)
    if len(targets) > 1:
        raise ValueError(f"the champions were measured on different targets ({', '.join(sorted(targets))})")
    records = [champion[1] for champion in champions if champion is not None]
    shared = records[0] if len(records) == 1 else None  # else two settings would be compared, and not two drafters
    sides = []
    for source, champion, name in zip(sources, champions, ("baseline", "candidate"), strict=True):
        entry, record = (source, shared) if champion is None else champion[:2]
        prepared = prepare(_sweep_config(config, entry, target, record))
        sides.append(PreparedDrafter(label=source, role=name, prepared=prepared))
    return sides[0], sides[1]


def _champion(source: str, config: GateConfig) -> tuple[str, ServingRecord, str] | None:
    """(folder, record, target) of one; None for a drafter that is named or a plain folder."""
    is_registered = MODEL.fullmatch(source) or RUN.fullmatch(source)
    if not is_registered and not (Path(source) / RECORD).is_file():
        return None
    # force: a gate is what finds out how fast it is
    client = None if is_folder(source) else connect(tracking_uri(), create=False)
    champion = find_champion(source, client, target=config.target, force=True)
    return str(champion.folder), champion.record, champion.target


def _sweep_config(config: GateConfig, entry: str, target: str, record: ServingRecord | None) -> SweepConfig:
    """A sweep of this drafter alone, which brings its checks. What the gate was not given is the record's."""
    flags = dict(record.flags) if record else {}
    flags.pop("speculative_algorithm", None)  # the drafter's kind says it
    shape = {name: flags.pop(flag) for name, flag in SHAPE.items() if flag in flags}
    if shape.get("topk") == 1:
        shape.pop("num_draft_tokens", None)  # a chain's follows from the draft steps
    shape |= {name: getattr(config, name) for name in SHAPE if getattr(config, name) is not None}
    if "draft_steps" in shape:
        shape["draft_steps"] = [shape["draft_steps"]]
    own = {name: flags.pop(name) for name in ENGINE_FLAGS if name in flags}
    given = {name: getattr(config.engine, name) for name in ENGINE_FLAGS if getattr(config.engine, name) is not None}
    longest_s = 60 * config.max_minutes
    engine = replace(
        config.engine,
        **{**own, **given},
        num_threads=config.engine.num_threads or (record.num_threads if record else None),
        extra=flags | config.engine.extra,
        start_timeout_s=min(config.engine.start_timeout_s, longest_s),
        block_timeout_s=min(config.engine.block_timeout_s, longest_s),
    )
    return SweepConfig(
        name="gate",
        target=target,
        drafters=[entry],
        baseline=drafter_label(entry),
        concurrency=[config.concurrency],
        workload=config.workload,
        chat_template=config.chat_template,
        block_prompts=config.concurrency,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        ignore_eos=config.ignore_eos,
        seed=config.seed,
        engine=engine,
        ray=config.ray,
        **shape,
    )


class DrafterSide(Side):
    """A drafter in an engine that it may share with the other side."""

    def __init__(self, side: PreparedDrafter, engines: Engines) -> None:
        self.label = side.label
        self.counts_blocks = False
        self._side = side
        self._engines = engines
        self._traffic = Traffic(concurrency=side.prepared.config.concurrency[0])

    def warm_up(self) -> None:
        """Warm up under the load of the gate, so that no measurement pays for what an engine does once."""
        config = self._side.prepared.config
        with self._readable():
            load = self._engines.load(self._side.prepared.prompts[: config.block_prompts], self._traffic)
            self._running().warm_up(load)

    def answer(self, prompts: Sequence[Conversation]) -> BlockAnswers:
        with self._readable():
            measured = self._running().measure(self._engines.load(tuple(prompts), self._traffic))
        return block_answers(measured)

    def stop(self) -> None:
        self._engines.stop()

    def _running(self) -> RuntimeHandle:
        """The engine with this side's drafter, warm: the first steps after a swap find a cold cache."""
        engine = self._engines.use(self._side.measured)
        one, config = Traffic(concurrency=1), self._side.prepared.config
        engine.warm_up(self._engines.load(self._side.prepared.prompts[:1], one, max_new_tokens=config.warmup_tokens))
        return engine

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except EngineFailed as error:
            raise MeasureFailed(f"{self.label}: {error}") from error
        except RayError as error:  # a node that ran out of memory ends actors in ways of its own
            raise MeasureFailed(f"{self.label}: Ray ended the engine: {first_line(error)}") from error


def block_answers(measured: Measured) -> BlockAnswers:
    answers = tuple(
        Answer(
            prompt_id=r.prompt_id,
            turn=r.turn,
            prompt_tokens=r.prompt_tokens,
            tokens=r.output_tokens,
            output=r.output_ids,
            verify_steps=r.verify_steps,
            accepted_drafts=r.accepted_drafts,
            ttft_s=r.ttft_s,
            e2e_s=r.e2e_s,
        )
        for r in measured.requests
    )
    return BlockAnswers(wall_s=measured.wall_s, answers=answers)


@contextmanager
def running_drafters(
    baseline: PreparedDrafter, candidate: PreparedDrafter, log_folder: Path
) -> Iterator[tuple[DrafterSide, DrafterSide]]:
    """Both, started and warm; ended with the block. Raises MeasureFailed."""
    config = baseline.prepared.config
    with ExitStack() as stack:
        stack.enter_context(cluster(config.ray.address, min_cpus=2 * config.ray.num_cpus))
        placement = place(config, node_gpus())
        shared = baseline.shares_engine_with(candidate)
        if not shared and not placement.side_by_side:
            raise ValueError(
                f"{baseline.label} and {candidate.label} need an engine each, and there is no room for two side by "
                "side; give each GPU less (ray.num_gpus), or serve both and gate their addresses"
            )
        divided = [placement.bundle] if placement.memory_share is not None else []
        where = next(iter(stack.enter_context(one_gpu_each(divided))), None)
        sides: list[DrafterSide] = []
        for side in (baseline, candidate):
            if sides and shared:
                engines = sides[0]._engines
            else:
                p, running = side.prepared, [started._engines for started in sides]
                folder = log_folder / f"side{len(sides)}"
                engines = Engines(p.config, placement, p.target, folder, beside=running, place=where)
            sides.append(DrafterSide(side, engines))
            stack.callback(_end, sides[-1])
            with sides[-1]._readable():
                if not engines.has_speculative(side.cohort):
                    engines.start_speculative(side.cohort, side.measured)
            sides[-1].warm_up()
        yield sides[0], sides[1]


def _end(side: DrafterSide) -> None:
    with suppress(RayError):  # raised by an engine that is gone already
        side.stop()
