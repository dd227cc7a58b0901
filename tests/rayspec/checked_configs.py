"""A training's config as a command checks it."""

from rayspec.training.checks import check_config, checked_target
from rayspec.training.drafter_config import DrafterTrainConfig


def check(config: DrafterTrainConfig) -> DrafterTrainConfig:
    return check_config(config, checked_target(config))
