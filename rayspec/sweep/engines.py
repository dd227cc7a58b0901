"""The two engines of a cohort, which the next cohort takes over: the plain one, and the speculative one where its
draft steps and its drafters' family are the same."""

from pathlib import Path
from typing import Any

from rayspec.farm.actor import RuntimeHandle
from rayspec.farm.load import Load, Traffic
from rayspec.farm.runtime import EngineDied, EngineSpec
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.placement import Placement
from rayspec.sweep.plan import Cohort, Drafter
from rayspec.sweep.shape import CHAIN
from rayspec.workloads import Conversation


class Engines:
    """Starts, calls and ends the engines. Every method that needs one raises EngineFailed."""

    def __init__(self, config: SweepConfig, placement: Placement, target: str, log_folder: Path) -> None:
        self.config = config
        self.placement = placement
        self.target = target
        self.log_folder = log_folder
        self.plain: RuntimeHandle | None = None
        self.speculative: RuntimeHandle | None = None
        self._plain_start: Any = None
        self._serves: tuple[tuple[str, object], int] | None = None  # family and draft steps of the speculative engine
        self._loaded: str | None = None  # label of the drafter that the speculative engine runs with

    def begin_plain(self, cohort: Cohort) -> None:
        """Begin the plain engine's start, unless it runs."""
        if self.plain is None or not self.plain.is_alive:
            self.plain = self._handle(None, 0, f"{cohort.name}.plain")
            self._plain_start = self.plain.begin_start()

    def wait_for_plain(self) -> dict[str, Any] | None:
        """{seconds, machine} of the plain engine's start; None if it has been waited for before."""
        assert self.plain is not None, "only after begin_plain()"
        start, self._plain_start = self._plain_start, None
        return None if start is None else self._finish(self.plain, start)

    def start_speculative(self, cohort: Cohort, drafter: Drafter) -> dict[str, Any]:
        """Replace the speculative engine; {seconds, machine} of its start."""
        self.stop_speculative()
        self.speculative = self._handle(drafter, cohort.draft_steps, f"{cohort.name}.{drafter.label}")
        started = self._finish(self.speculative, self.speculative.begin_start())
        self._serves = cohort.family, cohort.draft_steps
        self._loaded = drafter.label
        return started

    def has_speculative(self, cohort: Cohort) -> bool:
        """Whether one runs that the cohort's drafters can be swapped in."""
        engine = self.speculative
        wanted = cohort.family, cohort.draft_steps
        return engine is not None and engine.is_alive and self._serves == wanted

    def stop_plain(self) -> None:
        if self.plain is not None:
            self.plain.stop()
        self.plain = None

    def stop_speculative(self) -> None:
        if self.speculative is not None:
            self.speculative.stop()
        self.speculative = None
        self._loaded = None

    def stop(self) -> None:
        """End both."""
        self.stop_plain()
        self.stop_speculative()

    def use(self, drafter: Drafter | None) -> RuntimeHandle:
        """The engine of a trial, with its drafter in place."""
        handle = self.plain if drafter is None else self.speculative
        if handle is None or not handle.is_alive:
            raise EngineDied("the engine of this trial is not running")
        if drafter is not None and drafter.label != self._loaded:
            self._loaded = None  # unknown until the swap has succeeded
            handle.swap(drafter.path)
            self._loaded = drafter.label
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
            temperature=c.temperature,
            ignore_eos=c.ignore_eos,
            arrival_seed=arrival_seed,
            chat_template=c.chat_template,
        )

    def _handle(self, drafter: Drafter | None, draft_steps: int, name: str) -> RuntimeHandle:
        c, shape = self.config, drafter.shape if drafter else CHAIN
        other = self.speculative if drafter is None else self.plain
        memory = self.placement.memory_fraction(is_alone=other is None or not other.is_alive)
        spec = EngineSpec(
            target=self.target,
            drafter=drafter.path if drafter else None,
            draft_steps=draft_steps,
            topk=shape.topk,
            num_draft_tokens=shape.num_draft_tokens,
            nodes=c.engine.nodes,
            num_threads=c.engine.num_threads,
            overrides={"random_seed": c.seed, **c.engine.overrides(), **memory},
        )
        return RuntimeHandle(
            spec,
            self.log_folder / f"{name}.log",
            num_cpus=self.placement.num_cpus,
            num_gpus=self.placement.num_gpus,
            block_timeout_s=c.engine.block_timeout_s,
        )

    def _finish(self, handle: RuntimeHandle, ref: Any) -> dict[str, Any]:
        started = handle.finish_start(ref, self.config.engine.start_timeout_s)
        return {"seconds": float(started["start_s"]), "machine": started["machine"]}
