"""How much engines of the same work differ for as long as they live, beside what one block differs from the next.

python docs/experiments/starts.py --target FOLDER --prompts FILE --out FILE [--drafter FOLDER --draft-steps 3]
    [--starts 7] [--engines 3] [--blocks 10] [--streams 1] [--new-tokens 24] [--context 1024]

A few engines alike are started, answer the same blocks of prompts in turn (their order drawn for each block), and end;
so often as `--starts` says. An interval over blocks says what the same engines would give again. What it does not say
is by how much others would differ, because of where their memory lies, say: that is the standard deviation of an
engine's own share of the log of the seconds, from the analysis of variance of blocks and engines within a start, with
its F test. Written after each start.
"""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from policy import Server, asked_in, first_turns, order, timed
from scipy.stats import f as f_distribution

from rayspec.provenance import provenance
from sglang_ext.whole import write_whole


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("target", "prompts", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--drafter")
    for name, value in (("starts", 7), ("engines", 3), ("blocks", 10), ("streams", 1), ("new-tokens", 24)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("draft-steps", 0), ("context", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    options.topk, options.nodes = 1, None  # a chain
    if (options.drafter is None) != (options.draft_steps == 0):
        parser.error("--drafter and --draft-steps go together; plain engines have neither")
    if options.engines < 2 or options.blocks < 2:
        parser.error("--engines and --blocks must be at least 2, of which a spread can be told")
    prompts = first_turns(options.prompts)
    head = {"command": " ".join(["python", *sys.argv]), **provenance()}
    seconds: list[list[list[float]]] = []  # of each start, block and engine
    for start in range(options.starts):
        seconds.append(of_one_start(prompts, options, start))
        found = spread(np.array(seconds))
        write_whole(Path(options.out), json.dumps({**head, "found": found, "seconds": seconds}, indent=1) + "\n")
        print(start + 1, found, flush=True)


def of_one_start(prompts: list[str], options: Any, start: int) -> list[list[float]]:
    """[blocks, engines] seconds."""
    with ExitStack() as stack:
        engines = {str(i): Server(stack, options, options.draft_steps) for i in range(options.engines)}
        found = []
        for block in range(-1, options.blocks):  # the first warms up
            asked = asked_in(start * options.blocks + block, prompts, options.streams)
            names = order(list(engines), start, block)
            took = {name: engines[name].do(timed, asked, options.new_tokens)[1] for name in names}
            if block >= 0:
                found.append([took[name] for name in engines])
        return found


def spread(seconds_SBE: np.ndarray) -> dict[str, Any]:
    """Standard deviations, as shares of the time: of a block, and of an engine whatever its blocks."""
    starts, blocks, engines = seconds_SBE.shape
    log_SBE = np.log(seconds_SBE)
    log_SBE -= log_SBE.mean(axis=2, keepdims=True)  # what the block is for all of them
    of_engine_SE = log_SBE.mean(axis=1)
    between, within = starts * (engines - 1), starts * (engines - 1) * (blocks - 1)  # degrees of freedom
    block_variance = float(((log_SBE - of_engine_SE[:, None]) ** 2).sum() / within)
    engine_mean_square = float((of_engine_SE**2).sum() * blocks / between)
    low = float(f_distribution.ppf(0.05, between, within))
    return {
        "ratio_of_each_engine": np.exp(of_engine_SE).round(4).tolist(),
        "block": block_variance**0.5,
        "engine": max((engine_mean_square - block_variance) / blocks, 0.0) ** 0.5,
        "engine_at_most": max((engine_mean_square / low - block_variance) / blocks, 0.0) ** 0.5,  # at 95%
        "p_value_without_it": float(f_distribution.sf(engine_mean_square / block_variance, between, within)),
    }


if __name__ == "__main__":
    main()
