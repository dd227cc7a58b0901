"""The sequence of docs/your-model.md as a Ray job, killed with -9 in the middle of each stage and submitted again.

    python docs/experiments/killed.py --home FOLDER --out FILE [--model smollm2-135m]
        [--recipe configs/recipes/smollm2-135m]

On a Ray cluster of its own, on this machine, which outlives the kills. Writes what each attempt was killed in, how long
it ran, what it had added, and whether anything that an earlier attempt had made was made again: shards of prompts and
answers, drafters and calibrations (by the time of their files), training steps and the sweep's blocks (each once).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from ray.job_submission import JobStatus, JobSubmissionClient

from rayspec.provenance import provenance
from rayspec.serving.process import free_port
from rayspec.sweep.record.events import RoundMeasured
from rayspec.sweep.record.folder import sweep_folders
from rayspec.sweep.record.journal import read
from sglang_ext.whole import write_whole

ROOT = Path(__file__).parents[2]
KEPT = ("training/*/*/*.jsonl", "training/*/*/answers-*", "drafters/**/*", "calibrations/**/*")
PATIENCE_S = 1800


def main() -> None:
    options = arguments()
    home = Path(options.home).resolve()
    home.mkdir(parents=True, exist_ok=True)
    stages = {
        "fetch": lambda: bool(list(home.glob("models/.downloads/*"))),
        "answers": lambda: bool(list(home.glob("training/*/answers/answers-*"))),
        "train": lambda: bool(list(home.glob(f"training/*/unfinished/{drafter(options, 'train')}/step-*"))),
        "calibrate": lambda: running(home, "rayspec.cli calibrate"),
        "train_truncated": lambda: bool(
            list(home.glob(f"training/*/unfinished/{drafter(options, 'train_truncated')}/step-*"))
        ),
        "heads": lambda: running(home, "heads.yaml"),
        "sweep": lambda: sum(blocks(home).values()) >= 3,
        "report": lambda: running(home, "rayspec.cli report"),
    }
    attempts: list[dict[str, Any]] = []
    head = {"command": " ".join(["python", *sys.argv]), **provenance()}
    with cluster(home) as address:
        client = JobSubmissionClient(address)
        for stage in (*stages, "none", "none again"):
            before, begin = stamps(home), time.monotonic()
            status = attempt(client, options, home, stages.get(stage))
            made = stamps(home)
            attempts.append(
                {
                    "killed_in": stage,
                    "ended": status,
                    "seconds": round(time.monotonic() - begin, 1),
                    "files_added": sorted(made.keys() - before.keys()),
                    "files_made_again": sorted(f for f in before if made.get(f) != before[f]),
                }
            )
            print(json.dumps(attempts[-1] | {"files_added": len(attempts[-1]["files_added"])}), flush=True)
    found = {
        **head,
        "recipe": options.recipe,
        "attempts": attempts,
        "steps_in_histories": {
            f.parent.name: steps(f)
            for f in home.glob("drafters/*/*/training.json")
            if not (f.parent / "packed.json").exists()
        },
        "times_each_block_was_measured": sorted(set(blocks(home).values())),
    }
    write_whole(Path(options.out), json.dumps(found, indent=1) + "\n")


def arguments() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--recipe", default="configs/recipes/smollm2-135m")
    return parser.parse_args()


@contextmanager
def cluster(home: Path) -> Iterator[str]:
    """A head of its own on the loopback address; the address of its dashboard."""
    ray, port, dashboard = Path(sys.executable).parent / "ray", free_port(), free_port()
    started = subprocess.Popen(
        [ray, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2",
         "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--disable-usage-stats"],
        stdout=(home / "ray.log").open("w"), stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{dashboard}"
        wait_until(lambda: answers(address), 120)
        yield address
    finally:
        for process in psutil.Process(started.pid).children(recursive=True):
            with suppress(psutil.Error):
                process.terminate()
        started.terminate()
        started.wait(60)


def answers(address: str) -> bool:
    try:
        JobSubmissionClient(address)
    except (ConnectionError, RuntimeError):
        return False
    return True


def attempt(client: JobSubmissionClient, options: Any, home: Path, kill_when: Callable[[], bool] | None) -> str:
    """Submit; where asked, kill -9 of all that the job's shell runs; how the job ended."""
    own = {"RAYSPEC_HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    own["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
    entrypoint = f"cd {ROOT} && python jobs/recipe.py {options.model} {options.recipe} rehearsal"
    job = client.submit_job(entrypoint=entrypoint, runtime_env={"env_vars": own})
    if kill_when:
        wait_until(lambda: kill_when() or client.get_job_status(job).is_terminal(), PATIENCE_S)
        for group in {os.getpgid(process.pid) for process in running(home, "jobs/recipe.py")}:
            os.killpg(group, signal.SIGKILL)
    wait_until(lambda: client.get_job_status(job).is_terminal(), PATIENCE_S)
    (home / f"job-{len(list(home.glob('job-*.log')))}.log").write_text(client.get_job_logs(job))
    wait_until(lambda: not running(home, "rayspec.cli"), 120)
    status: JobStatus = client.get_job_status(job)
    return f"{status.value}: {(client.get_job_info(job).message or '')[:200]}"


def wait_until(is_so: Callable[[], Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"not so after {seconds} s")
        time.sleep(0.05)


def running(home: Path, words: str) -> list[psutil.Process]:
    """Processes that work in this home and whose command line has these words."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if words in " ".join(process.cmdline()) and process.environ().get("RAYSPEC_HOME") == str(home):
                found.append(process)
    return found


def stamps(home: Path) -> dict[str, int]:
    files = (f for glob in KEPT for f in home.glob(glob) if f.is_file() and f.suffix != ".log")
    return {str(f.relative_to(home)): f.stat().st_mtime_ns for f in files}


def steps(file: Path) -> str:
    """Which steps the history of a training has: `1..N, each once`, or what is wrong."""
    found = [entry["step"] for entry in json.loads(file.read_text())["history"]]
    return f"1..{len(found)}, each once" if found == list(range(1, len(found) + 1)) else f"not so: {found}"


def blocks(home: Path) -> Counter[Any]:
    """How often each block of each trial was measured."""
    found: Counter[Any] = Counter()
    for folder in sweep_folders(home):
        for event in read(folder.journal):
            if isinstance(event, RoundMeasured):
                found.update({(folder.id, trial, event.index): 1 for trial in event.blocks})
    return found


def drafter(options: Any, name: str) -> str:
    """That the recipe's file trains."""
    return yaml.safe_load((ROOT / options.recipe / f"{name}.yaml").read_text())["drafters"][0]["name"]


if __name__ == "__main__":
    main()
