"""Real engines on the tests' models. An engine start costs some seconds, so tests of the same settings share one, and
those of a module with the same parameter `engine` come together (`tests/conftest.py`).

A process runs one engine at a time. All of them fork from one server (`fork_server`), which so imports SGLang once.
"""

import logging
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fixture_models import TARGET
from volume import volume

from sglang_ext.adapter.cpu import fork_server
from sglang_ext.adapter.engine import assert_plugin_active, engine_arguments
from sglang_ext.adapter.patches import lent

fork_server.stays = True

NUM_PROMPTS, NUM_STOPS, NEW_TOKENS = 56, volume(12, 6), volume(24, 16)
# two concurrent requests at most would hide ragged batches; prefills of 32-160 tokens share chunks of 128
ENGINE = {"max_running_requests": 8, "chunked_prefill_size": 128, "max_total_tokens": 16384, "log_level": "error"}

Ids = list[int]


_kept: dict[tuple[Any, ...], tuple[Any, ExitStack]] = {}  # by its settings, the engine that runs between tests, or none


@contextmanager
def running_engine(drafter: Path | None, *, target: Path = TARGET, **options: Any) -> Iterator[Any]:
    """An engine for this block alone. One that was kept ends."""
    import sglang

    end_kept_engine()
    assert_plugin_active()
    others = set(multiprocessing.active_children())
    with logging_as_it_was():
        engine = sglang.Engine(
            **engine_arguments(str(target), None if drafter is None else str(drafter), **(ENGINE | options))
        )
    own = set(multiprocessing.active_children()) - others
    try:
        yield engine
    finally:
        shut_down(engine, own)


def kept_engine(drafter: Path | None, **options: Any) -> Any:
    """The engine of these settings, which runs until another one is asked for. A test swaps in what it needs."""
    settings = (drafter, *sorted(options.items()))
    if settings not in _kept:
        stack = ExitStack()
        engine = stack.enter_context(running_engine(drafter, **options))
        _kept[settings] = engine, stack
    return _kept[settings][0]


def end_kept_engine() -> None:
    while _kept:
        _, (_, stack) = _kept.popitem()
        stack.close()


def shut_down(engine: Any, processes: Iterable[BaseProcess]) -> None:
    """With the processes that it started, where SGLang would end all children of this process: servers and the fork
    server with them."""

    def end(*_: Any, **__: Any) -> None:
        for process in processes:
            process.kill()
            process.join()

    with lent("sglang.srt.entrypoints.engine.kill_process_tree", end):
        engine.shutdown()
    os.environ.pop("SGLANG_CPU_OMP_THREADS_BIND", None)  # of several ranks alone, and left behind by them


@contextmanager
def logging_as_it_was() -> Iterator[None]:
    """An engine sets the root logger's level and handlers of the process that starts it, here that of later tests."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def generate(engine: Any, prompts: list[Ids], new_tokens: int = NEW_TOKENS, **sampling: Any) -> list[dict[str, Any]]:
    """All prompts at once (up to 8 run together), greedy unless said otherwise."""
    return engine.generate(
        input_ids=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": new_tokens, **sampling}
    )


def output_ids(answers: list[dict[str, Any]]) -> list[Ids]:
    return [answer["output_ids"] for answer in answers]


@dataclass(frozen=True)
class Oracle:
    """Plain SGLang's greedy answers, and where they stop when a token of their middle is made a stop token."""

    answers: list[Ids]
    stop_tokens: Ids
    stopped: list[Ids]
    long_answer: Ids
