"""What a plain step under a policy takes outside of the model's pass, and where, beside a plain engine's.

python docs/experiments/step_parts.py --policy policy.json --target FOLDER --drafter FOLDER --prompts FILE --out FILE
    [--streams 1 4 16 32] [--blocks 3] [--new-tokens 100] [--context 1024] [--cpu] [--policy-last]

Both engines answer the same prompts in turn, the policy's with drafts at so high a price that it takes none. Clocks
around SGLang's functions, in the schedulers' own processes, take each step apart; medians over all steps that were
plain ones from beginning to end, in milliseconds. Passes differ by chance; what is outside of them is Python and small
operations, which differ by what they do. `step`: from one `run_batch` to the next.

`--cpu`: clocks of the CPU time of all threads of a scheduler, which others' work on the machine moves less than it
moves the clock on the wall; beside two plain engines, at one number of streams, after a block that warms up. Means of
steps that decode for all streams and of those that read prompts, and of what each engine takes more than the first
plain one in the same step of the same block, with their standard errors.
"""

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import wrapt

FOLDER = "RAYSPEC_STEP_PARTS"  # where schedulers write what they have seen
CPU = "RAYSPEC_STEP_CPU"  # whether they count CPU time
SRT = "sglang.srt."
POLICY = "sglang_ext.adapter.workers.policy"
SCHEDULER = SRT + "managers.scheduler"
WATCHED = {  # part: (module, class or none, function)
    "next_batch": (SCHEDULER, "Scheduler", "get_next_batch_to_run"),
    "result": (SCHEDULER, "Scheduler", "process_batch_result"),
    "policy": (POLICY, "FollowsPolicy", "forward_batch_generation"),
    "plain_step": (POLICY, None, "decode_plainly"),
    "target": (SRT + "managers.tp_worker", "TpModelWorker", "forward_batch_generation"),
    "pass": (SRT + "model_executor.model_runner", "ModelRunner", "forward"),
}


