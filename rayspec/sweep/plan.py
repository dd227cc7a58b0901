"""From a config to trials and their interleaved schedule. Pure: no Ray, no engine.

One engine without speculation lives through the whole sweep. Beside it, one engine for each value of draft_steps lives
through a phase, and the drafters are swapped in it while it runs. A phase is a sequence of rounds: a round is one block
of prompts under one traffic (so many streams, or so many arrivals a second), answered by every trial in turn, in an
order that rotates from round to round, so that no trial always comes first and a change of the machine's speed meets
them all. The plan holds as many passes over the workload as there may be; `stopping` decides how many are made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safetensors import SafetensorError

from rayspec.farm.load import Traffic
from rayspec.report.table import render_table
from rayspec.shipped import drafter_label, drafter_path
from rayspec.sweep.config import SweepConfig
from sglang_ext.drafters.checkpoint import check_files, read_info

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """A checkpoint of the sweep. `problem` is why it cannot be measured: its trials fail, the others do not."""

    label: str
    path: str
    head: Mapping[str, object] = field(hash=False)  # kind and options
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One point of the sweep. `drafter` None is plain decoding; then draft_steps is 0."""

    drafter: Drafter | None
    draft_steps: int
    traffic: Traffic

    @property
    def head(self) -> str:
        return self.drafter.label if self.drafter else PLAIN

    @property
    def name(self) -> str:
        steps = f"-s{self.draft_steps}" if self.drafter else ""
        return f"{self.head}{steps}-{self.traffic.label}"


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
class Phase:
    """The rounds that one speculative engine lives through."""

    draft_steps: int
    rounds: tuple[Round, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    trials: tuple[Trial, ...]
    phases: tuple[Phase, ...]

    @property
    def num_blocks(self) -> int:
        """Measurements in total, at most: one trial on one block."""
        return sum(len(r.trials) for phase in self.phases for r in phase.rounds)


def inspect_drafter(name: str) -> Drafter:
    """Read a checkpoint's config and the names and shapes of its tensors, not its weights.

    Raises ValueError for a drafter that does not exist (a typing error); anything wrong inside is its `problem`.
    """
    path, label = drafter_path(name), drafter_label(name)
    try:
        info = read_info(path)
        check_files(info)
    except (ValueError, SafetensorError) as error:
        return Drafter(label=label, path=path, head={}, problem=f"{type(error).__name__}: {error}")
    return Drafter(label=label, path=path, head=dict(info.head))


def make_plan(config: SweepConfig, num_prompts: int, drafters: Sequence[Drafter]) -> Plan:
    """The trials of the config and their schedule over `num_prompts` prompts."""
    plain = {t: Trial(drafter=None, draft_steps=0, traffic=t) for t in config.traffic()}
    candidates = [
        Trial(drafter=d, draft_steps=s, traffic=t)
        for s in config.draft_steps
        for t in config.traffic()
        for d in drafters
    ]
    blocks = [(i, min(i + config.block_prompts, num_prompts)) for i in range(0, num_prompts, config.block_prompts)]
    phases: list[Phase] = []
    index = 0
    for steps in config.draft_steps:
        rounds: list[Round] = []
        for repeat in range(config.looks()[-1]):
            for b, (first, last) in enumerate(blocks):
                for traffic in config.traffic():
                    own = (t for t in candidates if (t.draft_steps, t.traffic) == (steps, traffic))
                    arms = [plain[traffic], *own]
                    turn = (repeat * len(blocks) + b) % len(arms)
                    order = (*arms[turn:], *arms[:turn])
                    rounds.append(
                        Round(index=index, prompt_block=b, first=first, last=last, trials=order, repeat=repeat)
                    )
                    index += 1
        phases.append(Phase(draft_steps=steps, rounds=tuple(rounds)))
    return Plan(trials=(*plain.values(), *candidates), phases=tuple(phases))


def describe(plan: Plan, config: SweepConfig, num_prompts: int, num_turns: int) -> str:
    """The plan as a table with a line on its size."""
    rows = [
        [
            t.name,
            t.head,
            ", ".join(f"{k}={v}" for k, v in t.drafter.head.items()) if t.drafter else "no speculation",
            str(t.draft_steps or "-"),
            str(t.traffic),
            (t.drafter.problem or "ok").split("\n")[0][:60] if t.drafter else "ok",
        ]
        for t in plan.trials
    ]
    table = render_table(["trial", "head", "draft_head", "steps", "traffic", "checkpoint"], rows)
    passes = config.looks()[-1]
    per_trial = -(-num_prompts // config.block_prompts) * passes
    tokens = num_turns * passes * config.max_new_tokens
    until = f", and up to {passes} passes" if passes > config.repeats else ""
    turns = f" ({num_turns} turns)" if num_turns > num_prompts else ""
    return (
        f"{table}\n\n{len(plan.trials)} trials. Every trial answers {num_prompts} prompts{turns} of "
        f"{config.workload!r} in {per_trial} blocks{until}, up to {tokens} tokens in each of {len(plan.phases)} "
        f"phase(s); {plan.num_blocks} block measurements on {1 + len(plan.phases)} engine starts."
    )
