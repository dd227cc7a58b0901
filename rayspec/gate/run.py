"""Runs a gate on two sources: decides which kind of sides they are, starts, measures and ends them."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tqdm import tqdm

from rayspec.gate.config import GateConfig
from rayspec.gate.decision import SAME_REPEATS, Verdict, as_share
from rayspec.gate.endpoint import EndpointSide, checked_address, endpoint_key, is_address
from rayspec.gate.report import Finding, find
from rayspec.gate.rounds import SIDES, Gate, check_workload
from rayspec.gate.sides import MeasureFailed, Side
from rayspec.workloads import Conversation, load_workload

if TYPE_CHECKING:
    from rayspec.gate.engines import PreparedDrafter


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Options of one endpoint. None: the only model that is served, and the key of the environment."""

    model: str | None = None
    key_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Both sides, warm. `compares`: whether they claim the same target, so that greedy outputs must be equal."""

    sides: Sequence[Side]
    prompts: Sequence[Conversation]
    has_tau: bool
    compares: bool
    notes: tuple[str, ...] = ()


def run_gate(
    config: GateConfig, sources: Sequence[str], options: Sequence[EndpointOptions], deadline: float
) -> tuple[Finding, Gate]:
    """Compare (baseline, candidate) until `deadline` of time.monotonic(). Raises ValueError for what cannot be
    compared, MeasureFailed for a side that does not answer."""
    are_endpoints = _are_endpoints(sources)
    begin = deadline - 60 * config.max_minutes
    with (
        endpoints(config, sources, options, deadline) if are_endpoints else _drafters(config, sources, options)
    ) as ready:
        gate = Gate(config, ready.sides, ready.prompts, has_tau=ready.has_tau)
        if time.monotonic() > deadline:
            raise MeasureFailed(
                f"{time.monotonic() - begin:.0f} s went by until both sides were ready, so that nothing is left of "
                f"max_minutes={config.max_minutes:g}; raise it"
            )
        with tqdm(unit=" rounds", mininterval=0.2 if sys.stderr.isatty() else 10) as bar:

            def show(gate: Gate) -> None:
                bar.update()
                loss = gate.measured.losses
                bar.set_postfix_str(f"speed {-as_share(sum(loss) / len(loss)):+.1%}, {gate.used_share:.0%} of the time")

            gate.run(deadline, show)
        compares = ready.compares and config.is_greedy and config.identity != "off"
        return find(gate, compares=compares, seconds=time.monotonic() - begin, notes=ready.notes), gate


def planned(config: GateConfig, sources: Sequence[str], options: Sequence[EndpointOptions]) -> str:
    """What `run_gate` would compare, checked as far as that needs neither engine nor answer. Raises ValueError."""
    if _are_endpoints(sources):
        prompts, _ = _checked_endpoints(config, sources, options)
    else:
        prompts, _ = _checked_drafters(config, sources, options)
    load = f"{len(prompts)} prompts of {config.workload}, {config.concurrency} at once"
    tau = (
        f"{config.tau_loss:.0%} of tau is told where answers repeat and each side answers all {len(prompts)} prompts "
        f"and {SAME_REPEATS // 2} of them again"
        if config.is_greedy
        else f"{config.tau_loss:.0%} of tau takes tens of thousands of drawn tokens a side"
    )
    return (
        f"{sources[1]} against {sources[0]}: {load}, up to {config.max_minutes:g} minutes\n"
        f"{tau}; where the time does not suffice for that, the verdict is undecided (a higher concurrency gives more "
        "answers in it)"
    )


def _are_endpoints(sources: Sequence[str]) -> bool:
    addresses = [is_address(source) for source in sources]
    if any(addresses) and not all(addresses):
        raise ValueError(
            "a drafter in an engine of ours and an endpoint are not measured alike; serve the drafter (rayspec serve, "
            "or SGLang's own server) and give both addresses"
        )
    return all(addresses)


def _checked_endpoints(
    config: GateConfig, sources: Sequence[str], options: Sequence[EndpointOptions]
) -> tuple[Sequence[Conversation], list[tuple[str, str, str | None, str | None]]]:
    """Prompts, and (role, address, model, key) of each side."""
    unused = config.engine_settings()
    unused.pop("chat_template", None)
    if unused:
        raise ValueError(f"{', '.join(sorted(unused))}: settings of engines of ours, which endpoints do not take")
    prompts = load_workload(config.workload, config.seed)
    check_workload(config, len(prompts))
    checked = [
        (role, checked_address(source), o.model, endpoint_key(role, o.key_file))
        for role, source, o in zip(SIDES, sources, options, strict=True)
    ]
    return prompts, checked


@contextmanager
def endpoints(
    config: GateConfig, sources: Sequence[str], options: Sequence[EndpointOptions], deadline: float
) -> Iterator[Ready]:
    prompts, checked = _checked_endpoints(config, sources, options)
    with ExitStack() as stack:
        sides = []
        for role, address, model, key in checked:
            side = EndpointSide(role, address, config, model=model, key=key, ready_by=deadline)
            stack.callback(side.stop)
            sides.append(side)
        for side in sides:
            side.connect(prompts[0])
        for side in sides:
            side.warm_up(prompts[: config.concurrency])
        base, own = (side.model for side in sides)
        compares = base.root == own.root or base.name == own.name
        notes = [] if compares else [f"other models ({base.name}, {own.name}): outputs were not compared"]
        ignoring = [s.label for s in sides if config.ignore_eos and not s.takes_ignore_eos]
        notes += [f"{label} is not known to take ignore_eos: not sent" for label in ignoring]
        adapting = [side.label for side in sides if side.adapts()]
        notes += [
            f"{label} chooses its draft length as it goes (rayspec serve --no-policy keeps one)" for label in adapting
        ]
        has_tau = not adapting and all(side.tells_tau for side in sides)
        yield Ready(sides=sides, prompts=prompts, has_tau=has_tau, compares=compares, notes=tuple(notes))


def _checked_drafters(
    config: GateConfig, sources: Sequence[str], options: Sequence[EndpointOptions]
) -> "tuple[Sequence[Conversation], tuple[PreparedDrafter, PreparedDrafter]]":
    if any(o != EndpointOptions() for o in options):
        raise ValueError("--baseline-model, --candidate-model and the key files belong to endpoints (http://...)")
    from rayspec.gate.engines import prepare_drafters  # imports Ray and MLflow

    baseline, candidate = prepare_drafters(config, sources)
    prompts = min(baseline.prepared.prompts, candidate.prepared.prompts, key=len)
    check_workload(config, len(prompts))
    return prompts, (baseline, candidate)


@contextmanager
def _drafters(config: GateConfig, sources: Sequence[str], options: Sequence[EndpointOptions]) -> Iterator[Ready]:
    prompts, (baseline, candidate) = _checked_drafters(config, sources, options)
    from rayspec.gate.engines import running_drafters

    with (
        TemporaryDirectory(prefix="rayspec-gate-") as logs,
        running_drafters(baseline, candidate, Path(logs)) as sides,
    ):
        yield Ready(sides=sides, prompts=prompts, has_tau=True, compares=True)


def status(verdict: Verdict) -> int:
    """The exit status: 2 is that of what could not be measured."""
    return {Verdict.PASS: 0, Verdict.REGRESSION: 1, Verdict.UNDECIDED: 3}[verdict]
