"""Train draft heads: rayspec train --config configs/train/drafters.yaml [key=value ...] [--plan]

Makes the target's answers where they are missing, then trains and exports every head of the config. The same command
continues after an interruption. Exits 0 when every drafter is exported, 1 where engines cannot answer or
workers cannot train, 2 for a config that cannot run.
"""

from collections.abc import Callable
from typing import Any

from rayspec.training.command import run


def main(arguments: list[str]) -> int:
    assert __doc__ is not None, "it is the help"
    return run("train", __doc__, arguments, _steps)


def _steps() -> tuple[Callable[..., list[str]], Callable[..., Any]]:
    from rayspec.training.drafter_runs import plan, train_all

    return plan, train_all
