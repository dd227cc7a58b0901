"""From a config to trials and their interleaved schedule. Pure: no Ray, no engine.

One engine without speculation lives through the whole sweep. Beside it, one engine for each value of draft_steps lives
through a phase, and the drafters are swapped in it while it runs. A phase is a sequence of rounds: a round is one block
of prompts at one concurrency, answered by every trial in turn, in an order that rotates from round to round, so that no
trial always comes first and a change of the machine's speed meets them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safetensors import SafetensorError

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
    concurrency: int

    @property
    def head(self) -> str:
        return self.drafter.label if self.drafter else PLAIN

    @property
    def name(self) -> str:
        steps = f"-s{self.draft_steps}" if self.drafter else ""
        return f"{self.head}{steps}-c{self.concurrency}"


@dataclass(frozen=True, kw_only=True)
class Round:
    """One block of prompts, [first, last) of the workload, answered by all `trials` in this order."""

    index: int  # over the whole sweep
    prompt_block: int
    first: int
    last: int
    trials: tuple[Trial, ...]


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
        """Measurements in total: one trial on one block."""
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
    plain = {c: Trial(drafter=None, draft_steps=0, concurrency=c) for c in config.concurrency}
    candidates = [
        Trial(drafter=d, draft_steps=s, concurrency=c)
        for s in config.draft_steps
        for c in config.concurrency
        for d in drafters
    ]
    blocks = [(i, min(i + config.block_prompts, num_prompts)) for i in range(0, num_prompts, config.block_prompts)]
    phases: list[Phase] = []
    index = 0
    for steps in config.draft_steps:
        rounds: list[Round] = []
        for repeat in range(config.repeats):
            for b, (first, last) in enumerate(blocks):
                for c in config.concurrency:
                    arms = [plain[c], *(t for t in candidates if (t.draft_steps, t.concurrency) == (steps, c))]
                    turn = (repeat * len(blocks) + b) % len(arms)
                    order = (*arms[turn:], *arms[:turn])
                    rounds.append(Round(index=index, prompt_block=b, first=first, last=last, trials=order))
                    index += 1
        phases.append(Phase(draft_steps=steps, rounds=tuple(rounds)))
    return Plan(trials=(*plain.values(), *candidates), phases=tuple(phases))


def describe(plan: Plan, config: SweepConfig, num_prompts: int) -> str:
    """The plan as a table with a line on its size."""
    rows = [
        [
            t.name,
            t.head,
            ", ".join(f"{k}={v}" for k, v in t.drafter.head.items()) if t.drafter else "no speculation",
            str(t.draft_steps or "-"),
            str(t.concurrency),
            (t.drafter.problem or "ok").split("\n")[0][:60] if t.drafter else "ok",
        ]
        for t in plan.trials
    ]
    table = render_table(["trial", "head", "draft_head", "steps", "concurrency", "checkpoint"], rows)
    per_trial = -(-num_prompts // config.block_prompts) * config.repeats
    tokens = num_prompts * config.repeats * config.max_new_tokens
    return (
        f"{table}\n\n{len(plan.trials)} trials. Every trial answers {num_prompts} prompts of {config.workload!r} in "
        f"{per_trial} blocks, up to {tokens} tokens in each of {len(plan.phases)} phase(s); "
        f"{plan.num_blocks} block measurements on {1 + len(plan.phases)} engine starts."
    )
