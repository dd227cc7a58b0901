"""A trial's outcome: its pooled metrics, and its standing against the baselines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rayspec.metrics import (
    category_key,
    head_kappa,
    output_mismatches,
    predicted_speedup,
    tau_by_category,
    trial_metrics,
)
from rayspec.records import BlockRecord
from rayspec.statistics import Interval, throughput_ratio
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan import Trial


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """`metrics` are empty exactly where `error` says why the trial has none."""

    trial: Trial
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_baseline: bool = False  # the full head that the others of its draft steps and concurrency are compared with
    error: str | None = None

    def speedup(self, baseline: str) -> Interval | None:
        """The speed-up against `plain` or `full`, None where the baseline was not measured beside it."""
        key = f"speedup_vs_{baseline}"
        if key not in self.metrics:
            return None
        return Interval(
            value=self.metrics[key], low=self.metrics.get(f"{key}_ci_low"), high=self.metrics.get(f"{key}_ci_high")
        )


def score(
    config: SweepConfig,
    blocks: Mapping[Trial, Sequence[BlockRecord]],
    errors: Mapping[Trial, str],
    head_latency_s: Mapping[int, Mapping[str, float]],
) -> list[TrialResult]:
    """Results of all trials that have blocks or an error. `head_latency_s[concurrency][head]` may be empty."""
    trials = list(dict.fromkeys([*blocks, *errors]))
    metrics = {t: trial_metrics(blocks[t], t.draft_steps) for t in trials if t not in errors and blocks.get(t)}
    results = []
    for trial in trials:
        if trial not in metrics:
            results.append(TrialResult(trial=trial, error=errors.get(trial, "never measured")))
            continue
        own = dict(metrics[trial])
        if trial.drafter is not None:
            requests = [r for b in blocks[trial] for r in b.requests]
            own |= {category_key(name): tau for name, tau in tau_by_category(requests).items()}
            plain = Trial(drafter=None, draft_steps=0, concurrency=trial.concurrency)
            full = _baseline(config, trial, trials)
            own |= _against("plain", trial, plain, blocks, errors, config.seed)
            own |= _against("full", trial, full, blocks, errors, config.seed)
            if config.temperature == 0 and plain in metrics:
                own["output_mismatches"] = float(output_mismatches(blocks[trial], blocks[plain]))
            own |= _head_tradeoff(config, trial, full, metrics, head_latency_s.get(trial.concurrency, {}))
        is_baseline = trial.head == config.baseline
        results.append(TrialResult(trial=trial, metrics=own, is_baseline=is_baseline))
    return results


def _baseline(config: SweepConfig, trial: Trial, trials: Sequence[Trial]) -> Trial | None:
    same = (t for t in trials if (t.draft_steps, t.concurrency) == (trial.draft_steps, trial.concurrency))
    return next((t for t in same if t.head == config.baseline), None)


def _against(
    name: str,
    trial: Trial,
    baseline: Trial | None,
    blocks: Mapping[Trial, Sequence[BlockRecord]],
    errors: Mapping[Trial, str],
    seed: int,
) -> dict[str, float]:
    """Speed-up over a baseline on the rounds that both answered, added up per prompt block."""
    if baseline is None or baseline in errors or not blocks.get(baseline):
        return {}
    base_by_round = {b.index: b for b in blocks[baseline]}
    pairs = [(b, base_by_round[b.index]) for b in blocks[trial] if b.index in base_by_round]
    sums: dict[int, list[float]] = {}
    for own, base in pairs:
        row = sums.setdefault(own.prompt_block, [0.0] * 4)
        for i, value in enumerate((own.output_tokens, own.wall_s, base.output_tokens, base.wall_s)):
            row[i] += value
    if not sums:
        return {}
    interval = throughput_ratio(*zip(*sums.values(), strict=True), seed=seed)
    key = f"speedup_vs_{name}"
    out = {key: interval.value}
    if interval.low is not None and interval.high is not None:
        out |= {f"{key}_ci_low": interval.low, f"{key}_ci_high": interval.high}
    return out


def _head_tradeoff(
    config: SweepConfig,
    trial: Trial,
    full: Trial | None,
    metrics: Mapping[Trial, Mapping[str, float]],
    latency_s: Mapping[str, float],
) -> dict[str, float]:
    """head_latency_us, and against the baseline head: nu (latency), rho (tau), kappa (its share of the cycle), and
    the speed-up that these three predict."""
    out: dict[str, float] = {}
    if trial.head in latency_s:
        out["head_latency_us"] = 1e6 * latency_s[trial.head]
        if config.baseline in latency_s:
            out["nu"] = latency_s[trial.head] / latency_s[config.baseline]
    if full is None or full not in metrics:
        return out
    base = metrics[full]
    if "tau" in metrics[trial] and "tau" in base:
        out["rho"] = metrics[trial]["tau"] / base["tau"]
    # the engine's own clock where it has one; else the head timed alone, which is called once a draft step
    alone_ms = 1e3 * latency_s[config.baseline] * trial.draft_steps if config.baseline in latency_s else None
    head_ms = base.get("step_head_ms", alone_ms)
    if head_ms is not None and "cycle_ms" in base:
        kappa = head_kappa(head_ms, base["cycle_ms"])
        if kappa is not None:
            out["kappa"] = kappa
            if {"rho", "nu"} <= set(out):
                out["speedup_vs_full_predicted"] = predicted_speedup(out["rho"], out["nu"], kappa)
    return out
