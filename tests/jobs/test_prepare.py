"""Answers by SGLang engines on Ray: the same whichever engine made them, whatever was killed meanwhile."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayspec.training.data.answer_engines import AnswerEnginesConfig, answer_engines
from rayspec.training.data.answers import AnswersConfig, Prompt, TargetName, make_answers, read_answers
from rayspec.training.frozen_target import FrozenTarget

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 900.0
CONFIG = AnswersConfig(count=24, answer_tokens=24, batch_size=3, greedy_share=0.5, seed=5)
SHARDS = 8


def prompts(target: FrozenTarget) -> list[Prompt]:
    texts = [f"def f{n}(a, b):\n    return a *" for n in range(CONFIG.count)]
    return [Prompt(text, target.tokenizer.encode(text)) for text in texts]


def schedulers() -> list[psutil.Process]:
    """The schedulers of the engines that this process has started, found by their titles, the oldest first: one that
    still starts must not be killed for one that answers."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "sglang::scheduler" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return sorted(found, key=psutil.Process.create_time)


@pytest.mark.slow
def test_two_engines_one_of_which_dies_make_what_any_engine_makes(
    tiny_target: FrozenTarget, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In float32; half of the answers are drawn. The second folder is made by whichever engine is up by then."""
    engines = AnswerEnginesConfig(count=2, num_cpus=0.5, num_threads=1, dtype="float32", max_running_requests=3)
    target, asked = TargetName("tiny", tiny_target.sha256), prompts(tiny_target)
    with answer_engines(engines, tiny_target.folder, 96, tiny_target.eos_ids, tmp_path / "logs", 0) as pool:
        killed: list[int] = []

        class Killing:
            """Ends one engine's scheduler once a shard is there, as running out of memory would."""

            def run(self, pieces: Any) -> Any:
                for number, rows in pool.run(pieces):
                    yield number, rows
                    if not killed:
                        process = schedulers()[0]
                        killed.append(process.pid)
                        process.send_signal(signal.SIGKILL)

        make_answers(tmp_path / "a" / "answers", target, CONFIG, asked, Killing())
        make_answers(tmp_path / "b" / "answers", target, CONFIG, asked, pool)
    assert len(killed) == 1
    assert "died and is started again" in caplog.text
    one, other = (read_answers(tmp_path / name / "answers") for name in "ab")
    assert len(one) == CONFIG.count
    assert one.sha256 == other.sha256
    drawn = {tuple(ids.tolist()) for ids, t in zip(one.token_ids_NL, one.temperature_N, strict=True) if t > 0}
    assert len(drawn) == CONFIG.count / 2


class Job:
    def __init__(self, folder: Path, target: Path, texts: Path) -> None:
        sizes = ("count=24", "batch_size=3", "answer_tokens=24", "max_prompt_tokens=32", "follow_up_share=0")
        self.folder = folder
        self.command = [
            *(sys.executable, "jobs/prepare.py", "--config", "configs/train/drafters.yaml"),
            *(f"target={target}", "hidden_states=offline", "engines.max_running_requests=3", "num_threads=1"),
            *(f"{name}.{key}" for name in ("answers", "held_out") for key in (f"prompts={texts}", *sizes)),
            *("held_out.count=3", "engines.num_threads=1", "recipe.bfloat16=false", "engines.dtype=float32"),
        ]
        self.work = folder / "home" / "training" / "tiny"

    def start(self, *extra: str) -> subprocess.Popen[str]:
        own = {"RAYSPEC_HOME": str(self.folder / "home"), "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        return subprocess.Popen(
            [*self.command, *extra], cwd=ROOT, env=os.environ | own, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def stamps(self, pattern: str) -> dict[str, int]:
        return {f.name: f.stat().st_mtime_ns for f in self.work.glob(pattern)}


@pytest.mark.slow
def test_killed_in_the_middle_of_a_shard_it_goes_on_and_makes_nothing_twice(
    tiny_target_folder: Path, text_folder: Path, tmp_path: Path
) -> None:
    job = Job(tmp_path, tiny_target_folder, text_folder)
    planned, _ = (process := job.start("--plan")).communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, planned
    assert "answers: 24 sequences" in planned
    assert f"{SHARDS} of {SHARDS} shards to generate" in planned
    assert "hidden states of last, layer-002, layer-004, layer-005 in" in planned
    assert not (tmp_path / "home").exists()

    process, deadline = job.start(), time.monotonic() + PATIENCE_S
    while len(job.stamps("answers/answers-*.parquet")) < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    below = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    psutil.wait_procs(below, timeout=PATIENCE_S)
    first = job.stamps("answers/answers-*.parquet")
    assert 2 <= len(first) < SHARDS, "in the middle"

    said, _ = (process := job.start()).communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert "answer tokens/s" in said
    second = job.stamps("answers/answers-*.parquet")
    assert len(second) == SHARDS
    assert second.items() >= first.items()
    assert len(job.stamps("hidden_states/*/*.safetensors")) == 4
    rows = read_answers(job.work / "answers")
    assert (len(rows), len({tuple(ids.tolist()) for ids in rows.token_ids_NL})) == (24, 24)

    third, _ = (process := job.start()).communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, third
    assert "starting" not in third
    assert job.stamps("answers/answers-*.parquet") == second


def test_a_negative_number_of_restarts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engines.restarts must be at least 0"):
        replace(AnswerEnginesConfig(), restarts=-1)
