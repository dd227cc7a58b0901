"""Whether as many requests run at once as `concurrency` says, with a drafter and without one."""

from __future__ import annotations

from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.trials import Plan

RUNS = "max_running_requests"  # SGLang's argument
ALWAYS_RUN = 32  # at once, if it is left open: on the CPU platform 32, under speculation on a GPU 48, else hundreds


def check_streams_run(config: SweepConfig, plan: Plan) -> None:
    """Raise ValueError where the engines would be left to run fewer requests than are sent, and not all engines as
    many: what waits behind a drafter would be compared with what runs without one."""
    most = min(max(config.concurrency, default=0), _largest_block(plan))
    if most > ALWAYS_RUN and RUNS not in config.engine.extra:
        raise ValueError(
            f"concurrency {max(config.concurrency)} sends {most} requests at once, but engine.extra.{RUNS} is not set, "
            f"and SGLang then runs {ALWAYS_RUN} of them on a CPU, and on a GPU 48 with drafts and more without, where "
            f"the two would not be compared at the same load; set engine.extra.{RUNS}={most}, or more"
        )


def stream_warnings(config: SweepConfig, plan: Plan) -> list[str]:
    """Warnings about numbers of streams that will not all run at once."""
    largest, runs = _largest_block(plan), config.engine.extra.get(RUNS)
    lines = []
    if wide := [streams for streams in config.concurrency if streams > largest]:
        lines.append(
            f"warning: concurrency {wide}, but a block has {largest} prompts, so that no more streams run at once; "
            f"raise block_prompts to {max(wide)} or more"
        )
    if waiting := [streams for streams in config.concurrency if runs is not None and min(streams, largest) > runs]:
        lines.append(
            f"warning: concurrency {waiting}, but engine.extra.{RUNS}={runs}, so that the others wait; raise it unless "
            "waiting is what you want to measure"
        )
    return lines


def _largest_block(plan: Plan) -> int:
    return max(last - first for first, last in plan.spans)
