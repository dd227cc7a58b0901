"""Checks everything that a user can mistype, before Ray or an engine starts."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayspec.champion_fields import not_measured
from rayspec.statistics import MIN_BLOCKS
from rayspec.sweep.config import EngineConfig, SweepConfig
from rayspec.sweep.plan.drafters import inspect_drafter
from rayspec.sweep.plan.heads import plan_heads
from rayspec.sweep.plan.lengths import fitting
from rayspec.sweep.plan.made_heads import MadeHead, make_heads
from rayspec.sweep.plan.streams import check_streams_run, stream_warnings
from rayspec.sweep.plan.traces import TraceReplay
from rayspec.sweep.plan.trials import Plan, describe, make_plan
from rayspec.target import TargetModel, read_target
from rayspec.workloads import Conversation, load_workload
from sglang_ext.adapter.server_fields import check_overrides


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A config whose prompts, target and drafters were found, and its plan."""

    config: SweepConfig
    prompts: tuple[Conversation, ...]
    target: str
    plan: Plan
    heads: tuple[MadeHead, ...] = ()  # to make before it runs
    dropped: int = 0  # prompts that no engine could take
    notes: tuple[str, ...] = ()  # on the trace

    def describe(self) -> str:
        lines = [describe(self.plan, self.config, self.prompts), *self.notes]
        if self.heads:
            lines.append("\n".join(["Heads that need no training:", *(f"- {head.describe()}" for head in self.heads)]))
        if self.dropped:
            lines.append(f"{self.dropped} prompts are too long and left out.")
        if len(self.plan.spans) < MIN_BLOCKS:
            few = _too_few_blocks(self.config, self.prompts, self.plan)
            lines.append(f"warning: speed-ups will have no confidence interval; {few}")
        lines += stream_warnings(self.config, self.plan)
        if others := not_measured(self.config.engine.extra):
            lines.append(
                f"warning: engine.extra has {', '.join(others)}, no setting of speed that a champion may bring, so "
                "that no winner of this sweep can be promoted (rayspec report --promote); leave it out if you want one"
            )
        return "\n".join(lines)

    def make_heads(self) -> None:
        """Those of `heads` that are not there yet. Raises ValueError and OSError."""
        make_heads(self.heads, self.config, self.target)


def prepare(config: SweepConfig) -> Prepared:
    """Resolve names and make the plan. Raises ValueError."""
    replay = None if config.trace is None else TraceReplay(config)
    asked = [] if replay else load_workload(config.workload, config.seed)
    target = _read_target(config)
    candidates = [c for entry in config.drafters for c in inspect_drafter(entry, config, target)]
    heads = plan_heads(config, target.path)
    candidates += [c for head in heads for c in head.candidates(config, target)]
    prompts: tuple[Conversation, ...]
    num_asked = len(asked)
    notes: tuple[str, ...] = ()
    if replay is None:
        prompts = fitting(asked, config, target, candidates)
    else:
        prompts = traced = replay.prompts(target, candidates)
        num_asked, notes = len(replay.requests), replay.describe(traced)
    if all(c.problem for c in candidates):
        causes = {c.label: c.problem for c in candidates}
        raise ValueError("no drafter can be measured: " + "; ".join(f"{k}: {v}" for k, v in causes.items()))
    plan = make_plan(config, len(prompts), candidates)
    if config.stop.ci_width is not None and len(plan.spans) < MIN_BLOCKS:
        raise ValueError(f"stop.ci_width needs a confidence interval; {_too_few_blocks(config, prompts, plan)}")
    check_streams_run(config, plan)
    if (config.search.samples or 0) > len(plan.cohorts):
        raise ValueError(
            f"search.samples must be at most the number of candidates, {len(plan.cohorts)} (drafters without the "
            f"baseline and without a problem x draft_steps), got {config.search.samples}; algorithm=grid takes all"
        )
    return Prepared(
        config=config,
        prompts=prompts,
        target=target.path,
        plan=plan,
        heads=tuple(heads),
        dropped=num_asked - len(prompts),
        notes=notes,
    )


def _read_target(config: SweepConfig) -> TargetModel:
    """Raises ValueError for a target that cannot be read, and for what SGLang would not take as its options."""
    engine = config.engine
    named = {name: getattr(engine, name) for name in EngineConfig.server_fields}
    check_overrides({name: value for name, value in named.items() if value is not None}, "engine")
    check_overrides(engine.extra, "engine.extra")
    extra = engine.extra
    return read_target(
        config.target,
        tokenizer=extra.get("tokenizer_path"),
        revision=extra.get("revision"),
        trust_remote_code=extra.get("trust_remote_code", False),
        needs_weights="load_format" not in extra,
    )


def _too_few_blocks(config: SweepConfig, prompts: Sequence[Conversation], plan: Plan) -> str:
    return (
        f"{len(prompts)} prompts in blocks of block_prompts={config.block_prompts} are {len(plan.spans)} block(s), and "
        f"an interval takes at least {MIN_BLOCKS} blocks: take more prompts or smaller blocks"
    )
