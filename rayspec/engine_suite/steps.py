"""Step times of one engine, as JSON: python -m rayspec.engine_suite.steps TARGET --turn FOLDER [--drafter FOLDER].

A process of its own, since an engine's memory returns only with its process, and the accepted length is an environment
variable that SGLang reads once. It measures when the file `go` is in FOLDER (process.py), where its answer goes, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from rayspec.engine_suite.process import ROWS, wait_for_turn
from rayspec.farm.head_latency import head_latency
from rayspec_kernels.common.bench import described
from sglang_ext import COUNT_SHORTLISTS, DRAFT_STEPS
from sglang_ext.adapter.activation import has_accelerator
from sglang_ext.drafters.checkpoint_config import read_config
from sglang_ext.drafters.counting import StepShape
from sglang_ext.heads import head_class

PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 64, 96, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--drafter")
    parser.add_argument("--draft-steps", type=int, default=DRAFT_STEPS)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--server-args", type=json.loads, default={}, help="fields of SGLang's ServerArgs, as JSON")
    parser.add_argument("--turn", type=Path, required=True)
    options = parser.parse_args()
    (options.turn / ROWS).write_text(json.dumps(measure(options)))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry a batch: milliseconds of a step and of its parts, means over all rounds, tokens a step and request, and
    the engine's backends. For a plain engine a step is one token."""
    from sglang_ext.adapter.engine import backends, start_engine, start_step_clock

    drafter = options.drafter
    os.environ[COUNT_SHORTLISTS] = "1"  # as the engines of a sweep have it
    shape = {"draft_steps": options.draft_steps, "topk": options.topk, "num_draft_tokens": options.nodes}
    engine = start_engine(options.target, drafter, **shape, **_settings(options))
    try:
        if drafter:
            start_step_clock(engine)
        wait_for_turn(options.turn)
        used = {"backends": backends(engine)}
        rows = [_measure_batch(engine, batch, options) | used for batch in options.batches]
    finally:
        engine.shutdown()
    if drafter:
        nodes = options.nodes or options.draft_steps + 1
        asked = StepShape(draft_steps=options.draft_steps, topk=options.topk, num_draft_tokens=nodes)
        for row in rows:
            row |= _head_time(drafter, row["batch"], asked)
    return rows


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    most = max(options.batches)
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "max_running_requests": most,
        "context_length": 1024,
        "max_total_tokens": 2 * most * (PROMPT_TOKENS + NEW_TOKENS + (options.nodes or 0)) + 4096,
    }
    if options.drafter:
        settings["speculative_draft_load_format"] = "auto"
    if has_accelerator():
        settings |= {
            "dtype": "bfloat16",
            "mem_fraction_static": 0.9,  # share of what others leave; the tokens above are all that it takes
            "cuda_graph_max_bs_decode": most,
            "cuda_graph_bs_decode": sorted(set(options.batches)),  # a graph of each size between them is never replayed
        }
        if not options.drafter or not head_class(read_config(options.drafter)["draft_head"]["kind"]).routes:
            # prefill is not measured; but a head that routes before the layer is met in its graphs, too, as by a server
            settings["cuda_graph_backend_prefill"] = "disabled"
    return settings | options.server_args


def _measure_batch(engine: Any, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    from sglang_ext.adapter.engine import step_times

    drawn = random.Random(0)
    prompts = [[drawn.randrange(2, options.vocab) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]

    def seconds(new_tokens: int) -> tuple[float, list[dict[str, Any]]]:
        sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        start = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - start, answers

    seconds(NEW_TOKENS)
    before = step_times(engine) if options.drafter else None
    step_ms = []
    for _ in range(ROUNDS):
        prefill_s, _ = seconds(1)
        whole_s, answers = seconds(NEW_TOKENS)
        steps = max(a["meta_info"].get("spec_verify_ct") or NEW_TOKENS - 1 for a in answers)
        step_ms.append(1e3 * (whole_s - prefill_s) / steps)
    row: dict[str, Any] = {"batch": batch, "step_ms": fmean(step_ms), "rounds_ms": step_ms}
    if before is not None:
        after = step_times(engine)
        assert after is not None, "a clock that runs goes on"
        spent = after - before
        row |= {
            "tokens_per_step": (NEW_TOKENS - 1) / steps,
            "draft_ms": 1e3 * spent.draft_s / spent.steps,
            "verify_ms": 1e3 * spent.verify_s / spent.steps,
        }
        if spent.scoring_rows:  # of heads that the engine counts
            row["shortlist_mean"] = spent.scored_tokens / spent.scoring_rows
            if not 0 < row["shortlist_mean"] <= options.vocab:
                raise RuntimeError(f"{row['shortlist_mean']} of {options.vocab} tokens were counted for a row")
    return row


def _head_time(drafter: str, requests: int, shape: StepShape) -> dict[str, Any]:
    """The head's share of a step, or why there is none: an engine's times are not lost to it."""
    import torch

    dtype = torch.bfloat16 if has_accelerator() else torch.float32
    try:
        seconds = head_latency(drafter, requests=requests, shape=shape, dtype=dtype, num_threads=1)
    except Exception as error:  # from whichever kernel
        return {"head_error": described(error)}
    return {"head_ms": 1e3 * shape.draft_steps * seconds}


if __name__ == "__main__":
    main()
