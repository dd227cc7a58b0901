"""A served policy against plain decoding and fixed draft lengths, through the endpoints.

python docs/experiments/policy_served.py --prompts FILE --out FILE [--streams 1 4 16 32] [--blocks 12] [--limit 160]
    [--new-tokens 96] policy=ADDRESS plain=ADDRESS [NAME=ADDRESS ...]

Each ADDRESS (http://127.0.0.1:30000) is a server that runs already, with an engine of its own and the administrator's
key of $RAYSPEC_ADMIN_KEY, which empties its cache before each block; `policy` is `rayspec serve`. All answer the same
blocks of chat requests in turn, in an order drawn for each block: the first turns of the first `--limit` lines of FILE,
greedy, `--new-tokens` each, as many at once as there are streams. FILE of --out gets, after each block, tokens and
seconds of all blocks, the ratios with 95% intervals (bootstrap over blocks), how many verify steps of requests the
policy took with each draft length, and, of servers on this machine, the seconds of CPU time of each of their processes,
which others' work on the machine moves less than it moves the clock. Two plain servers show what two of the same differ
by.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from policy import asked_in, first_turns, interval, order
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from rayspec.provenance import provenance
from rayspec.serving.access import ADMIN_VARIABLE
from rayspec.serving.figures import VERIFIED
from sglang_ext.whole import write_whole

TIMEOUT_S = 600
Done = list[tuple[int, float]]  # tokens and seconds of each block


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32])
    for name, value in {"blocks": 12, "limit": 160, "new-tokens": 96}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("servers", nargs="+")
    options = parser.parse_intermixed_args()
    servers = dict(text.split("=", 1) for text in options.servers)
    if "policy" not in servers:
        parser.error("one of the servers must be called policy")
    if ADMIN_VARIABLE not in os.environ:
        parser.error(
            f"set {ADMIN_VARIABLE} to the key that all servers were started with (--admin-api-key of SGLang's)"
        )
    prompts = first_turns(options.prompts)[: options.limit]
    head = {"command": " ".join(["python", *sys.argv]), **provenance()}
    found: dict[int, dict[str, Any]] = {}
    for streams in options.streams:
        done: dict[str, Done] = {name: [] for name in servers}
        cpu: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        before = Counter[str]()
        for block in tqdm(range(-1, options.blocks), desc=f"{streams} streams"):  # the first warms up
            asked = asked_in(block, prompts, streams)
            if block == 0:
                before = steps_so_far(servers["policy"])
            for name in order(list(servers), streams, block):
                cpu_before = cpu_seconds(servers[name])
                tokens_and_seconds = asyncio.run(answered(servers[name], asked, options.new_tokens))
                if block >= 0:
                    done[name].append(tokens_and_seconds)
                    cpu[name].append({k: s - cpu_before[k] for k, s in cpu_seconds(servers[name]).items()})
            if block >= 0:
                found[streams] = summary(done, cpu, steps_so_far(servers["policy"]) - before)
                write_whole(options.out, json.dumps({**head, "by_streams": found}, indent=1) + "\n")
        print(streams, {k: v for k, v in found[streams].items() if not k.startswith("blocks")}, flush=True)


async def answered(address: str, asked: Sequence[str], new_tokens: int) -> tuple[int, float]:
    """Tokens and seconds of a block, no prompt of which the server knows from before."""
    async with httpx.AsyncClient(base_url=address, timeout=TIMEOUT_S) as client:
        key = {"Authorization": f"Bearer {os.environ[ADMIN_VARIABLE]}"}
        (await client.post("/flush_cache", headers=key)).raise_for_status()
        name = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        settings = {"model": name, "temperature": 0.0, "max_tokens": new_tokens, "ignore_eos": True}

        async def tokens_of(prompt: str) -> int:
            messages = [{"role": "user", "content": prompt}]
            answer = await client.post("/v1/chat/completions", json={**settings, "messages": messages})
            return answer.raise_for_status().json()["usage"]["completion_tokens"]

        begin = time.perf_counter()
        tokens = await asyncio.gather(*(tokens_of(prompt) for prompt in asked))
        return sum(tokens), time.perf_counter() - begin


def steps_so_far(address: str) -> Counter[str]:
    """Verify steps by draft length, each as often as a request took part in one."""
    text = httpx.get(f"{address}/metrics", timeout=TIMEOUT_S).raise_for_status().text
    found = Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == VERIFIED:
                found[sample.labels["draft_steps"]] += round(sample.value)
    return found


def cpu_seconds(address: str) -> Counter[str]:
    """CPU time so far of the processes of a server, by what SGLang names them; nothing of one on another machine."""
    port, found = urlsplit(address).port, Counter[str]()
    for process in {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port}:
        server = psutil.Process(process)
        for one in (server, *server.children(recursive=True)):
            used = one.cpu_times()
            found["server" if one is server else one.name()] += used.user + used.system
    return found


def summary(done: dict[str, Done], cpu: dict[str, list[dict[str, float]]], steps: Counter[str]) -> dict[str, Any]:
    pairs = [(a, b) for a, b in permutations(done, 2) if a.startswith(("policy", "plain"))]
    # a block's CPU seconds a token, of all processes: the same form as its seconds, so that their ratio has an interval
    used = {n: [(t, sum(c.values())) for (t, _), c in zip(done[n], cpu[n], strict=True)] for n in done if any(cpu[n])}
    return {
        "cpu_s": {n: dict(sum(map(Counter, blocks), Counter[str]())) for n, blocks in cpu.items()},
        "cpu_ratios": {f"{a} over {b}": interval(used[a], used[b]) for a, b in pairs if {a, b} <= used.keys()},
        "blocks_cpu_s": cpu,
        "tokens_per_s": {n: sum(t for t, _ in b) / sum(s for _, s in b) for n, b in done.items()},
        "ratios": {f"{a} over {b}": interval(done[a], done[b]) for a, b in pairs},
        "policy_steps": steps,
        "blocks": done,
    }


if __name__ == "__main__":
    main()
