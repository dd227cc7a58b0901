"""Speed-up by prompt category: where speculation helps and where it hurts."""

from collections.abc import Mapping, Sequence
from typing import Any

from rayspec.names import safe_name
from rayspec.statistics import Interval, Pair, paired_speedup

Request = Mapping[str, Any]  # a line of requests.jsonl


def category_speedups(own: Sequence[Request], plain: Sequence[Request], seed: int = 0) -> dict[str, Interval]:
    """Tokens per second of a request, against plain decoding's on the same prompts in the same blocks.

    From arrival to the last token, pooled over the prompts of a category; the interval resamples prompts. With one
    stream this is throughput; with more, streams slow each other down and the ratio is one of latency.
    """
    base = {_key(r): r for r in plain}
    prompts: dict[str, dict[str, dict[int, list[float]]]] = {}
    for r in own:
        if (other := base.get(_key(r))) is not None:
            passes = prompts.setdefault(safe_name(r["category"]), {}).setdefault(r["prompt_id"], {})
            sums = passes.setdefault(r["block"], [0.0] * 4)  # over the turns of a conversation
            pair = (_tokens(r), r["e2e_s"], _tokens(other), other["e2e_s"])
            for i, value in enumerate(pair):
                sums[i] += value
    return {
        name: paired_speedup([[Pair(*sums) for sums in passes.values()] for passes in of.values()], seed=seed)
        for name, of in sorted(prompts.items())
    }


def _tokens(request: Request) -> int:
    """Those of the answer; sweeps of before counted them by their ids alone."""
    return request["output_tokens"] if "output_tokens" in request else len(request["output_ids"])


def _key(request: Request) -> tuple[Any, ...]:
    """What candidate and baseline have in common: the block in time, the prompt and its turn."""
    return request["block"], request["prompt_id"], request["turn"]
