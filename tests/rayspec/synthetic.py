"""Blocks whose distribution is known, for tests of everything that comes after a measurement."""

import dataclasses
from dataclasses import dataclass

import numpy as np
from fixture_models import DRAFTERS

from rayspec.farm.load import Traffic
from rayspec.records import BlockRecord, Measured, RequestRecord
from rayspec.sweep.candidate import Candidate, Head
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.trials import Trial
from rayspec.sweep.record.results import TrialResult, score

HEADS = {"full": 1.0, "slimspec-r128": 0.99, "slimspec-r64": 0.975, "slimspec-r32": 0.92}  # share of acceptance kept
LATENCY = {"full": 900e-6, "slimspec-r128": 480e-6, "slimspec-r64": 260e-6, "slimspec-r32": 150e-6}


@dataclass(frozen=True, kw_only=True)
class SyntheticSweep:
    """What a controller holds at the end of a sweep."""

    config: SweepConfig
    blocks: dict[Trial, list[BlockRecord]]
    results: list[TrialResult]


def synthetic_request(
    prompt_id: str, histogram: tuple[int, ...], cycle_s: float, *, ttft_s: float = 0.01, category: str = "python"
) -> RequestRecord:
    """A request whose every verify step takes `cycle_s`; histogram () is plain decoding of 32 tokens."""
    steps = sum(histogram)
    accepted = sum(j * n for j, n in enumerate(histogram))
    tokens = 1 + steps + accepted if histogram else 32
    chunks = steps if histogram else tokens - 1
    return RequestRecord(
        prompt_id=prompt_id,
        category=category,
        prompt_tokens=50,
        cached_tokens=0,
        output_ids=tuple(range(tokens)),
        finish_reason="length",
        ttft_s=ttft_s,
        e2e_s=ttft_s + chunks * cycle_s,
        chunk_gaps_s=(cycle_s,) * chunks,
        verify_steps=steps,
        accepted_drafts=accepted,
        accepted_histogram=histogram,
    )


def make_synthetic_sweep() -> SyntheticSweep:
    """8 blocks of 4 requests of two categories, with geometric acceptance and noisy windows of time."""
    draft_steps, concurrency = (2, 4), (1, 4)
    rng = np.random.default_rng(0)
    config = SweepConfig(drafters=list(HEADS), draft_steps=list(draft_steps), concurrency=list(concurrency))
    blocks: dict[Trial, list[BlockRecord]] = {}
    index = 0
    for c in concurrency:
        for steps in draft_steps:
            for b in range(8):
                window = float(np.exp(rng.normal(0, 0.2)))
                for head, kept in (("plain", 0.0), *HEADS.items()):
                    candidate = None if head == "plain" else _candidate(head, steps)
                    trial = Trial(candidate=candidate, traffic=Traffic(concurrency=c))
                    noise = window * float(np.exp(rng.normal(0, 0.03)))
                    cycle_s = 0.012 * noise if candidate is None else noise * (0.018 + steps * (0.001 + LATENCY[head]))
                    histograms = [_histogram(rng, 0.7 * kept, steps) if candidate else () for _ in range(4)]
                    requests = tuple(
                        synthetic_request(f"{b}.{i}", h, cycle_s, category=("chat", "python")[i % 2])
                        for i, h in enumerate(histograms)
                    )
                    wall_s = sum(r.e2e_s for r in requests) / c
                    measured = Measured(wall_s=wall_s, requests=requests)
                    record = BlockRecord(index=index, prompt_block=b, measured=measured)
                    blocks.setdefault(trial, []).append(record)
                index += 1
    latency = {Traffic(concurrency=c): {h: s * (1 + 0.1 * c) for h, s in LATENCY.items()} for c in concurrency}
    return SyntheticSweep(config=config, blocks=blocks, results=score(config, blocks, {}, latency))


def few_trials(sweep: SyntheticSweep, **config: object) -> SyntheticSweep:
    """Two of the heads at one traffic, under other settings: a whole sweep takes long to write."""
    kept = [r for r in sweep.results if r.trial.label in ("plain", "full", "slimspec-r64")]
    kept = [r for r in kept if r.trial.traffic.concurrency == 1]
    changed = dataclasses.replace(sweep.config, **config)  # type: ignore[arg-type]
    return SyntheticSweep(config=changed, blocks={r.trial: sweep.blocks[r.trial] for r in kept}, results=kept)


def _candidate(head: str, draft_steps: int) -> Candidate:
    kind, _, rank = head.partition("-r")
    own = Head(kind=kind, options={"rank": int(rank)} if rank else {})
    return Candidate(label=head, path=str(DRAFTERS[kind]), head=own, draft_steps=draft_steps)


def _histogram(rng: np.random.Generator, rate: float, steps: int) -> tuple[int, ...]:
    accepted = np.minimum(rng.geometric(1 - rate, size=16) - 1, steps)
    return tuple(int(n) for n in np.bincount(accepted))
