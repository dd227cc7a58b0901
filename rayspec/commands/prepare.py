"""Make what drafters are trained on: rayspec prepare --config configs/train/drafters.yaml [key=value ...] [--plan]

Makes the target's answers where they are missing and, with hidden_states=offline, stores its hidden states along them:
what rayspec train with the same config would do first. The same command continues after an interruption. Exits 0 when
all is there, 1 where engines cannot answer, 2 for a config that cannot run.
"""

from collections.abc import Callable
from typing import Any

from rayspec.training.command import run


def main(arguments: list[str]) -> int:
    assert __doc__ is not None, "it is the help"
    return run("prepare", __doc__, arguments, _steps)


def _steps() -> tuple[Callable[..., list[str]], Callable[..., Any]]:
    from rayspec.training.prepare import plan_prepare, prepare

    return plan_prepare, prepare
