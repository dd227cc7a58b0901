"""Clients that stream all the time from `rayspec serve --follow`, through a roll-over and the death of a server.

    PYTHONPATH=.:tests:tests/jobs python docs/experiments/rollover.py --out FOLDER [--clients 64] [--seconds 600]

Greedy requests to the tests' small target, each answer compared with plain decoding. After a fifth of the time the
alias moves to a second version; a fifth after that is in, a server is killed with -9, and another fifth follows. Writes
result.json: what the requests became, the events, and the proportional memory (PSS) of all that the command started,
every 5 s, in all and by the names of processes.
"""

import argparse
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

import psutil
from fixture_models import DRAFTERS, prompt_texts
from mlflow import MlflowClient
from rollover_world import point_at, register, streaming, tags, wait_for
from test_serve_rollover import is_healthy, plain_answers, served, servers

from rayspec.provenance import machine
from rayspec.serving.process import free_port

TOKENS = 32
START_TIMEOUT_S = 900
SAMPLE_S = 5.0


def pss_mb(process: subprocess.Popen[bytes]) -> Counter[str]:
    """Of the command and all that it started, by name; pages that processes share are counted once."""
    found: Counter[str] = Counter()
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with suppress(psutil.Error):
            program, *words = one.cmdline() or [one.name()]
            # an actor is called by what it does just now
            title = program.split(".")[0] if "::" in program else " ".join([Path(program).name, *words[:2]])
            found[title.strip()[:60]] += one.memory_full_info().pss / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True)
    store = MlflowClient(f"sqlite:///{out}/mlflow.db")
    first, second = (register(store, out / name, DRAFTERS["full"], tau=3.0) for name in ("first", "second"))
    point_at(store, first)
    prompts = prompt_texts(32)
    expected = plain_answers(prompts, out)
    port, log = free_port(), out / "serve.log"
    told = ["--follow", "--replicas", str(options.replicas), "--poll-seconds", "5", "--watch-seconds", "60"]
    memory: list[tuple[float, Counter[str]]] = []
    with served(out, port, *told, "--", "--log-level", "warning") as process:
        wait_for(lambda: tags(store, first).get("rollover") == "started", START_TIMEOUT_S, process, log)
        wait_for(lambda: is_healthy(port), 120, process, log)
        begin, load = time.monotonic(), os.getloadavg()
        is_over = threading.Event()

        def sample() -> None:
            while not is_over.wait(SAMPLE_S):
                memory.append((round(time.monotonic() - begin, 1), pss_mb(process)))

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        with streaming(
            f"http://127.0.0.1:{port}", prompts, expected, clients=options.clients, max_tokens=TOKENS
        ) as seen:
            time.sleep(options.seconds / 5)
            point_at(store, second)
            moved_s = time.monotonic() - begin
            wait_for(lambda: tags(store, second).get("rollover") in ("swapped", "kept", "refused"), START_TIMEOUT_S)
            swapped_s = time.monotonic() - begin
            time.sleep(options.seconds / 5)
            before_kill = (seen.completed, len(seen.retriable), len(seen.bad))
            victim = max(servers(process), key=lambda p: p.create_time())
            victim.send_signal(signal.SIGKILL)
            killed_s = time.monotonic() - begin
            time.sleep(max(options.seconds / 5, options.seconds - killed_s))
        is_over.set()
        sampler.join()
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(120)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": {k: str(v) for k, v in vars(options).items() if k != "out"},
        "machine": {k: v for k, v in machine().items() if k != "host.name"},
        "load_average_at_start": load,
        "seconds": {"alias_moved": moved_s, "swapped": swapped_s, "killed": killed_s},
        "before_the_kill": dict(zip(("completed", "retriable", "bad"), before_kill, strict=True)),
        "completed": seen.completed,
        "retriable": {text: seen.retriable.count(text) for text in set(seen.retriable)},
        "bad": seen.bad,
        "request_s": {
            "median": median(seen.seconds),
            "p99": quantiles(seen.seconds, n=100)[98],
            "max": max(seen.seconds),
        },
        "rollover": {k: v for k, v in tags(store, second).items() if k.startswith("rollover")},
        "pss_mb": [(at, round(found.total(), 1)) for at, found in memory],
        "pss_mb_by_name": {
            name: [round(found[name], 1) for _, found in memory]
            for name in sorted({name for _, found in memory for name in found})
            if max(found[name] for _, found in memory) > 50
        },
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if not k.startswith("pss_mb")}, indent=1))


if __name__ == "__main__":
    main()
