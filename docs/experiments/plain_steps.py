"""Where plain decoding under a policy loses time: first tokens and single decode steps against two plain engines.

python docs/experiments/plain_steps.py --policy policy.json --target FOLDER --drafter FOLDER --prompts FILE --out FILE
    [--streams 16] [--blocks 11] [--new-tokens 48] [--skip 96] [--context 1024]

The policy must choose plain decoding at that many streams. Three engines answer the same blocks of prompts in turn: the
policy's and two plain ones, whose ratio says how much two processes of the same work differ. A client takes the time of
each streamed token; of a block, step i is when the last of its requests has token i + 1. Writes the median times and
the median over blocks of the median ratio of the same step of the same block, above 1 where the first engine is faster,
with the exact interval of order statistics of at least 95% (the binomial of the sign test): a percentile bootstrap of a
median covers it too seldom, 0.90 of the time at 13 blocks. Beside it the ratio of all seconds.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from policy import Server, asked_in, first_turns, order
from scipy.stats import binom

from rayspec.provenance import provenance
from sglang_ext.policy.table import read_table
from sglang_ext.whole import write_whole


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("policy", "target", "drafter", "prompts", "out"):
        parser.add_argument(f"--{name}", required=True)
    for name, value in (("streams", 16), ("blocks", 11), ("new-tokens", 48), ("skip", 96), ("context", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    options.topk, options.nodes = 1, None  # a chain
    prompts = first_turns(options.prompts)[options.skip :]
    with ExitStack() as stack:
        longest = read_table(options.policy).lengths[-1]
        engines = {
            "policy": Server(stack, options, longest, policy=options.policy),
            "plain": Server(stack, options, 0),
            "plain again": Server(stack, options, 0),
        }
        names, times = list(engines), {name: list[np.ndarray]() for name in engines}
        for block in range(-1, options.blocks):  # the first warms up
            asked = asked_in(block, prompts, options.streams)
            for name in order(names, options.streams, block):
                found = engines[name].do(token_times, asked, options.new_tokens)
                if block >= 0:
                    times[name].append(np.array(found).max(axis=0))
    at_Bi = {name: np.array(blocks) for name, blocks in times.items()}
    parts = {
        "first token": {name: at[:, :1] for name, at in at_Bi.items()},
        "decode step": {name: np.diff(at, axis=1) for name, at in at_Bi.items()},
        "whole block": {name: at[:, -1:] for name, at in at_Bi.items()},
    }
    pairs = (("policy", "plain"), ("policy", "plain again"), ("plain", "plain again"))
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), **provenance()}
    for part, seconds in parts.items():
        report[part] = {
            "median_ms": {name: 1e3 * float(np.median(s)) for name, s in seconds.items()},
            "speed": {f"{a} over {b}": ratio(seconds[a], seconds[b]) for a, b in pairs},
            "total_s": {name: float(s.sum()) for name, s in seconds.items()},
            "speed_of_totals": {f"{a} over {b}": total_ratio(seconds[a], seconds[b]) for a, b in pairs},
        }
    report["block_s"] = {name: s[:, 0].tolist() for name, s in parts["whole block"].items()}
    text = json.dumps(report, indent=1) + "\n"
    write_whole(Path(options.out), text)
    print(text)


def token_times(engine: Any, asked: Sequence[str], new_tokens: int) -> list[list[float]]:
    """Seconds from the start to each token of each request."""
    engine.flush_cache()
    found: list[list[float]] = [[] for _ in asked]
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}

    async def answer(number: int) -> None:
        tokens = await engine.async_generate(prompt=asked[number], sampling_params=sampling, stream=True)
        async for part in tokens:  # of several tokens, where a step or the stream brings them together
            new = part["meta_info"]["completion_tokens"] - len(found[number])
            found[number] += new * [time.perf_counter() - start]

    async def answer_all() -> None:
        await asyncio.gather(*(answer(i) for i in range(len(asked))))

    start = time.perf_counter()
    engine.loop.run_until_complete(answer_all())
    return found


def ratio(own_BN: np.ndarray, other_BN: np.ndarray) -> list[float | None]:
    """[speed of the first over the second, low, high]."""
    return median_interval(np.median(other_BN / own_BN, axis=1))


def total_ratio(own_BN: np.ndarray, other_BN: np.ndarray) -> list[float]:
    """[speed, low, high] by all seconds together, which hold the slow steps that medians leave out: first tokens and
    decode steps, weighted by their seconds, make up the whole block. Percentile bootstrap over blocks, paired."""
    own_B, other_B = own_BN.sum(axis=1), other_BN.sum(axis=1)
    drawn = np.random.default_rng(0).integers(len(own_B), size=(10_000, len(own_B)))
    low, high = np.percentile(other_B[drawn].sum(axis=1) / own_B[drawn].sum(axis=1), [2.5, 97.5])
    return [round(float(x), 4) for x in (other_B.sum() / own_B.sum(), low, high)]


def median_interval(values_B: np.ndarray, confidence: float = 0.95) -> list[float | None]:
    """[median, low, high]: order statistics between which the median of the distribution lies with `confidence` at
    least, whatever the distribution. None where there are too few values for any (fewer than 6 at 95%)."""
    ordered, n = np.sort(values_B), len(values_B)
    beyond = int(binom.ppf((1 - confidence) / 2, n, 0.5))  # values beyond each end: P(X < beyond) is below a half alpha
    ends = (ordered[beyond - 1], ordered[n - beyond]) if beyond else (None, None)
    return [None if x is None else round(float(x), 4) for x in (np.median(ordered), *ends)]


if __name__ == "__main__":
    main()
