"""The two engines of a sweep: the plain one, which lives throughout, and the speculative one of the current phase."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rayspec.farm.actor import RuntimeHandle, cluster_gpus
from rayspec.farm.load import Load, Traffic
from rayspec.farm.runtime import EngineFailed, EngineSpec
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan import Drafter
from rayspec.workloads import Conversation

logger = logging.getLogger(__name__)


class Engines:
    """Starts, calls and ends the engines. Every method that needs one raises EngineFailed."""

    def __init__(self, config: SweepConfig, target: str, log_folder: Path) -> None:
        self.config = config
        self.target = target
        self.log_folder = log_folder
        self.machine: dict[str, str] = {}  # of the last engine that started
        self.plain: RuntimeHandle | None = None
        self.speculative: RuntimeHandle | None = None
        self._plain_start: Any = None
        self._loaded: str | None = None  # label of the drafter that the speculative engine runs with

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Begin the plain engine's start; end whatever runs at the end."""
        try:
            self.plain = self._handle(None, 0, "plain")
            self._plain_start = self.plain.begin_start()
            yield
            self._end(RuntimeHandle.stop)
        except BaseException:
            self._end(RuntimeHandle.kill)  # a shutdown would wait for the block that runs
            raise

    def _end(self, how: Callable[[RuntimeHandle], None]) -> None:
        for handle in (self.plain, self.speculative):
            if handle is not None:
                how(handle)

    def wait_for_plain(self) -> float:
        """Seconds that the plain engine's start took."""
        assert self.plain is not None, "only inside running()"
        return self._finish(self.plain, self._plain_start)

    def start_speculative(self, drafter: Drafter, draft_steps: int) -> float:
        """Replace the speculative engine; seconds that the start took."""
        self.stop_speculative()
        self.speculative = self._handle(drafter, draft_steps, f"steps{draft_steps}-{drafter.label}")
        seconds = self._finish(self.speculative, self.speculative.begin_start())
        self._loaded = drafter.label
        return seconds

    def stop_speculative(self) -> None:
        if self.speculative is not None:
            self.speculative.stop()
        self.speculative = None
        self._loaded = None

    def use(self, drafter: Drafter | None) -> RuntimeHandle:
        """The engine of a trial, with its drafter in place."""
        handle = self.plain if drafter is None else self.speculative
        if handle is None or not handle.is_alive:
            raise EngineFailed("the engine of this trial is not running")
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
        c = self.config
        spec = EngineSpec(
            target=self.target,
            drafter=drafter.path if drafter else None,
            draft_steps=draft_steps,
            topk=c.topk,
            num_draft_tokens=c.num_draft_tokens,
            num_threads=c.engine.num_threads,
            overrides={"random_seed": c.seed, **c.engine.overrides()},
        )
        num_gpus = c.ray.num_gpus
        if num_gpus is None:
            num_gpus = 0.5 if cluster_gpus() > 0 else 0.0
        return RuntimeHandle(
            spec,
            self.log_folder / f"{name}.log",
            num_cpus=c.ray.num_cpus,
            num_gpus=num_gpus,
            block_timeout_s=c.engine.block_timeout_s,
        )

    def _finish(self, handle: RuntimeHandle, ref: Any) -> float:
        started = handle.finish_start(ref, self.config.engine.start_timeout_s)
        self.machine = started["machine"]
        return float(started["start_s"])