def watch() -> None:
    """In a process that starts: clocks on whatever of WATCHED it imports. Steps go to a file once a hundred are new."""
    spent: defaultdict[str, float] = defaultdict(float)
    now = time.process_time if os.environ.get(CPU) else time.perf_counter
    steps: list[dict[str, float]] = []
    begun: list[tuple[float, int]] = []  # the step that goes on: when, and its requests (0: no decode step)

    def clocked(owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            of = "draft_pass" if part == "pass" and arguments[0].is_draft_worker else part
            start = now()
            try:
                return function(*arguments, **named)
            finally:
                spent[of] += now() - start

        setattr(owner, name, timed)

    def clock_scheduler(module: Any) -> None:
        run_batch = module.Scheduler.run_batch

        def run_and_note(self: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
            start = now()
            if begun and (begun[0][1] or os.environ.get(CPU)):
                steps.append({"streams": begun[0][1], "step": start - begun[0][0], **spent})
                if len(steps) % 100 == 0:
                    (Path(os.environ[FOLDER]) / f"{os.getpid()}.json").write_text(json.dumps(steps))
            spent.clear()
            begun[:] = [(start, len(batch.reqs) if batch.forward_mode.is_decode() else 0)]
            try:
                return run_batch(self, batch, *arguments, **named)
            finally:
                spent["run_batch"] += now() - start

        module.Scheduler.run_batch = run_and_note

    def clock(part: str, module: str, owner: str | None, name: str) -> None:
        wrapt.register_post_import_hook(
            lambda found: clocked(getattr(found, owner) if owner else found, name, part), module
        )

    for part, place in WATCHED.items():
        clock(part, *place)
    wrapt.register_post_import_hook(clock_scheduler, SCHEDULER)


def parts(step: dict[str, float]) -> dict[str, float]:
    """Of one step, in milliseconds: all but `step` and `outside` add up to it."""
    s = defaultdict(float, {name: 1e3 * value for name, value in step.items() if name != "streams"})
    worker = s["policy"] or s["target"]
    return {
        "step": s["step"],
        "pass": s["pass"],
        "outside": s["step"] - s["pass"],
        "choosing the batch": s["next_batch"],
        "around the worker": s["run_batch"] - worker,
        "policy": worker - (s["plain_step"] or s["target"]),
        "plain step": (s["plain_step"] or s["target"]) - s["target"],
        "batch, sampling": s["target"] - s["pass"],
        "results": s["result"],
        "rest of the loop": s["step"] - s["run_batch"] - s["next_batch"] - s["result"],
    }


def summary(steps: list[dict[str, float]]) -> dict[int, Any]:
    """Medians by streams, of a plain engine's steps or of those that a policy's took plainly."""
    import numpy as np  # not in the processes that are watched

    plain = [step for step in steps if "plain_step" in step or "policy" not in step]
    found = {}
    for streams in sorted({int(step["streams"]) for step in plain}):
        rows = [parts(step) for step in plain if step["streams"] == streams]
        medians = {name: round(float(np.median([row[name] for row in rows])), 3) for name in rows[0]}
        found[streams] = {"steps": len(rows), **medians}
    return found


def cpu_columns(steps: list[dict[str, float]], requests: int) -> dict[str, Any]:
    """CPU milliseconds by part of the steps that decode for so many requests (0: of those that read prompts)."""
    import numpy as np

    own = [step for step in steps if step["streams"] == requests]
    assert requests == 0 or all("plain_step" in s or "policy" not in s for s in own), (
        "only plain steps after the first block"
    )
    rows = [parts(step) | {"drafter's pass": 1e3 * step.get("draft_pass", 0.0)} for step in own]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def cpu_summary(seen: dict[str, list[dict[str, float]]], streams: int) -> dict[str, Any]:
    """By kind of step and engine: [mean, its standard error, mean of what is more than `plain`, its standard error]."""

    def mean(column: Any) -> list[float]:
        return [round(float(column.mean()), 3), round(float(column.std() / len(column) ** 0.5), 3)]

    found: dict[str, Any] = {}
    for kind, requests in (("decoding", streams), ("reading prompts", 0)):
        columns = {name: cpu_columns(steps, requests) for name, steps in seen.items()}
        count = min(len(c["step"]) for c in columns.values())
        found[kind] = {"steps": count}
        for name, own in columns.items():
            more = {part: mean(own[part][:count] - columns["plain"][part][:count]) for part in own}
            found[kind][name] = {part: mean(own[part][:count]) + more[part] for part in own}
    return found


def main() -> None:
    import argparse
    import sys
    import tempfile
    from contextlib import ExitStack

    from policy import Server, asked_in, first_turns, timed

    from rayspec.provenance import provenance
    from sglang_ext.whole import write_whole

    parser = argparse.ArgumentParser()
    for name in ("policy", "target", "drafter", "prompts", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32])
    for name, value in (("blocks", 3), ("new-tokens", 100), ("context", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--policy-last", action="store_true")
    options = parser.parse_args()
    if options.cpu and len(options.streams) != 1:
        parser.error("--cpu takes one number of --streams")
    options.topk, options.nodes = 1, None  # a chain
    table = json.loads(Path(options.policy).read_text())
    longest = max(curve["draft_steps"] for curve in table["curves"])
    for curve in table["curves"]:
        curve["step_ms"] = [1e6 if curve["draft_steps"] else ms for ms in curve["step_ms"]]
    prompts = first_turns(options.prompts)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text("import step_parts\nstep_parts.watch()\n")
        (folder / "policy.json").write_text(json.dumps(table))
        os.environ[FOLDER] = name
        if options.cpu:
            os.environ[CPU] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join([name, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        engines = [Server(stack, options, 0) for _ in range(2 if options.cpu else 1)]
        engines.insert(
            len(engines) if options.policy_last else 0,
            Server(stack, options, longest, policy=str(folder / "policy.json")),
        )
        for streams in options.streams:
            for block in range(-1 if options.cpu else 0, options.blocks):
                for engine in engines:
                    engine.do(timed, asked_in(block, prompts, streams), options.new_tokens + 1)
        files = sorted(folder.glob("[0-9]*.json"), key=lambda file: int(file.stem))
        if len(files) != len(engines):
            parser.error("each engine writes its steps by the hundred: ask for more --new-tokens or --blocks")
        seen: dict[str, list[dict[str, float]]] = {}
        for file in files:
            steps = json.loads(file.read_text())
            name = "policy" if any("policy" in s for s in steps) else "plain too" if "plain" in seen else "plain"
            if options.cpu:
                steps = steps[next(i for i, s in enumerate(steps) if s["streams"] == 0 and i > options.new_tokens) :]
            seen[name] = steps
        found = cpu_summary(seen, options.streams[0]) if options.cpu else {n: summary(s) for n, s in seen.items()}
    head = {"command": " ".join(["python", *sys.argv]), **provenance()}
    write_whole(
        Path(options.out), json.dumps({**head, "cpu_ms" if options.cpu else "median_ms": found}, indent=1) + "\n"
    )
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
