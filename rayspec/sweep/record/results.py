"""A trial's outcome: its pooled metrics, and its standing against the baselines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayspec.costs import ModelCosts, cost_metrics
from rayspec.farm.load import Traffic
from rayspec.metrics import (
    category_key,
    head_kappa,
    output_mismatches,
    predicted_speedup,
    scored_by_position,
    tau_by_category,
    trial_metrics,
)
from rayspec.records import BlockRecord
from rayspec.statistics import Interval, Pair, paired_speedup
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.trials import Trial
from sglang_ext.drafters.counting import StepShape, known_shortlist


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """`metrics` are empty exactly where `error` says why the trial has none."""

    trial: Trial
    metrics: Mapping[str, float] = field(default_factory=dict)
    baseline: str  # label of the drafter that the others of its draft steps and traffic are compared with
    error: str | None = None

    @property
    def is_baseline(self) -> bool:
        return self.trial.candidate is not None and self.trial.candidate.is_baseline(self.baseline)

    def speedup(self, over: str) -> Interval | None:
        """The speed-up over `plain` decoding or over the `baseline`, None where that was not measured beside it."""
        key = f"speedup_vs_{over}"
        if key not in self.metrics:
            return None
        return Interval(
            value=self.metrics[key], low=self.metrics.get(f"{key}_ci_low"), high=self.metrics.get(f"{key}_ci_high")
        )


def score(
    config: SweepConfig,
    blocks: Mapping[Trial, Sequence[BlockRecord]],
    errors: Mapping[Trial, str],
    head_latency_s: Mapping[Traffic, Mapping[str, float]],
    costs: ModelCosts | None = None,
) -> list[TrialResult]:
    """Results of all trials that have blocks or an error. `head_latency_s[traffic][head]` may be empty."""
    trials = list(dict.fromkeys([*blocks, *errors]))
    metrics = {
        t: trial_metrics(blocks[t], t.draft_steps, config.slo) for t in trials if t not in errors and blocks.get(t)
    }
    results = []
    for trial in trials:
        if trial not in metrics:
            results.append(
                TrialResult(trial=trial, baseline=config.baseline, error=errors.get(trial, "never measured"))
            )
            continue
        own = dict(metrics[trial])
        if costs is not None:
            own |= _costs(trial, own, blocks[trial], costs)
        if trial.candidate is not None:
            requests = [r for b in blocks[trial] for r in b.requests]
            own |= {category_key(name): tau for name, tau in tau_by_category(requests).items()}
            plain, baseline = _plain(trial), _baseline(config, trial, trials)
            for name, interval in speedups(config, trial, blocks, errors).items():
                own[f"speedup_vs_{name}"] = interval.value
                if interval.low is not None and interval.high is not None:
                    own[f"speedup_vs_{name}_ci_low"] = interval.low
                    own[f"speedup_vs_{name}_ci_high"] = interval.high
            if {"budget_kappa", "speedup_vs_plain"} <= set(own):
                own["theta"] = own["budget_kappa"] / own["speedup_vs_plain"]
            if config.temperature_of(trial.traffic) == 0 and plain in metrics:
                own["output_mismatches"] = float(output_mismatches(blocks[trial], blocks[plain]))
            own |= _head_tradeoff(trial, baseline, metrics, head_latency_s.get(trial.traffic, {}))
        results.append(TrialResult(trial=trial, metrics=own, baseline=config.baseline))
    return results


def _baseline(config: SweepConfig, trial: Trial, trials: Sequence[Trial]) -> Trial | None:
    """The baseline head, for candidates of its engine: what a head saves is a matter of the same body."""
    engine = trial.candidate.engine if trial.candidate else None
    kin = (t for t in trials if t.traffic == trial.traffic and t.candidate and t.candidate.engine == engine)
    return next((t for t in kin if t.candidate and t.candidate.is_baseline(config.baseline)), None)


def _plain(trial: Trial) -> Trial:
    return Trial(candidate=None, traffic=trial.traffic)


def speedups(
    config: SweepConfig, trial: Trial, blocks: Mapping[Trial, Sequence[BlockRecord]], errors: Mapping[Trial, str]
) -> dict[str, Interval]:
    """The speed-ups of a drafted trial over `plain` decoding and the `baseline`, those that were measured beside it.

    In a closed loop the ratio of throughputs. In an open loop arrivals fix the throughput, and it is the ratio of the
    seconds from arrival to the last token, per output token.
    """
    found = {}
    for name, baseline in (("plain", _plain(trial)), ("baseline", _baseline(config, trial, list(blocks)))):
        if baseline is not None and baseline not in errors and blocks.get(baseline) and blocks.get(trial):
            passes = _paired_passes(blocks[trial], blocks[baseline], is_open=trial.traffic.is_open)
            if passes:
                found[name] = paired_speedup(passes, confidence=config.confidence(), seed=config.seed)
    return found


def _paired_passes(own: Sequence[BlockRecord], base: Sequence[BlockRecord], *, is_open: bool) -> list[list[Pair]]:
    """The rounds that both answered, by prompt block."""
    base_by_round = {b.index: b for b in base}
    passes: dict[int, list[Pair]] = {}
    for block in own:
        if block.index in base_by_round:
            other = base_by_round[block.index]
            pair = Pair(block.output_tokens, _seconds(block, is_open), other.output_tokens, _seconds(other, is_open))
            passes.setdefault(block.prompt_block, []).append(pair)
    return list(passes.values())


def _seconds(block: BlockRecord, is_open: bool) -> float:
    return sum(r.e2e_s for r in block.requests) if is_open else block.wall_s


def _costs(
    trial: Trial,
    metrics: Mapping[str, float],
    blocks: Sequence[BlockRecord],
    costs: ModelCosts,
) -> dict[str, float]:
    requests = [r for b in blocks for r in b.requests]
    if trial.candidate is None:
        return cost_metrics(metrics, requests, StepShape(), costs.target, None)
    shape = StepShape(
        draft_steps=trial.draft_steps,
        topk=trial.candidate.shape.topk,
        num_draft_tokens=trial.candidate.num_draft_tokens,
        counted=metrics.get("step_verified_tokens"),
        scored=scored_by_position(blocks),
    )
    drafter = costs.drafters[trial.label]
    found = cost_metrics(metrics, requests, shape, costs.target, drafter, costs.dtype)
    known = known_shortlist(drafter, shape) if "tau" in metrics else None
    if known is not None:  # of such heads an accelerator counts nothing
        found |= {name: tokens for name, tokens in known.items() if name not in metrics}
    return found


def _head_tradeoff(
    trial: Trial,
    baseline: Trial | None,
    metrics: Mapping[Trial, Mapping[str, float]],
    latency_s: Mapping[str, float],
) -> dict[str, float]:
    """head_latency_us, and against the baseline head of the same body and shape: nu (latency), rho (tau), kappa (its
    share of the cycle), and the speed-up that these three predict; not where one prunes its tree and verifies another
    number of tokens, which the three know nothing of."""
    out: dict[str, float] = {}
    if trial.label in latency_s:
        out["head_latency_us"] = 1e6 * latency_s[trial.label]
        if baseline is not None and baseline.label in latency_s:
            out["nu"] = latency_s[trial.label] / latency_s[baseline.label]
    if baseline is None or baseline not in metrics:
        return out
    base = metrics[baseline]
    if "tau" in metrics[trial] and "tau" in base:
        out["rho"] = metrics[trial]["tau"] / base["tau"]
    # the engine's own clock where it has one, by requests as the cycle is, or in older records by steps; else the head
    # timed alone, which is called once a draft step
    alone_ms = 1e3 * latency_s[baseline.label] * trial.draft_steps if baseline.label in latency_s else None
    head_ms = base.get("request_head_ms", base.get("step_head_ms", alone_ms))
    if head_ms is not None and "cycle_ms" in base:
        kappa = head_kappa(head_ms, base["cycle_ms"])
        if kappa is not None:
            out["kappa"] = kappa
            if {"rho", "nu"} <= set(out) and _verifies_as_many(metrics[trial], base):
                out["speedup_vs_baseline_predicted"] = predicted_speedup(out["rho"], out["nu"], kappa)
    return out


def _verifies_as_many(own: Mapping[str, float], base: Mapping[str, float]) -> bool:
    """True also where the engine has no clock that counts them."""
    key = "step_verified_tokens"
    return key not in own or key not in base or math.isclose(own[key], base[key])
