"""What the rest of rayspec calls to run SGLang: arguments, environment, checks and the live swap."""

import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sglang_ext import DRAFT_STEPS
from sglang_ext.adapter.activation import has_accelerator
from sglang_ext.adapter.algorithms import algorithm_of
from sglang_ext.adapter.cpu.imports import quick_imports
from sglang_ext.adapter.patches import on_cpu_platform
from sglang_ext.adapter.plugin import MODEL_PACKAGE, check_version
from sglang_ext.adapter.requests import refuse_all
from sglang_ext.adapter.swap import NOT_CAPTURED, STILL_RUNNING
from sglang_ext.adapter.toolkit import check_toolkit

SWAP_PATIENCE_S = 5.0
BACKENDS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
    "sampling_backend",
)


def engine_arguments(
    target: str,
    drafter: str | None,
    *,
    draft_steps: int = DRAFT_STEPS,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine` for a target with a drafter, or without one (plain decoding).

    Args:
        draft_steps: draft forwards a step; a chain proposes as many tokens.
        topk: 1 for a chain; more for a tree of `num_draft_tokens` verified nodes including the root.
        overrides: any further argument of SGLang's `ServerArgs`; wins over ours.
    """
    arguments: dict[str, Any] = {"model_path": target, "log_level": "warning", "random_seed": 0}
    if drafter is not None:
        if draft_steps < 1:
            raise ValueError(f"draft_steps must be at least 1, got {draft_steps}")
        if topk == 1 and num_draft_tokens not in (None, draft_steps + 1):
            raise ValueError(
                f"a chain (topk 1) of {draft_steps} steps verifies {draft_steps + 1} tokens, "
                f"got num_draft_tokens {num_draft_tokens}; leave it out"
            )
        if topk > 1 and num_draft_tokens is None:
            raise ValueError(f"topk {topk} builds a tree: num_draft_tokens must say how many nodes are verified")
        arguments |= {
            "speculative_algorithm": algorithm_of(drafter, topk),
            "speculative_draft_model_path": drafter,
            "speculative_num_steps": draft_steps,
            "speculative_eagle_topk": topk,
            "speculative_num_draft_tokens": num_draft_tokens or draft_steps + 1,
        }
    return arguments | overrides


def engine_environment() -> dict[str, str]:
    """Environment variables that a process needs before SGLang is imported in it (Ray actors inherit none)."""
    names = ("SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
    return {"SGLANG_EXTERNAL_MODEL_PACKAGE": MODEL_PACKAGE} | {
        name: os.environ[name] for name in names if name in os.environ
    }


def assert_plugin_active() -> None:
    """Raise RuntimeError unless SGLang will load our plugin and, without an accelerator, our platform."""
    from sglang.srt.platforms import current_platform

    check_version()
    for group in ("sglang.srt.plugins", "sglang.srt.platforms"):
        if not any(e.value.startswith("sglang_ext.") for e in entry_points(group=group)):
            raise RuntimeError(
                f"rayspec is not installed as a SGLang plugin (no entry point in {group}); pip install ."
            )
    if not has_accelerator() and not on_cpu_platform():
        raise RuntimeError(
            f"SGLang runs on {current_platform!r} instead of rayspec's CPU platform; "
            "SGLANG_PLUGINS or SGLANG_PLATFORM excludes it"
        )


def start_engine(target: str, drafter: str | None, **options: Any) -> Any:
    """SGLang's engine in this process, with `engine_arguments`. Raises RuntimeError where SGLang would run without our
    plugin, or on CUDA without a compiler. Imports of half a minute."""
    with quick_imports(skip=not has_accelerator()):
        from sglang.srt.entrypoints.engine import Engine
    arguments = engine_arguments(target, drafter, **options)
    assert_plugin_active()
    check_toolkit()
    return Engine(**arguments)


@dataclass(frozen=True)
class StepTimes:
    """Totals over decode steps; see `StepTotals`. Differences of two readings are what one wants. `draft_s` holds
    `head_s` and `embedding_s`, all of a step but its verification, and `head_s` holds `routing_s` and `choice_s`.
    `scoring_rows` and `scored_tokens` are sums over the draft positions, of each of which the two others tell.
    `most_scored`, for one row, is since the reading before, so that a difference has the later one's."""

    steps: int
    requests: int
    verified_tokens: int
    head_s: float
    head_request_s: float
    routing_s: float
    choice_s: float
    embedding_s: float
    draft_s: float
    verify_s: float
    scoring_rows: int
    scored_tokens: int
    most_scored: int
    scoring_rows_by_position: tuple[int, ...]
    scored_tokens_by_position: tuple[int, ...]

    def __sub__(self, earlier: "StepTimes") -> "StepTimes":
        spent = {f.name: _difference(getattr(self, f.name), getattr(earlier, f.name)) for f in fields(self)}
        return StepTimes(**{**spent, "most_scored": self.most_scored})


def _difference(now: Any, earlier: Any) -> Any:
    """Of two numbers, or of two lists of them, the earlier of which may be shorter."""
    if isinstance(now, tuple):
        return tuple(a - b for a, b in zip_longest(now, earlier, fillvalue=0))
    return now - earlier


def start_step_clock(engine: Any) -> None:
    """On an accelerator, where none runs by itself, let the clock of a speculative engine run from now on."""
    engine.collective_rpc("rayspec_start_step_clock")


def step_times(engine: Any) -> StepTimes | None:
    """Where the time of all speculative steps so far went; None where no clock runs (`start_step_clock`) and
    nothing is counted. On an accelerator without a head's share, and without any time where it only counts. The engine
    must be speculative."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "clock.json"
        engine.collective_rpc("rayspec_write_step_clock", path=str(file))
        clock = json.loads(file.read_text())
    if clock is None:
        return None
    step_s = clock.pop("step_s")
    rows, tokens = (tuple(clock.pop(name)) for name in ("scoring_rows", "scored_tokens"))
    return StepTimes(
        **clock,
        draft_s=step_s - clock["verify_s"],
        scoring_rows=sum(rows),
        scored_tokens=sum(tokens),
        scoring_rows_by_position=rows,
        scored_tokens_by_position=tokens,
    )


def policy_report(engine: Any) -> dict[str, Any] | None:
    """What the policy that a speculative engine follows has done: `steps` by draft length, `switches`, steps that the
    drafter `rested` in, `lost` results, `acceptance` by position, and `history`, [unix time, requests, draft length] of
    the last steps; None without a policy."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.json"
        engine.collective_rpc("rayspec_write_policy", path=str(file))
        return json.loads(file.read_text())


def backends(engine: Any) -> dict[str, str]:
    """Those of SGLang's fields `*_backend` that say what attends and samples, as it resolved them."""
    resolved = engine.tokenizer_manager.server_args.resolved_dict()
    return {name: resolved[name] for name in BACKENDS if resolved.get(name)}


def tokenizer(engine: Any) -> Any:
    """The target's Hugging Face tokenizer as the engine uses it, with its chat template if it has one."""
    return engine.tokenizer_manager.tokenizer


def loop_of(engine: Any) -> asyncio.AbstractEventLoop:
    """In which the engine answers: other work for it has to run there."""
    return engine.loop


def take_signal(engine: Any, number: int) -> None:
    """Take the handler of a signal from the engine, which installs its own with its first request."""
    engine.flush_cache()  # installs it
    loop_of(engine).remove_signal_handler(number)


async def flushed(engine: Any, timeout_s: float) -> str | None:
    """Empty the prefix cache, in the engine's loop; SGLang's message where requests ran for longer than `timeout_s`."""
    answer = await engine.tokenizer_manager.flush_cache(timeout_s=timeout_s)
    return None if answer.success else str(answer.message)


def swap_drafter(engine: Any, path: str, resident: int = 0) -> None:
    """Replace the drafter of a running engine (same body shapes, any head) and flush its caches; milliseconds, where
    there are graphs seconds. `resident`: of those that ran before, so many stay in memory with their graphs, as far as
    they share the running body, and a swap to one of them takes milliseconds.

    Raises ValueError with the scheduler's message; the running drafter is then unchanged. Where the new one's draft
    passes could not be captured none is left, and every request is refused until a swap succeeds.
    """
    deadline = time.monotonic() + SWAP_PATIENCE_S
    while True:
        try:
            engine.collective_rpc("rayspec_swap_drafter", path=str(path), resident=resident)
            break
        except AssertionError as error:  # collective_rpc asserts success and carries the message
            if NOT_CAPTURED in str(error):  # a request would raise in the scheduler, which ends the server
                refuse_all(engine.tokenizer_manager, str(error))
            # an answer reaches us a little before the scheduler has let go of its request
            if STILL_RUNNING not in str(error) or time.monotonic() > deadline:
                raise ValueError(f"could not swap the drafter to {path}: {error}") from error
            time.sleep(0.01)
    refuse_all(engine.tokenizer_manager, None)
