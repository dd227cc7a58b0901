"""Speed-up by prompt category: where speculation helps and where it hurts."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rayspec.statistics import Interval, throughput_ratio

Request = Mapping[str, Any]  # a line of requests.jsonl


def category_speedups(own: Sequence[Request], plain: Sequence[Request], seed: int = 0) -> dict[str, Interval]:
    """Tokens per second of a request, against plain decoding's on the same prompts in the same blocks.

    Pooled over the prompts of a category, end to end; the interval resamples prompts. With one stream this is
    throughput; with more, streams slow each other down and the ratio is one of latency.
    """
    base = {_key(r): r for r in plain}
    rows: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for r in own:
        if (other := base.get(_key(r))) is not None:
            sums = rows[r["category"]].setdefault(r["prompt_id"], [0.0] * 4)
            pair = (len(r["output_ids"]), r["e2e_s"], len(other["output_ids"]), other["e2e_s"])
            for i, value in enumerate(pair):
                sums[i] += value
    pooled = {name: list(zip(*prompts.values(), strict=True)) for name, prompts in sorted(rows.items())}
    return {name: throughput_ratio(*columns, seed=seed) for name, columns in pooled.items()}


def _key(request: Request) -> tuple[Any, ...]:
    """What candidate and baseline have in common: the block in time, the prompt and its turn."""
    return request["block"], request["prompt_id"], request.get("turn", 0)
