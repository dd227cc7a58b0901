"""Checks everything that a user can mistype, before Ray or an engine starts."""

from dataclasses import dataclass

from rayspec.shipped import target_path
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan import Drafter, Plan, describe, inspect_drafter, make_plan
from rayspec.workloads import Prompt, load_workload


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A config whose prompts, target and drafters were found, and its plan."""

    config: SweepConfig
    prompts: tuple[Prompt, ...]
    target: str
    drafters: tuple[Drafter, ...]
    plan: Plan

    def describe(self) -> str:
        return describe(self.plan, self.config, len(self.prompts))


def prepare(config: SweepConfig) -> Prepared:
    """Resolve names and make the plan. Raises ValueError."""
    prompts = tuple(load_workload(config.workload, config.seed))
    target = target_path(config.target)
    drafters = tuple(inspect_drafter(d) for d in config.drafters)
    plan = make_plan(config, len(prompts), drafters)
    return Prepared(config=config, prompts=prompts, target=target, drafters=drafters, plan=plan)
