"""One SGLang engine with its log, its failures made readable, and nothing left behind. Knows no Ray."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch

from rayspec.farm.head_latency import head_latencies
from rayspec.farm.load import Load, run_load
from rayspec.farm.other_load import OtherLoad
from rayspec.farm.processes import (
    end_processes,
    environment,
    has_ended,
    peak_memory_bytes,
    redirected_output,
    reset_peak_memory,
)
from rayspec.messages import log_tail
from rayspec.records import Generated, Measured, RequestRecord, StepSeconds
from sglang_ext import COUNT_SHORTLISTS, DRAFT_STEPS
from sglang_ext.drafters.counting import StepShape

if TYPE_CHECKING:
    from sglang_ext.adapter.engine import StepTimes

CHILD_CHECK_S = 0.5
FLUSH_TIMEOUT_S = 10.0
ERROR_LINE = re.compile(r"(\w+\.)*\w*(Error|Exception|Failed): .")
T = TypeVar("T")


class EngineFailed(RuntimeError):
    """The engine could not start, or refused; the message holds the cause and the end of its log."""


class EngineDied(EngineFailed):
    """The engine is gone; only a new one can go on."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine to start. `drafter` None is plain decoding; paths are resolved."""

    target: str
    drafter: str | None = None
    draft_steps: int = DRAFT_STEPS
    topk: int = 1
    num_draft_tokens: int | None = None
    nodes: int = 1  # that its tensor-parallel ranks (overrides["tp_size"]) are spread over evenly
    num_threads: int | None = None  # of the CPU; None: all cores that this machine gives the process
    resident_drafters: int = 0  # that a swap leaves in memory beside the running one
    overrides: dict[str, Any] = field(default_factory=dict)  # ServerArgs fields


