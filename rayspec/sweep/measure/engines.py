"""The two engines of a cohort, which the next cohort takes over: the plain one, and the speculative one where its
draft steps and its drafters' family are the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayspec.farm.actor import RuntimeHandle
from rayspec.farm.load import Load, Traffic
from rayspec.farm.runtime import EngineDied, EngineFailed, EngineSpec
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.placement import Placement
from rayspec.sweep.plan.trials import Cohort
from rayspec.sweep.shape import CHAIN
from rayspec.workloads import Conversation


class Engines:
    """Starts, calls and ends the engines. Every method that needs one raises EngineFailed.

    `beside`: other engines that may run on the same GPU; `place`: the scheduling strategy of the engines, None leaves
    it to the placement group of the caller.
    """

    def __init__(
        self,
        config: SweepConfig,
        placement: Placement,
        target: str,
        log_folder: Path,
        *,
        beside: Sequence["Engines"] = (),
        place: Any = None,
    ) -> None:
        self.config = config
        self.placement = placement
        self.target = target
        self.log_folder = log_folder
        self.beside = beside
        self.place = place
        self.plain: RuntimeHandle | None = None
        self.speculative: RuntimeHandle | None = None
        self._plain_start: Any = None
        self._serves: tuple[str, object, int] | None = None  # what the speculative engine was started for
        self._loaded: str | None = None  # label of the drafter that the speculative engine runs with

    @property
    def num_running(self) -> int:
        return sum(engine is not None and engine.is_alive for engine in (self.plain, self.speculative))

    def begin_plain(self, cohort: Cohort) -> None:
        """Begin the plain engine's start, unless it runs."""
        if self.plain is None or not self.plain.is_alive:
            self.plain = self._handle(None, f"{cohort.name}.plain")
            self._plain_start = self.plain.begin_start()

    def wait_for_plain(self) -> dict[str, Any] | None:
        """{seconds, machine} of the plain engine's start; None if it has been waited for before."""
        assert self.plain is not None, "only after begin_plain()"
        start, self._plain_start = self._plain_start, None
        return None if start is None else self._finish(self.plain, start)

    def start_speculative(self, cohort: Cohort, candidate: Candidate) -> dict[str, Any]:
        """Replace the speculative engine; {seconds, machine} of its start."""
        self.stop_speculative()
        self.speculative = self._handle(candidate, f"{cohort.name}.{candidate.label}")
        try:
            started = self._finish(self.speculative, self.speculative.begin_start())
        except EngineFailed:
            self.stop_speculative()  # what has not started is none to swap in
            raise
        self._serves = candidate.engine
        self._loaded = candidate.label
        return started

    def has_speculative(self, cohort: Cohort) -> bool:
        """Whether one runs that the cohort's candidates can be swapped in."""
        engine = self.speculative
        return engine is not None and engine.is_alive and self._serves == cohort.engine

    def stop_plain(self) -> None:
        if self.plain is not None:
            self.plain.stop()
        self.plain = None

    def stop_speculative(self) -> None:
        if self.speculative is not None:
            self.speculative.stop()
        self.speculative = self._serves = self._loaded = None

    def stop(self) -> None:
        """End both."""
        self.stop_plain()
        self.stop_speculative()

    def use(self, candidate: Candidate | None) -> RuntimeHandle:
        """The engine of a trial, with its drafter in place."""
        handle = self.plain if candidate is None else self.speculative
        if handle is None or not handle.is_alive:
            raise EngineDied("the engine of this trial is not running")
        if candidate is not None and candidate.label != self._loaded:
            self._loaded = None  # unknown until the swap has succeeded
            handle.swap(candidate.path)
            self._loaded = candidate.label
        return handle

    def load(
        self,
        prompts: tuple[Conversation, ...],
        traffic: Traffic,
        *,
        max_new_tokens: int | None = None,
        arrival_seed: int = 0,
    ) -> Load:
        """A block's load with the sweep's sampling settings."""
        c = self.config
        return Load(
            prompts=prompts,
            traffic=traffic,
            max_new_tokens=max_new_tokens or c.max_new_tokens,
            temperature=c.temperature_of(traffic),
            ignore_eos=c.ignore_eos,
            arrival_seed=arrival_seed,
            chat_template=c.chat_template,
            has_own_lengths=max_new_tokens is None,
        )

    def _handle(self, candidate: Candidate | None, name: str) -> RuntimeHandle:
        c, shape = self.config, candidate.shape if candidate else CHAIN
        memory = self.placement.memory_fraction(self.num_running + sum(e.num_running for e in self.beside))
        spec = EngineSpec(
            target=self.target,
            drafter=candidate.path if candidate else None,
            draft_steps=candidate.draft_steps if candidate else 0,
            topk=shape.topk,
            num_draft_tokens=shape.num_draft_tokens,
            nodes=c.engine.nodes,
            num_threads=c.engine.num_threads,
            resident_drafters=c.engine.resident_drafters,
            overrides={"random_seed": c.seed, **c.engine.overrides(), **memory},
        )
        return RuntimeHandle(
            spec,
            self.log_folder / f"{name}.log",
            num_cpus=self.placement.num_cpus,
            num_gpus=self.placement.num_gpus,
            block_timeout_s=c.engine.block_timeout_s,
            place=self.place,
        )

    def _finish(self, handle: RuntimeHandle, ref: Any) -> dict[str, Any]:
        started = handle.finish_start(ref, self.config.engine.start_timeout_s)
        return {"seconds": float(started["start_s"]), "machine": started["machine"]}
