"""How a Medusa drafter begins, and what its head reads along an answer."""

from __future__ import annotations

from sglang_ext.drafters.medusa.config import MedusaConfig, MedusaOptions
from sglang_ext.drafters.shared.last_hidden.training import carried, draft_steps, head_rows, init_body, roll_out
from sglang_ext.drafters.training import Steps, Target, check_no_layer

__all__ = ["carried", "config_for", "draft_steps", "head_rows", "init_body", "roll_out"]


def config_for(target: Target, options: MedusaOptions, recipe: Steps | None = None) -> MedusaConfig:
    check_no_layer(options.kind, recipe)
    return MedusaConfig.from_options(options, target.sizes())
