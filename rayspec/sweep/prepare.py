"""Checks everything that a user can mistype, before Ray or an engine starts."""

from dataclasses import dataclass

from rayspec.shipped import target_path
from rayspec.statistics import MIN_BLOCKS
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan import Drafter, Plan, describe, inspect_drafter, make_plan
from rayspec.workloads import Conversation, load_workload


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A config whose prompts, target and drafters were found, and its plan."""

    config: SweepConfig
    prompts: tuple[Conversation, ...]
    target: str
    drafters: tuple[Drafter, ...]
    plan: Plan

    def describe(self) -> str:
        turns = sum(len(p.turns) for p in self.prompts)
        return describe(self.plan, self.config, len(self.prompts), turns)


def prepare(config: SweepConfig) -> Prepared:
    """Resolve names and make the plan. Raises ValueError."""
    prompts = tuple(load_workload(config.workload, config.seed))
    target = target_path(config.target)
    drafters = tuple(inspect_drafter(d, config) for d in config.drafters)
    num_blocks = -(-len(prompts) // config.block_prompts)
    if config.stop.ci_width is not None and num_blocks < MIN_BLOCKS:
        raise ValueError(
            f"stop.ci_width needs a confidence interval, and so at least {MIN_BLOCKS} blocks; {len(prompts)} prompts "
            f"in blocks of block_prompts={config.block_prompts} are {num_blocks}: take more prompts or smaller blocks"
        )
    plan = make_plan(config, len(prompts), drafters)
    if (config.search.samples or 0) > len(plan.cohorts):
        raise ValueError(
            f"search.samples must be at most the number of candidates, {len(plan.cohorts)} (drafters without the "
            f"baseline and without a problem x draft_steps), got {config.search.samples}; algorithm=grid takes all"
        )
    return Prepared(config=config, prompts=prompts, target=target, drafters=drafters, plan=plan)
