"""A policy against plain decoding and every fixed draft length, and its switching under a changing load.

python docs/experiments/policy.py [--policy policy.json] --target FOLDER --drafter FOLDER --prompts FILE --out FOLDER
    [--streams 1 8 32] [--blocks 8] [--starts 1] [--new-tokens 64] [--skip 0] [--lengths 0 2 4] [--topk 1] [--nodes N]
    [--context 1024] [--phase-s 20] [--only-figure]

All engines are resident, each in a process of its own, and answer the same prompts in turn, in an order that is drawn
for each block (seeded), so that a drift of the machine meets all of them and none always follows the same one. Writes
measured.json after each block (output tokens per second, ratios with 95% intervals from the paired blocks, the tokens
and seconds of each block, the policy's steps by draft length) and at the end switching.png (load, draft length and
tokens per second over time). `--starts`: so often the engines are started anew, for `--blocks` other blocks each time.
`--skip`: leave out so many of the first prompts, those that the policy's sweep asked. `--lengths`: the fixed ones (all
of the policy's). Without `--policy`, one is measured first with those prompts, on the same engines in turn, and written
to policy.json.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from rayspec.provenance import provenance
from rayspec.serving.policy import accepted_if_reached, policy_text
from rayspec.statistics import Pair, paired_speedup
from sglang_ext.adapter.engine import policy_report, start_engine
from sglang_ext.policy.table import FORMAT, CostCurve, PolicyTable, read_table
from sglang_ext.whole import write_whole

PHASES = (1, 8, 32, 8, 1)  # streams of the figure, one after the other


def main() -> None:
    options = arguments()
    head = {"command": " ".join(["python", *sys.argv]), **provenance()}
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = first_turns(options.prompts)
    first, prompts = prompts[: options.skip], prompts[options.skip :]
    file = options.policy or str(folder / "policy.json")
    if not options.policy:
        with ExitStack() as stack:
            fixed = {str(k): Server(stack, options, k) for k in options.lengths or (0, 2, 4)}
            write_whole(Path(file), policy_text(calibrated(fixed, first, options)))
    table = read_table(file)
    blocks: Blocks = {}
    for start in range(options.starts):
        with ExitStack() as stack:
            follows = Server(stack, options, table.lengths[-1], policy=file)
            if not options.only_figure:
                fixed = {str(k): Server(stack, options, k) for k in options.lengths or table.lengths}
                engines = {"policy": follows, **fixed}
                for _ in measured(engines, prompts, options, start, blocks):
                    text = json.dumps({**head, "by_streams": summary(blocks)}, indent=1) + "\n"
                    write_whole(folder / "measured.json", text)
                print(text, flush=True)
            if start == options.starts - 1:
                draw(*follows.do(change_the_load, prompts, options), table, folder / "switching.png")


def arguments() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--policy")
    for name in ("target", "drafter", "prompts", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--nodes", type=int)
    defaults = {"blocks": 8, "starts": 1, "new-tokens": 64, "context": 1024, "phase-s": 20, "skip": 0}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only-figure", action="store_true")
    options = parser.parse_args()
    if not options.policy and (options.only_figure or not options.skip):
        parser.error("without --policy: --skip must leave prompts to measure one with, and --only-figure has none")
    return options


class Server:
    """An engine of one draft length, 0 for plain decoding, or with a policy, in a process of its own: two engines of
    one process share SGLang's settings, of which a plain and a speculative one need different ones."""

    def __init__(self, stack: ExitStack, options: Any, draft_steps: int, policy: str | None = None) -> None:
        arguments: dict[str, Any] = {"context_length": options.context, "max_running_requests": 32}
        if draft_steps:
            arguments |= {"draft_steps": draft_steps, "topk": options.topk, "num_draft_tokens": options.nodes}
        if policy:
            arguments["speculative_adaptive_config"] = policy
        spawn = multiprocessing.get_context("spawn")
        self.pipe, far = spawn.Pipe()
        drafter = options.drafter if draft_steps else None
        process = spawn.Process(target=host, args=(far, options.target, drafter, arguments))
        process.start()
        stack.callback(process.join, 60)
        stack.callback(self.pipe.send, None)

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(engine, *arguments)` there."""
        self.pipe.send((function, arguments))
        return self.pipe.recv()


def host(pipe: Any, target: str, drafter: str | None, arguments: dict[str, Any]) -> None:
    engine = start_engine(target, drafter, log_level="error", **arguments)
    for function, given in iter(pipe.recv, None):
        pipe.send(function(engine, *given))
    engine.shutdown()


def calibrated(engines: dict[str, Server], prompts: Sequence[str], options: Any) -> PolicyTable:
    """A policy by the median block of each engine and load: costs such that tau over them is the measured rate."""
    step_ms: dict[str, list[float]] = {name: [] for name in engines}
    longest, histogram = max(engines, key=int), Counter[int]()
    for streams in options.streams:
        ms_a_token: dict[str, list[float]] = {name: [] for name in engines}
        verified: Counter[str] = Counter()
        accepted: Counter[str] = Counter()
        for block in range(-1, options.blocks):
            asked = asked_in(block, prompts, streams)
            for name, engine in engines.items():
                answers, seconds = engine.do(timed, asked, options.new_tokens)
                if block >= 0:
                    ms_a_token[name].append(1e3 * seconds / options.new_tokens)
                for meta in (answer["meta_info"] for answer in answers if name != "0"):
                    verified[name] += meta["spec_verify_ct"]
                    accepted[name] += meta["spec_num_correct_drafts"]
                    if name == longest:
                        histogram.update(dict(enumerate(meta["spec_correct_drafts_histogram"])))
        for name, found in ms_a_token.items():
            tau = 1 + accepted[name] / verified[name] if verified[name] else 1.0
            step_ms[name].append(round(tau * float(np.median(found)), 4))
    return PolicyTable(
        format_version=FORMAT,
        curves=[CostCurve(draft_steps=int(k), requests=options.streams, step_ms=ms) for k, ms in step_ms.items()],
        accepted_if_reached=accepted_if_reached(
            [{"accepted_histogram": [histogram[i] for i in range(int(longest) + 1)]}], int(longest)
        ),
        about={"target": options.target, "drafter": options.drafter, "prompts": options.prompts},
    )


@dataclass
class Load:
    """What was measured at one number of streams."""

    blocks: dict[str, list[tuple[int, float]]]  # of each engine: (tokens, seconds), block by block
    policy_steps: Counter[str] = field(default_factory=Counter)  # by draft length


Blocks = dict[int, Load]  # by streams


def measured(
    engines: dict[str, Server], prompts: Sequence[str], options: Any, start: int, found: Blocks
) -> Iterator[None]:
    """Adds to `found`, block by block."""
    names = list(engines)
    for streams in options.streams:
        load = found.setdefault(streams, Load({name: [] for name in names}))
        for block in range(-1, options.blocks):  # the first warms up
            number = start * options.blocks + block
            before = steps_so_far(engines["policy"])
            asked = asked_in(number, prompts, streams)
            for name in order(names, streams, start, block):
                answers, took = engines[name].do(timed, asked, options.new_tokens)
                if block >= 0:
                    load.blocks[name].append((sum(len(a["output_ids"]) for a in answers), took))
            if block >= 0:
                load.policy_steps += Counter(steps_so_far(engines["policy"])) - Counter(before)
                yield


def summary(found: Blocks) -> dict[int, Any]:
    """By streams: tokens per second of each engine, and the policy's ratio to each with its interval."""
    return {
        streams: {
            "tokens_per_s": {n: sum(t for t, _ in b) / sum(s for _, s in b) for n, b in load.blocks.items()},
            "policy_over": {n: interval(load.blocks["policy"], b) for n, b in load.blocks.items() if n != "policy"},
            "policy_steps": load.policy_steps,
            "blocks": load.blocks,
        }
        for streams, load in found.items()
    }


def first_turns(file: str) -> list[str]:
    return [json.loads(line)["turns"][0] for line in Path(file).read_text().splitlines()]


def asked_in(block: int, prompts: Sequence[str], streams: int) -> list[str]:
    """Other prompts than the block before, and the first ones again after the last."""
    return [prompts[(block * streams + i) % len(prompts)] for i in range(streams)]


def order(names: Sequence[str], *seeds: int) -> list[str]:
    """A permutation drawn from the seeds: of an order that only moves on, each engine nearly always follows the same
    one, and has what that leaves behind (heat, caches) in all its blocks."""
    rng = np.random.default_rng([seed + 1 for seed in seeds])  # block -1 is the warm-up's
    return [names[i] for i in rng.permutation(len(names))]


def steps_so_far(server: Server) -> dict[str, int]:
    """By draft length."""
    report = server.do(policy_report)
    assert report is not None, "it was started with a policy"
    return report["steps"]


def interval(own: list[tuple[int, float]], other: list[tuple[int, float]]) -> list[float | None]:
    """[ratio, low, high] over blocks of the same prompts."""
    pairs = [[Pair(*a, *b)] for a, b in zip(own, other, strict=True)]
    found = paired_speedup(pairs, confidence=0.95, seed=0)
    return [found.value, found.low, found.high]


def timed(engine: Any, asked: list[str], new_tokens: int) -> tuple[list[Any], float]:
    engine.flush_cache()
    start = time.perf_counter()
    sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
    answers = engine.generate(prompt=asked, sampling_params=sampling)
    return answers, time.perf_counter() - start


def change_the_load(engine: Any, prompts: Sequence[str], options: Any) -> tuple[list[Any], list[Any]]:
    """The engine's history, and (unix time, tokens) as they come: closed loops of as many streams as PHASES say."""
    begin, answers = time.time(), list[tuple[float, int]]()
    for streams in PHASES:
        end = time.time() + options.phase_s
        answers += ask_until(engine, prompts, streams, end, options.new_tokens)
    report = policy_report(engine)
    assert report is not None, "it was started with a policy"
    return [step for step in report["history"] if step[0] >= begin], answers


def ask_until(
    engine: Any, prompts: Sequence[str], streams: int, end: float, new_tokens: int
) -> list[tuple[float, int]]:
    found: list[tuple[float, int]] = []

    async def stream(number: int) -> None:
        asked = number
        while time.time() < end:
            sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
            prompt, before = prompts[asked % len(prompts)], 0
            async for part in await engine.async_generate(prompt=prompt, sampling_params=sampling, stream=True):
                tokens = part["meta_info"]["completion_tokens"]
                found.append((time.time(), tokens - before))
                before = tokens
            asked += streams

    async def all_streams() -> None:
        await asyncio.gather(*(stream(i) for i in range(streams)))

    engine.loop.run_until_complete(all_streams())
    return found


def draw(history: list[Any], answers: list[Any], table: PolicyTable, file: Path) -> None:
    """Requests of a step, draft length and tokens per second, over time."""
    t, requests, k = (np.array(column) for column in zip(*history, strict=True))
    zero = t[0]
    figure, (top, middle, bottom) = plt.subplots(3, 1, sharex=True, figsize=(9, 6.5), constrained_layout=True)
    top.step(t - zero, requests, where="post", color="#4c72b0", linewidth=1.2)
    top.set_ylabel("requests in the step")
    middle.step(t - zero, k, where="post", color="#c44e52", linewidth=1.2)
    middle.set_yticks(table.lengths)
    middle.set_ylabel("draft length\n(0: plain decoding)")
    seconds = np.arange(0, answers[-1][0] - zero + 1, 2.0)
    ends, tokens = (np.array(column) for column in zip(*answers, strict=True))
    rate = np.histogram(ends - zero, bins=seconds, weights=tokens)[0] / 2
    bottom.step(seconds[:-1], rate, where="post", color="#55a868", linewidth=1.2)
    bottom.set_ylabel("tokens/s\n(by 2 s)")
    bottom.set_xlabel("seconds")
    for axis in (top, middle, bottom):
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