class Runtime:
    """Start, measure, swap, stop. Call it from one thread, the process's main one (SGLang installs signal handlers).

    SGLang's children report their death by SIGQUIT to this process, whose default answer kills everything without a
    word; here it becomes EngineFailed from the call that is running, or from the next one.
    """

    def __init__(self, spec: EngineSpec, log_path: str | Path) -> None:
        self.spec = spec
        self.log_path = Path(log_path)
        self._engine: Any = None
        self._foreign_pids: set[int] = set()  # children of this process that are not the engine's

    @property
    def num_threads(self) -> int:
        return self.spec.num_threads or len(os.sched_getaffinity(0))

    def start(self, node: int = 0, address: str | None = None) -> float:
        """Start the engine, or its part on one of several nodes; returns the seconds it took. Raises EngineFailed.

        Args:
            node: number of this one; requests go to 0.
            address: host:port of node 0, where the nodes meet.
        """
        assert self._engine is None, "a runtime starts once"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._foreign_pids = {p.pid for p in psutil.Process().children(recursive=True)}
        begin = time.perf_counter()
        with (
            self._readable_failure("did not start"),
            redirected_output(self.log_path),
            environment(
                {
                    "OMP_NUM_THREADS": str(self.num_threads),  # Ray would leave it one thread per reserved core
                    "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",
                    COUNT_SHORTLISTS: "1",
                }
            ),
        ):
            from sglang_ext.adapter.engine import start_engine

            s = self.spec
            place = {"nnodes": s.nodes, "node_rank": node, "dist_init_addr": address} if s.nodes > 1 else {}
            self._engine = start_engine(
                s.target,
                s.drafter,
                draft_steps=s.draft_steps,
                topk=s.topk,
                num_draft_tokens=s.num_draft_tokens,
                **{"log_level": "info", "custom_sigquit_handler": _on_child_death, **place, **s.overrides},
            )
            if node == 0:
                self._watch_children()
        return time.perf_counter() - begin

    def wait_for_death(self) -> None:
        """Return once a process of the engine has ended: all that a node beside the first has to tell."""
        children = self._children()
        while not any(map(has_ended, children)):
            time.sleep(CHILD_CHECK_S)

    def swap(self, drafter: str) -> None:
        """Put another drafter (folder) into the running engine. Raises EngineFailed; the old one then stays."""
        from sglang_ext.adapter.engine import swap_drafter

        with self._readable_failure(f"did not take drafter {drafter}"):
            engine = self._running_engine()
            self._flush()
            swap_drafter(engine, drafter, self.spec.resident_drafters)

    def warm_up(self, load: Load) -> None:
        """Answer a block without recording it."""
        with self._readable_failure("failed while warming up"):
            self._run(self._answer(self._running_engine(), load))

    def measure(self, load: Load) -> Measured:
        """Answer a block that finds an empty prefix cache. Raises EngineFailed."""
        with self._readable_failure("failed while measuring"):
            engine = self._running_engine()
            self._flush()
            before = self._step_times()
            children = self._children()
            reset_peak_memory(children)
            others = OtherLoad()
            wall_s, requests = self._run(self._answer(engine, load))
            other_share = others.share()
            peak = peak_memory_bytes(children)
            after = self._step_times()
        steps = None if before is None or after is None else StepSeconds(**asdict(after - before))
        return Measured(
            wall_s=wall_s,
            requests=requests,
            step_seconds=steps,
            other_cpu_share=other_share,
            peak_memory_bytes=peak,
        )

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Mapping[str, Any]]) -> list[Generated]:
        """The continuation of each prompt (token ids) under its own sampling parameters. Raises EngineFailed."""
        with self._readable_failure("failed while generating"):
            engine = self._running_engine()
            answers = self._run(
                engine.async_generate(input_ids=[list(p) for p in prompts], sampling_params=[dict(s) for s in sampling])
            )
        return [
            Generated(output_ids=answer["output_ids"], verify_steps=answer["meta_info"].get("spec_verify_ct", 0))
            for answer in answers
        ]

    @staticmethod
    def _answer(engine: Any, load: Load) -> Coroutine[Any, Any, tuple[float, tuple[RequestRecord, ...]]]:
        from sglang_ext.adapter.engine import tokenizer

        return run_load(engine, load, tokenizer(engine))

    def _step_times(self) -> "StepTimes | None":
        """The engine's clock over its life, which on an accelerator counts and tells no time; None for the plain
        engine."""
        from sglang_ext.adapter.engine import step_times

        return step_times(self._engine) if self.spec.drafter else None

    def head_latencies(self, drafters: dict[str, str], requests: int, shape: StepShape) -> dict[str, float]:
        """Median seconds of each head alone in this process, at the engine's dtype and number of threads."""
        return head_latencies(
            drafters, requests=requests, shape=shape, dtype=self._dtype(), num_threads=self.num_threads
        )

    def stop(self) -> None:
        """Shut the engine down and end every process that it started. Safe to call twice, and after a failed start."""
        children = self._children()
        try:
            if self._engine is not None:
                self._engine.shutdown()
        finally:
            self._engine = None
            end_processes(children)

    def _children(self) -> list[psutil.Process]:
        """The processes that the engine started."""
        return [p for p in psutil.Process().children(recursive=True) if p.pid not in self._foreign_pids]

    def _logged_error(self) -> str:
        """The last error that a process which died wrote into the log."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if ERROR_LINE.match(line)), "an engine process died")

    @property
    def dtype_name(self) -> str:
        """That of the weights that no quantisation stores otherwise."""
        return str(self._dtype()).removeprefix("torch.")

    def _dtype(self) -> torch.dtype:
        name = self.spec.overrides.get("dtype", "auto")
        if name == "auto":
            return torch.bfloat16 if torch.cuda.is_available() else torch.float32
        return {"half": torch.float16, "float": torch.float32}.get(name) or getattr(torch, name)

    def _running_engine(self) -> Any:
        if self._engine is None:
            raise EngineFailed("the engine is not running")
        if _ChildDeath.happened:
            raise _ChildDeath("an engine process died")
        return self._engine

    def _watch_children(self) -> None:
        """Put our SIGQUIT handler back in front of the one that SGLang installs with its first request."""
        from sglang_ext.adapter.engine import take_signal

        take_signal(self._engine, signal.SIGQUIT)
        signal.signal(signal.SIGQUIT, _on_child_death)

    def _flush(self) -> None:
        """Empty the prefix cache; the scheduler lets go of a request a little after its last token has arrived."""
        from sglang_ext.adapter.engine import flushed

        problem = self._run(flushed(self._engine, FLUSH_TIMEOUT_S))
        if problem is not None:
            raise EngineFailed(f"the prefix cache could not be flushed within {FLUSH_TIMEOUT_S:g} s: {problem}")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the engine's own loop, giving up as soon as an engine process dies."""
        from sglang_ext.adapter.engine import loop_of

        async def watched() -> T:
            # an exception from a signal handler would be lost inside the loop, so look at the flag instead
            task = asyncio.ensure_future(work)
            while not task.done():
                await asyncio.wait({task}, timeout=CHILD_CHECK_S)
                if _ChildDeath.happened and not task.done():
                    task.cancel()
                    raise _ChildDeath("an engine process died")
            return task.result()

        _ChildDeath.is_expected = False
        try:
            return loop_of(self._engine).run_until_complete(watched())
        finally:
            _ChildDeath.is_expected = True

    @contextlib.contextmanager
    def _readable_failure(self, what: str) -> Iterator[None]:
        """Turn any failure into EngineFailed with the log's tail; only text crosses process borders safely."""
        _ChildDeath.is_expected = True
        try:
            yield
        except EngineFailed:
            raise
        except Exception as error:
            role = f"engine with {self.spec.drafter}" if self.spec.drafter else "plain engine"
            cause = self._logged_error() if isinstance(error, _ChildDeath) else "; ".join(_messages(error))
            kind = EngineDied if _ChildDeath.happened else EngineFailed
            raise kind(f"{role} {what}: {cause}\n--- end of {self.log_path} ---\n{log_tail(self.log_path)}") from error
        finally:
            _ChildDeath.is_expected = False


def _messages(error: BaseException) -> list[str]:
    """The messages of an error, of the members of a group, without their tracebacks."""
    if isinstance(error, BaseExceptionGroup):
        return [m for e in error.exceptions for m in _messages(e)]
    return [f"{type(error).__name__}: {error}"]


class _ChildDeath(Exception):
    """An engine process died. SIGQUIT raises it inside a blocking call; elsewhere it is only remembered."""

    is_expected = False
    happened = False


def _on_child_death(signum: int, frame: object) -> None:
    # a module function, since SGLang pickles it together with its arguments
    first = not _ChildDeath.happened
    _ChildDeath.happened = True
    if first and _ChildDeath.is_expected:
        raise _ChildDeath("an engine process died")
