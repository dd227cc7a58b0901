"""What a plain step under a policy takes outside of the model's pass, and where, beside a plain engine's.

python docs/experiments/step_parts.py --policy policy.json --target FOLDER --drafter FOLDER --prompts FILE --out FILE
    [--streams 1 4 16 32] [--blocks 3] [--new-tokens 100] [--context 1024]

Both engines answer the same prompts in turn, the policy's with drafts at so high a price that it takes none. Clocks
around SGLang's functions, in the schedulers' own processes, take each step apart; medians over all steps that were
plain ones from beginning to end, in milliseconds. Passes differ by chance; what is outside of them is Python and small
operations, which differ by what they do. `step`: from one `run_batch` to the next.
"""

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import wrapt

FOLDER = "RAYSPEC_STEP_PARTS"  # where schedulers write what they have seen
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
    steps: list[dict[str, float]] = []
    begun: list[tuple[float, int]] = []  # the step that goes on: when, and its requests (0: no decode step)

    def clocked(owner: Any, name: str, part: str) -> None:
        function = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[part] += time.perf_counter() - start

        setattr(owner, name, timed)

    def clock_scheduler(module: Any) -> None:
        run_batch = module.Scheduler.run_batch

        def run_and_note(self: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            if begun and begun[0][1]:
                steps.append({"streams": begun[0][1], "step": start - begun[0][0], **spent})
                if len(steps) % 100 == 0:
                    (Path(os.environ[FOLDER]) / f"{os.getpid()}.json").write_text(json.dumps(steps))
            spent.clear()
            begun[:] = [(start, len(batch.reqs) if batch.forward_mode.is_decode() else 0)]
            try:
                return run_batch(self, batch, *arguments, **named)
            finally:
                spent["run_batch"] += time.perf_counter() - start

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
    options = parser.parse_args()
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
        os.environ["PYTHONPATH"] = os.pathsep.join([name, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        engines = [
            Server(stack, options, longest, policy=str(folder / "policy.json")),
            Server(stack, options, 0),
        ]
        for streams in options.streams:
            for block in range(options.blocks):
                for engine in engines:
                    engine.do(timed, asked_in(block, prompts, streams), options.new_tokens + 1)
        seen = [json.loads(file.read_text()) for file in folder.glob("[0-9]*.json")]
        if len(seen) != len(engines):
            parser.error("each engine writes its steps by the hundred: ask for more --new-tokens or --blocks")
        found = {"policy" if any("policy" in s for s in steps) else "plain": summary(steps) for steps in seen}
    head = {"command": " ".join(["python", *sys.argv]), **provenance()}
    write_whole(Path(options.out), json.dumps({**head, "median_ms": found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
