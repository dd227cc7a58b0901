"""Speed-up by prompt category: where speculation helps and where it hurts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rayspec.names import safe_name
from rayspec.statistics import Interval, Pair, paired_speedup, ratio_interval

if TYPE_CHECKING:
    from rayspec.sweep.plan.trials import Trial

Request = Mapping[str, Any]  # a line of requests.jsonl
RequestsOf = Callable[["Trial"], Sequence[Request]]


def category_speedups(own: Sequence[Request], plain: Sequence[Request]) -> dict[str, Interval]:
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
        name: paired_speedup([[Pair(*sums) for sums in passes.values()] for passes in of.values()])
        for name, of in sorted(prompts.items())
    }


def category_taus(requests: Sequence[Request]) -> dict[str, tuple[Interval, int]]:
    """{category: (tau with its 95% interval, prompts)}; see `ratio_interval`."""
    counts: dict[str, dict[str, list[int]]] = {}
    for r in requests:
        if r["verify_steps"]:
            sums = counts.setdefault(safe_name(r["category"]), {}).setdefault(r["prompt_id"], [0, 0])
            sums[0] += r["accepted_drafts"]
            sums[1] += r["verify_steps"]
    found = {name: ratio_interval(*zip(*of.values(), strict=True)) for name, of in counts.items()}
    shifted = {
        name: Interval(value=1 + i.value, low=i.low and 1 + i.low, high=i.high and 1 + i.high)
        for name, i in found.items()
    }
    return {name: (interval, len(counts[name])) for name, interval in shifted.items()}


def prompt_counts(requests: Sequence[Request]) -> dict[str, int]:
    """Prompts of each category."""
    prompts = {(safe_name(r["category"]), r["prompt_id"]) for r in requests}
    return dict(Counter(name for name, _ in prompts))


def _tokens(request: Request) -> int:
    """Those of the answer; sweeps of before counted them by their ids alone."""
    return request["output_tokens"] if "output_tokens" in request else len(request["output_ids"])


def _key(request: Request) -> tuple[Any, ...]:
    """What candidate and baseline have in common: the block in time, the prompt and its turn."""
    return request["block"], request["prompt_id"], request["turn"]
