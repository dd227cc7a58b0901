"""Makes trials and their interleaved schedule from a config. Pure: no Ray, no engine.

A cohort is the candidates that are measured interleaved, against their own plain and baseline trials, on one pair of
engines: one without speculation, and one for a value of draft_steps and a family of drafters (one kind of worker, one
body, one shape of draft), which are swapped while it runs. A cohort of another family than the baseline's stands
against plain decoding alone. Its schedule is a sequence of rounds: a round is one block of prompts under one traffic
(so many streams, or so many arrivals a second), answered by every trial in turn, in an order that rotates from round to
round, so that no trial always comes first and a change of the machine's speed meets them all. `stopping` decides how
many passes over the workload are made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayspec.farm.load import Traffic
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.config import SweepConfig
from rayspec.tables import render_table
from rayspec.workloads import Conversation
from rayspec.workloads.traces import TracedRequest

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One point of the sweep. `candidate` None is plain decoding."""

    candidate: Candidate | None
    traffic: Traffic

    @property
    def drafted(self) -> Candidate:
        """The candidate, where it is known that there is one."""
        assert self.candidate is not None, f"{self.name} is plain decoding"
        return self.candidate

    @property
    def label(self) -> str:
        return self.candidate.label if self.candidate else PLAIN

    @property
    def algorithm(self) -> str:
        return self.candidate.algorithm if self.candidate else PLAIN

    @property
    def draft_steps(self) -> int:
        """0 for plain decoding."""
        return self.candidate.draft_steps if self.candidate else 0

    @property
    def name(self) -> str:
        steps = f"-s{self.draft_steps}" if self.candidate else ""
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
    trials: tuple[Trial, ...]

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates of the cohort: at least one, and all of one engine."""
        return _candidates(self.trials)

    @property
    def engine(self) -> tuple[str, object, int]:
        return self.candidates[0].engine

    @property
    def draft_steps(self) -> int:
        return self.candidates[0].draft_steps


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
    def candidates(self) -> list[Candidate]:
        """All, those that cannot be measured too."""
        return _candidates(self.trials)

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


def _candidates(trials: Iterable[Trial]) -> list[Candidate]:
    return list(dict.fromkeys(t.candidate for t in trials if t.candidate))


def make_plan(config: SweepConfig, num_prompts: int, candidates: Sequence[Candidate]) -> Plan:
    """The trials of the candidates and the cohorts that they may be measured in, over `num_prompts` prompts.

    Candidates with a problem are trials, but of no cohort.
    """
    traffic = config.traffic()
    ordered = [c for s in config.draft_steps for c in candidates if c.draft_steps == s]
    place = {c: i for i, c in enumerate(ordered)}
    plain = tuple(Trial(candidate=None, traffic=t) for t in traffic)
    trials = [
        Trial(candidate=c, traffic=t)
        for s in config.draft_steps
        for t in traffic
        for c in ordered
        if c.draft_steps == s
    ]
    engines: dict[tuple[str, object, int], list[Candidate]] = {}
    for candidate in ordered:
        if not candidate.problem:
            engines.setdefault(candidate.engine, []).append(candidate)
    names = _family_names(dict.fromkeys((worker, body) for worker, body, _ in engines))
    cohorts: list[Cohort] = []
    for (worker, body, steps), members in engines.items():
        prefix = f"s{steps}" if len(names) == 1 else f"s{steps}-{names[worker, body]}"
        for name, group in _groups(config, prefix, members):
            in_order = sorted(group, key=place.__getitem__)
            own = (Trial(candidate=c, traffic=t) for t in traffic for c in in_order)
            cohorts.append(Cohort(name=name, number=len(cohorts), trials=(*plain, *own)))
    return Plan(
        trials=(*plain, *trials),
        cohorts=tuple(cohorts),
        spans=tuple(
            (i, min(i + config.block_prompts, num_prompts)) for i in range(0, num_prompts, config.block_prompts)
        ),
        traffic=tuple(traffic),
        max_passes=config.max_passes(),
        num_cohorts=min(config.search.samples or len(cohorts), len(cohorts)),
    )


def _family_names(families: Iterable[tuple[str, object]]) -> dict[tuple[str, object], str]:
    """Names of families: their worker, counted where there are several bodies for one."""
    names: dict[tuple[str, object], str] = {}
    for family in families:
        number = 1 + sum(worker == family[0] for worker, _ in names)
        names[family] = family[0] if number == 1 else f"{family[0]}-{number}"
    return names


def _groups(config: SweepConfig, prefix: str, members: Sequence[Candidate]) -> list[tuple[str, list[Candidate]]]:
    """Names of the cohorts that an engine can serve, and their candidates; the baseline is in each, if it is one."""
    size = config.search.candidates_per_cohort if config.search.algorithm == "grid" else 1
    baseline = [c for c in members if c.is_baseline(config.baseline)]
    others = [c for c in members if not c.is_baseline(config.baseline)]
    if size is None or len(others) <= size:
        return [(prefix, list(members))]
    chunks = [others[i : i + size] for i in range(0, len(others), size)]
    return [(f"{prefix}-{_group_name(chunk, i)}", [*baseline, *chunk]) for i, chunk in enumerate(chunks)]


def _group_name(members: Sequence[Candidate], number: int) -> str:
    return members[0].label if len(members) == 1 else str(number)


def describe(plan: Plan, config: SweepConfig, prompts: Sequence[Conversation]) -> str:
    """The plan as a table with a line on its size."""
    num_prompts, num_turns = len(prompts), sum(len(p.turns) for p in prompts)
    rows = [
        [
            t.name,
            t.label,
            t.algorithm,
            str(t.candidate.head) if t.candidate else "no speculation",
            str(t.draft_steps or "-"),
            t.candidate.shape.label if t.candidate else "-",
            str(t.traffic),
            "cannot be measured" if t.candidate and t.candidate.problem else "ok",
        ]
        for t in plan.trials
    ]
    table = render_table(
        ["trial", "drafter", "algorithm", "draft_head", "steps", "shape", "traffic", "checkpoint"], rows
    )
    passes = plan.max_passes
    per_trial = len(plan.spans) * passes
    own = [p.output_tokens if isinstance(p, TracedRequest) else None for p in prompts]
    tokens = passes * sum(len(p.turns) * (n or config.max_new_tokens) for p, n in zip(prompts, own, strict=True))
    until = f", and up to {passes} passes" if passes > config.repeats else ""
    turns = f" ({num_turns} turns)" if num_turns > num_prompts else ""
    chosen = f" of {len(plan.cohorts)}, chosen by {config.search.algorithm} search," if config.search.samples else ""
    problems = {c.label: c.problem for c in plan.candidates if c.problem}
    causes = "".join(f"\n{label} cannot be measured: {problem}" for label, problem in problems.items())
    return (
        f"{table}\n{causes}\n{len(plan.trials)} trials. Every trial answers {num_prompts} prompts{turns} of "
        f"{config.workload!r} in {per_trial} blocks{until}, up to {tokens} tokens in its cohort. {plan.num_cohorts} "
        f"cohort(s){chosen} with their own plain trials: up to {plan.num_blocks} block measurements."
    )
