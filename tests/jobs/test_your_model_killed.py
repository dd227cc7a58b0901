"""The job of docs/your-model.md, killed in the middle of stages and run again: nothing is made twice.

On the tests' tiny target, with a recipe of its size: real Ray, real SGLang, a real MLflow store.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from mlflow import MlflowClient
from sweeps import PATIENCE_S, ROOT, title_of

from rayspec.commands.report import main as report
from rayspec.sweep.record.events import RoundMeasured
from rayspec.sweep.record.folder import sweep_folders
from rayspec.sweep.record.journal import read

pytestmark = pytest.mark.slow
NAME, PROMPTS, PASSES, SHARDS, STEPS = "toy-model", 4, 12, 16, 120
TRIALS = {"plain-c1", "full-trained-s2-c1", "vocabtrim-129-s2-c1"}


def write_recipe(folder: Path, target: Path, texts: Path) -> None:
    sizes = {"prompts": str(texts), "answer_tokens": 10, "max_prompt_tokens": 40}
    training = {
        "target": str(target),
        "answers": {**sizes, "count": 2 * SHARDS, "batch_size": 2},
        "held_out": {**sizes, "count": 4, "batch_size": 4},
        "engines": {"max_running_requests": 4},
        "recipe": {"num_steps": STEPS, "warmup_steps": 1, "batch_size": 3},
        "evaluation": {"every": STEPS, "draft_steps": 3, "served_prompts": 0},
        "checkpoint_every": 5,
        "log_every": 1,
    }
    source = {"kind": "target"}
    rule = {"kind": "vocabtrim", "top_k": 129}
    head = {"kind": "truncated", "size": 129}
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": f"def f{i}("}) + "\n" for i in range(PROMPTS)))
    files = {
        "train": training | {"drafters": [{"name": "full-trained", "draft_head": {"kind": "full"}}]},
        "calibrate": {
            "target": str(target),
            "sources": {"target": source},
            "calibrations": [{"name": "vocabtrim-129", "source": "target", "rule": rule}],
        },
        "train_truncated": training
        | {"drafters": [{"name": "vocabtrim-t-129", "artifacts": "vocabtrim-129", "draft_head": head}]},
        "heads": training
        | {
            "drafters": [
                {"name": "vocabtrim-129", "base": "full-trained", "artifacts": "vocabtrim-129", "draft_head": head}
            ]
        },
        "sweep": {
            "target": str(target),
            "drafters": ["full-trained", "vocabtrim-129"],
            "baseline": "full-trained",
            "draft_steps": [2],
            "workload": f"{folder}/prompts.jsonl",
            "block_prompts": 1,
            "repeats": PASSES,
            "max_new_tokens": 16,
            "head_latency": False,
            "engine": {"max_total_tokens": 2048, "num_threads": 1},
        },
    }
    for name, config in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))


class Job:
    def __init__(self, home: Path, target: Path, recipe: Path) -> None:
        self.home = home
        self.command = [sys.executable, "jobs/recipe.py", str(target), str(recipe), NAME]
        self.log = home.parent / "output.log"

    def start(self) -> None:
        own = {"RAYSPEC_HOME": str(self.home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        own["PYTHONPATH"] = f"{ROOT}:{ROOT / 'kernels'}"
        inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=inherited | own, stdout=log, stderr=log, start_new_session=True
            )

    def kill_when(self, what: str, is_so: Callable[[], bool]) -> None:
        """kill -9 of the job and of the command that it runs; returns when the command's workers have ended too."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert self.process.poll() is None, f"ended before {what}: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"not {what}: {self.log.read_text()}"
            time.sleep(0.02)
        below = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.wait() == -signal.SIGKILL
        _, left = psutil.wait_procs([p for p in below if title_of(p).startswith("ray::")], timeout=PATIENCE_S)
        assert left == [], "workers outlive their driver"

    def stamps(self) -> dict[Path, int]:
        """When each file was last written that a stage leaves for good."""
        kept = ("training/*/*/answers-*.parquet", "drafters/**/*", "calibrations/**/*")
        return {f: f.stat().st_mtime_ns for glob in kept for f in self.home.glob(glob) if f.is_file()}


def test_killed_in_three_stages_it_makes_nothing_twice(
    tiny_target_folder: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "recipe").mkdir()
    write_recipe(tmp_path / "recipe", tiny_target_folder, text_folder)
    job = Job(tmp_path / "home", tiny_target_folder, tmp_path / "recipe")
    work = job.home / "training" / "tiny"

    job.start()
    job.kill_when("answers are made", lambda: any(work.glob("answers/answers-*.parquet")))
    shards = job.stamps()
    assert 1 <= len([f for f in shards if f.parent.name == "answers"]) < SHARDS, "in the middle"

    job.start()
    job.kill_when("a drafter is trained", lambda: any(work.glob("unfinished/full-trained/step-*")))
    assert not (job.home / "drafters" / "tiny" / "full-trained").exists(), "in the middle"
    trained = job.stamps()
    assert trained.items() >= shards.items()
    assert len([f for f in trained if f.parent.name == "answers"]) == SHARDS

    job.start()
    job.kill_when("a sweep measures", lambda: rounds(job) >= 3)
    assert rounds(job) < PROMPTS * PASSES, "in the middle"
    made = job.stamps()
    assert made.items() >= trained.items()
    history = json.loads((job.home / "drafters" / "tiny" / "full-trained" / "training.json").read_text())["history"]
    assert [entry["step"] for entry in history] == list(range(1, STEPS + 1)), "each step once"

    job.start()
    status = job.process.wait(timeout=PATIENCE_S)
    (folder,) = sweep_folders(job.home)
    assert folder.is_ended, job.log.read_text()
    measured = Counter(n for e in read(folder.journal) if isinstance(e, RoundMeasured) for n in e.blocks)
    assert measured == dict.fromkeys(TRIALS, PROMPTS * PASSES)
    assert job.stamps() == made
    assert status == 1, "random weights speed nothing up, so that the last step refuses to promote"
    assert "refused: no candidate is clearly faster than plain decoding" in job.log.read_text()

    journal = folder.journal.read_bytes()
    job.start()
    assert job.process.wait(timeout=PATIENCE_S) == 1
    assert f"{folder.id} has ended with these settings: nothing to measure" in job.log.read_text()
    assert (job.stamps(), folder.journal.read_bytes()) == (made, journal)
    promotion = ["--sweep", NAME, "--promote", "--force", "--once", "--model", NAME]
    assert [report(promotion), report(promotion)] == [0, 0]
    client = MlflowClient(f"sqlite:///{job.home}/mlflow.db")
    assert [str(v.version) for v in client.search_model_versions(f"name='{NAME}'")] == ["1"]


def rounds(job: Job) -> int:
    return sum(isinstance(e, RoundMeasured) for f in sweep_folders(job.home) for e in read(f.journal))
