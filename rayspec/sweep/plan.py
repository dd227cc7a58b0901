"""From a config to trials and their interleaved schedule. Pure: no Ray, no engine.

A cohort is the candidates that are measured interleaved, against their own plain and baseline trials, on one pair of
engines: one without speculation, and one for a value of draft_steps and a family of drafters (one kind of worker, one
body, one shape of draft), which are swapped while it runs. A cohort of another family than the baseline's stands
against plain decoding alone. Its schedule is a sequence of rounds: a round is one block of prompts under one traffic
(so many streams, or so many arrivals a second), answered by every trial in turn, in an order that rotates from round to
round, so that no trial always comes first and a change of the machine's speed meets them all. `stopping` decides how
many passes over the workload are made.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rayspec.farm.load import Traffic
from rayspec.shipped import drafter_label, drafter_path
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.fits import check_fits
from rayspec.sweep.shape import CHAIN, DraftShape
from rayspec.tables import render_table
from rayspec.target import TargetModel
from sglang_ext.adapter.algorithms import algorithm_of, fixed_body, swap_group
from sglang_ext.drafters.checkpoint import check_files
from sglang_ext.drafters.checkpoint_config import read_info

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A checkpoint of the sweep. `problem` is why it cannot be measured: its trials fail, the others do not."""

    label: str
    path: str
    head: Mapping[str, object] = field(hash=False)  # kind and options
    algorithm: str = "EAGLE3"  # of SGLang or of ours, which serves it
    body: object = field(default=None, hash=False)  # `fixed_body`: what only a new engine changes
    shape: DraftShape = CHAIN
    problem: str | None = None

    @property
    def worker(self) -> str:
        """What an engine is started for."""
        group = swap_group(self.algorithm)
        return group if self.shape.topk == 1 else f"{group}-{self.shape.label}"

    @property
    def family(self) -> tuple[str, object]:
        """Those of one family can be swapped for each other in a running engine."""
        return self.worker, self.body


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One point of the sweep. `drafter` None is plain decoding; then draft_steps is 0."""

    drafter: Drafter | None
    draft_steps: int
    traffic: Traffic

    @property
    def label(self) -> str:
        return self.drafter.label if self.drafter else PLAIN

    @property
    def algorithm(self) -> str:
        return self.drafter.algorithm if self.drafter else PLAIN

    @property
    def name(self) -> str:
        steps = f"-s{self.draft_steps}" if self.drafter else ""
        return f"{self.label}{steps}-{self.traffic.label}"


@dataclass(frozen=True, kw_only=True)
class Round:
    """One block of prompts, [first, last) of the workload, answered by all `trials` in this order."""

    index: int  # over the whole sweep
    prompt_block: int
    first: int
    last: int
    trials: tuple[Trial, ...]
    repeat: int = 0  # pass over the workload that it belongs to

    @property
    def traffic(self) -> Traffic:
        return self.trials[0].traffic


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The trials that share a pair of engines; `trials` begin with those of plain decoding."""

    name: str
    number: int  # in the plan
    draft_steps: int
    family: tuple[str, object]
    trials: tuple[Trial, ...]

    @property
    def drafters(self) -> list[Drafter]:
        return list(dict.fromkeys(t.drafter for t in self.trials if t.drafter))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Cohorts that there may be, and the blocks that each measures. A search chooses `num_cohorts` of them."""

    trials: tuple[Trial, ...]
    cohorts: tuple[Cohort, ...]
    spans: tuple[tuple[int, int], ...] = ()  # blocks of prompts, [first, last) of the workload
    traffic: tuple[Traffic, ...] = ()
    max_passes: int = 1
    num_cohorts: int = 0

    @property
    def num_blocks(self) -> int:
        """Measurements in total, at most: one trial on one block."""
        each = max((len(c.trials) for c in self.cohorts), default=0) * len(self.spans) * self.max_passes
        exact = sum(len(c.trials) for c in self.cohorts) * len(self.spans) * self.max_passes
        return exact if self.num_cohorts == len(self.cohorts) else each * self.num_cohorts

    def rounds(self, cohort: Cohort, repeat: int) -> list[Round]:
        """Those of pass `repeat`. Their indices are unique over the plan."""
        found = []
        for b, (first, last) in enumerate(self.spans):
            for t, traffic in enumerate(self.traffic):
                arms = [trial for trial in cohort.trials if trial.traffic == traffic]
                turn = (repeat * len(self.spans) + b) % len(arms)
                before = cohort.number * self.max_passes + repeat
                index = (before * len(self.spans) + b) * len(self.traffic) + t
                order = (*arms[turn:], *arms[:turn])
                found.append(Round(index=index, prompt_block=b, first=first, last=last, trials=order, repeat=repeat))
        return found


def inspect_drafter(entry: str, config: SweepConfig, target: TargetModel | None = None) -> Drafter:
    """Read a checkpoint's config and the names and shapes of its tensors, not its weights, and hold it against the
    target, where one is given.

    Raises ValueError for a drafter that does not exist (a typing error); anything wrong inside is its `problem`.
    """
    name, shape = config.shape_of(entry)
    path, label = drafter_path(name, config.target), drafter_label(entry)
    try:
        info = read_info(path)
        check_files(info)
        algorithm = algorithm_of(path, shape.topk)
        check_fits(info, shape, config, target)
    except ValueError as error:
        return Drafter(label=label, path=path, head={}, shape=shape, problem=str(error))
    body = fixed_body(info)
    return Drafter(label=label, path=path, head=dict(info.head), algorithm=algorithm, body=body, shape=shape)


def make_plan(config: SweepConfig, num_prompts: int, drafters: Sequence[Drafter]) -> Plan:
    """The trials of the config and the cohorts that they may be measured in, over `num_prompts` prompts.

    Drafters with a problem are trials, but of no cohort.
    """
    plain = tuple(Trial(drafter=None, draft_steps=0, traffic=t) for t in config.traffic())
    trials = [
        Trial(drafter=d, draft_steps=s, traffic=t)
        for s in config.draft_steps
        for t in config.traffic()
        for d in drafters
    ]
    cohorts: list[Cohort] = []
    families: dict[tuple[str, object], list[Drafter]] = {}
    for drafter in drafters:
        if not drafter.problem:
            families.setdefault(drafter.family, []).append(drafter)
    names = _family_names(families)
    for steps, (family, members) in itertools.product(config.draft_steps, families.items()):
        prefix = f"s{steps}" if len(families) == 1 else f"s{steps}-{names[family]}"
        for name, group in _groups(config, prefix, members):
            own = tuple(t for t in trials if t.draft_steps == steps and t.drafter in group)
            cohorts.append(
                Cohort(
                    name=name,
                    number=len(cohorts),
                    draft_steps=steps,
                    family=family,
                    trials=(*plain, *own),
                )
            )
    return Plan(
        trials=(*plain, *trials),
        cohorts=tuple(cohorts),
        spans=tuple(
            (i, min(i + config.block_prompts, num_prompts)) for i in range(0, num_prompts, config.block_prompts)
        ),
        traffic=tuple(config.traffic()),
        max_passes=config.max_passes(),
        num_cohorts=min(config.search.samples or len(cohorts), len(cohorts)),
    )


def _family_names(families: Iterable[tuple[str, object]]) -> dict[tuple[str, object], str]:
    """By worker, counted where there are several bodies for one."""
    names: dict[tuple[str, object], str] = {}
    for family in families:
        number = 1 + sum(worker == family[0] for worker, _ in names)
        names[family] = family[0] if number == 1 else f"{family[0]}-{number}"
    return names


def _groups(config: SweepConfig, prefix: str, drafters: Sequence[Drafter]) -> list[tuple[str, list[Drafter]]]:
    """Names of the cohorts that an engine can serve, and their drafters; the baseline is in each, if it is one."""
    size = config.search.candidates_per_cohort if config.search.algorithm == "grid" else 1
    baseline = [d for d in drafters if d.label == config.baseline]
    others = [d for d in drafters if d.label != config.baseline]
    if size is None or len(others) <= size:
        return [(prefix, list(drafters))]
    chunks = [others[i : i + size] for i in range(0, len(others), size)]
    return [(f"{prefix}-{_group_name(chunk, i)}", [*baseline, *chunk]) for i, chunk in enumerate(chunks)]


def _group_name(drafters: Sequence[Drafter], number: int) -> str:
    return drafters[0].label if len(drafters) == 1 else str(number)


def describe(plan: Plan, config: SweepConfig, num_prompts: int, num_turns: int) -> str:
    """The plan as a table with a line on its size."""
    rows = [
        [
            t.name,
            t.label,
            t.algorithm,
            ", ".join(f"{k}={v}" for k, v in t.drafter.head.items()) if t.drafter else "no speculation",
            str(t.draft_steps or "-"),
            t.drafter.shape.label if t.drafter else "-",
            str(t.traffic),
            "cannot be measured" if t.drafter and t.drafter.problem else "ok",
        ]
        for t in plan.trials
    ]
    table = render_table(["trial", "head", "algorithm", "draft_head", "steps", "shape", "traffic", "checkpoint"], rows)
    passes = plan.max_passes
    per_trial = len(plan.spans) * passes
    tokens = num_turns * passes * config.max_new_tokens
    until = f", and up to {passes} passes" if passes > config.repeats else ""
    turns = f" ({num_turns} turns)" if num_turns > num_prompts else ""
    chosen = f" of {len(plan.cohorts)}, chosen by {config.search.algorithm} search," if config.search.samples else ""
    problems = {t.drafter.label: t.drafter.problem for t in plan.trials if t.drafter and t.drafter.problem}
    causes = "".join(f"\n{label} cannot be measured: {problem}" for label, problem in problems.items())
    return (
        f"{table}\n{causes}\n{len(plan.trials)} trials. Every trial answers {num_prompts} prompts{turns} of "
        f"{config.workload!r} in {per_trial} blocks{until}, up to {tokens} tokens in its cohort. {plan.num_cohorts} "
        f"cohort(s){chosen} with their own plain trials: up to {plan.num_blocks} block measurements."
    )
