"""Workers of Ray Train against one process: real workers, gloo, a small target."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from answerers import InTurn, answerer, as_prompts, name_of
from mlflow import MlflowClient
from ray import train
from ray.train.torch import TorchTrainer
from torch import Tensor

from rayspec.farm.actor import cluster
from rayspec.farm.processes import environment
from rayspec.training.data.answers import AnswersConfig, make_answers, read_answers
from rayspec.training.data.asking import Request
from rayspec.training.drafter import _check_same_start, train_drafter
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig, WorkersConfig
from rayspec.training.drafter_runs import train_all
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.group import Group
from rayspec.training.prepare import prepare, work_folder_of_our_own
from rayspec.training.ray_train import WorkersFailed, _unseen, log_file, train_by_workers
from rayspec.training.recipe import Recipe
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.heads import parse_head

SLIM = DrafterEntry(name="slim", draft_head=parse_head({"kind": "slimspec", "rank": 8}))
# AdamW: Muon's steps round in bfloat16, where a last digit of a gradient becomes a hundredth of a step
RECIPE = Recipe(
    num_steps=6, batch_size=5, warmup_steps=2, ttt_steps=3, bfloat16=False, chunk_rows=16, optimizer="adamw"
)
TWO = WorkersConfig(count=2)
ANSWERS = AnswersConfig(
    count=10, min_prompt_tokens=8, max_prompt_tokens=20, answer_tokens=14, batch_size=10, greedy_share=0.5
)


@pytest.fixture(scope="module")
def data(tiny_target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder with answers, cut to 6 to 14 tokens, so that workers have unequal numbers of rows."""
    folder = tmp_path_factory.mktemp("workers") / "work"
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 257, (8 + n,), generator=generator).tolist() for n in range(10)]
    whole = answerer(tiny_target).answer

    def answer(requests: Sequence[Request]) -> list[list[int]]:
        answers = zip(requests, whole(requests), strict=True)
        return [ids[: 6 + len(request.prompt_ids) % 9] for request, ids in answers]

    for name in ("answers", "held_out"):
        make_answers(folder / name, name_of(tiny_target), ANSWERS, as_prompts(prompts), InTurn(answer))
    lengths = read_answers(folder / "answers").loss_mask_NL.sum(dim=1)
    assert len(set(lengths.tolist())) > 5
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module", autouse=True)
def ray_cluster(home: Path) -> Iterator[None]:
    """One for all tests; its workers have the environment of its start."""
    with environment({"RAYSPEC_HOME": str(home)}), cluster(None, min_cpus=2):
        yield


def config_of(data: Path, target: FrozenTarget, folder: Path, **changes: Any) -> DrafterTrainConfig:
    work = folder / "work"
    work.mkdir(parents=True)
    for name in ("answers", "held_out"):
        (work / name).symlink_to(data / name)
    base = DrafterTrainConfig(
        target=target.folder,
        output_dir=str(folder / "out"),
        work_dir=str(work),
        answers=ANSWERS,
        held_out=ANSWERS,
        drafters=[SLIM],
        recipe=RECIPE,
        evaluation=EvaluationConfig(draft_steps=3, every=3, sequences=2, served_prompts=0),
        checkpoint_every=2,
        log_every=1,
        mlflow=False,
    )
    return replace(base, **changes)


def train_here(config: DrafterTrainConfig, target: FrozenTarget) -> dict[str, Any]:
    answers, held_out = (read_answers(config.work_folder / name) for name in ("answers", "held_out"))
    train_drafter(config, SLIM, target, answers, held_out)
    return report_of(config)


def report_of(config: DrafterTrainConfig) -> dict[str, Any]:
    return json.loads((config.output_folder / "slim" / "training.json").read_text())


def weights_of(config: DrafterTrainConfig) -> dict[str, Tensor]:
    return load_drafter(config.output_folder / "slim")[0].state_dict()


def losses(report: dict[str, Any]) -> Tensor:
    return torch.tensor([[entry[f"loss_step_{i}"] for i in range(3)] for entry in report["history"]])


def check_same_training(one: DrafterTrainConfig, other: DrafterTrainConfig) -> None:
    """Sums of another order: float32's rounding, and of the exported weights one of bfloat16's last digits, which are
    at most 2^-7 of a value."""
    a, b = report_of(one), report_of(other)
    assert [entry["step"] for entry in a["history"]] == [entry["step"] for entry in b["history"]]
    torch.testing.assert_close(losses(a), losses(b), rtol=1e-5, atol=1e-5)
    assert [entry["grad_norm"] for entry in a["history"]] == pytest.approx(
        [entry["grad_norm"] for entry in b["history"]], rel=1e-4
    )
    found = weights_of(other)
    for name, tensor in weights_of(one).items():
        torch.testing.assert_close(tensor, found[name], rtol=2**-7, atol=1e-4, msg=name)


@pytest.fixture(scope="module")
def by_two(data: Path, tiny_target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> DrafterTrainConfig:
    """Trained by two workers. Five sequences an update, so that their parts of it are unequal."""
    config = config_of(data, tiny_target, tmp_path_factory.mktemp("by_two"), workers=TWO)
    on_ctrl_c = signal.getsignal(signal.SIGINT)
    acceptance = train_all(config)["slim"]
    assert signal.getsignal(signal.SIGINT) is on_ctrl_c  # Ray has one of its own, which would exit with 0
    assert acceptance is not None
    assert acceptance.tau == report_of(config)["held_out"]["tau"]
    assert train_all(config) == {"slim": None}, "it is exported, and not trained again"
    return config


def test_two_workers_train_what_one_process_trains(
    data: Path, tiny_target: FrozenTarget, by_two: DrafterTrainConfig, tmp_path: Path
) -> None:
    alone = config_of(data, tiny_target, tmp_path / "alone")
    train_here(alone, tiny_target)
    check_same_training(alone, by_two)
    assert "slim: 100%" in log_file(by_two, SLIM).read_text()
    found = losses(report_of(by_two))
    assert bool((found[-1] != found[0]).all()), "it trained"


@pytest.mark.slow
def test_workers_elsewhere_store_the_states_and_train(
    data: Path, tiny_target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their current folder is another one than that in which the paths were meant, and so are home and MLflow's store;
    the target runs on them alone."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_target.folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYSPEC_HOME", "own-home")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///own.db")
    config = config_of(data, tiny_target, tmp_path, workers=TWO, hidden_states="offline", mlflow=True)
    config = replace(config, target="models/tiny", output_dir="out", work_dir="work")

    def refused(*_: Any) -> None:
        raise AssertionError("the process that started the workers computes nothing")

    with monkeypatch.context() as patch:
        for name in ("features", "last_hidden"):
            patch.setattr(FrozenTarget, name, refused)
        assert train_all(config)["slim"] is not None
    assert config.target_name == "tiny"
    stored = sorted(file.parent.name for file in (tmp_path / "work" / "hidden_states").rglob("last-*.safetensors"))
    assert stored == ["answers", "held_out"]
    assert "hidden states: answers: 100%" in (tmp_path / "work" / "logs" / "hidden-states.log").read_text()
    assert (tmp_path / "out" / "slim" / "model.safetensors").is_file()
    assert len(MlflowClient("sqlite:///own.db").search_experiments(filter_string="name = 'rayspec-drafters'")) == 1


def test_what_a_worker_does_not_see_is_named(data: Path, tiny_target: FrozenTarget, tmp_path: Path) -> None:
    config = config_of(data, tiny_target, tmp_path)
    config.output_folder.mkdir()
    assert _unseen(config, 1) is None
    for name in ("work_dir", "output_dir"):
        text = _unseen(replace(config, **{name: "/nowhere"}), 1)
        assert text is not None
        assert re.match(
            rf"worker 1 on \S+: {name}=/nowhere is not there; .* a file system that their machines sh", text
        )
    assert "there is no model at /nowhere" in (_unseen(replace(config, target="/nowhere"), 1) or "")


HOLD = """
import sys
from rayspec.lock import held
with held(sys.argv[1], Exception):
    print(1, flush=True)
    input()
"""


def test_a_second_run_in_a_work_folder_is_refused(data: Path, tiny_target: FrozenTarget, tmp_path: Path) -> None:
    """And none is once the first has ended, by a kill, too: only its file is left then."""
    config = config_of(data, tiny_target, tmp_path)
    with work_folder_of_our_own(config):
        before = sorted(tmp_path.rglob("*"))
        for run in (train_all, prepare):
            with pytest.raises(
                ValueError, match=rf"work_dir=\S+ is in use by .* \(process {os.getpid()}\); wait for it"
            ):
                run(config)
        assert sorted(tmp_path.rglob("*")) == before
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(config.work_folder / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"1\n"
    with pytest.raises(ValueError, match=rf"\(process {other.pid}\)"):
        prepare(config)
    other.kill()
    other.wait()
    prepare(config)


@pytest.mark.slow
def test_a_target_whose_layers_are_shared_out_is_the_same(
    data: Path, tiny_target: FrozenTarget, by_two: DrafterTrainConfig, tmp_path: Path
) -> None:
    """Bit for bit: a layer is put together before it computes."""
    shared = config_of(data, tiny_target, tmp_path, workers=replace(TWO, shard_target=True))
    train_by_workers(shared, SLIM, tiny_target.sha256)
    check_equal(shared, by_two)
    assert report_of(shared)["held_out"] == report_of(by_two)["held_out"]


@pytest.mark.slow
def test_one_worker_of_ray_is_this_process(data: Path, tiny_target: FrozenTarget, tmp_path: Path) -> None:
    alone = config_of(data, tiny_target, tmp_path / "alone", recipe=replace(RECIPE, optimizer="muon", bfloat16=True))
    train_here(alone, FrozenTarget.load(tiny_target.folder, torch.bfloat16))
    one = replace(config_of(data, tiny_target, tmp_path / "one", workers=WorkersConfig()), recipe=alone.recipe)
    train_by_workers(one, SLIM, tiny_target.sha256)
    check_equal(alone, one)


def check_equal(one: DrafterTrainConfig, other: DrafterTrainConfig) -> None:
    assert torch.equal(losses(report_of(one)), losses(report_of(other)))
    found = weights_of(other)
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights_of(one).items())


def kill_one(config: DrafterTrainConfig, is_writer: bool, killed: list[int]) -> None:
    """End the worker that writes, or the other one, once there is a checkpoint."""
    log = str(log_file(config, SLIM))
    while not list((config.work_folder / "unfinished" / "slim").glob("step-*")):
        time.sleep(0.02)
    workers = [p for p in psutil.Process().children(recursive=True) if "RayTrainWorker" in " ".join(p.cmdline())]
    assert len(workers) == 2, workers
    writes = {p: any(file.path == log for file in p.open_files()) for p in workers}
    (chosen,) = [p for p, does in writes.items() if does == is_writer]
    chosen.send_signal(signal.SIGKILL)
    killed.append(chosen.pid)


@pytest.mark.slow
def test_a_training_ends_as_if_no_worker_had_died(
    data: Path, tiny_target: FrozenTarget, home: Path, tmp_path: Path
) -> None:
    """Once with the worker that writes killed, once with the other one; each time one MLflow run, whole."""
    recipe = replace(RECIPE, num_steps=150)
    changes = {"recipe": recipe, "checkpoint_every": 10, "evaluation": EvaluationConfig(draft_steps=3, every=100)}
    whole = config_of(data, tiny_target, tmp_path / "whole", workers=TWO, **changes)
    train_by_workers(whole, SLIM, tiny_target.sha256)
    for is_writer in (True, False):
        folder = tmp_path / str(is_writer)
        cut = config_of(data, tiny_target, folder, workers=TWO, mlflow=True, **changes)
        killed: list[int] = []
        killer = threading.Thread(target=kill_one, args=(cut, is_writer, killed), daemon=True)
        killer.start()
        train_by_workers(cut, SLIM, tiny_target.sha256)
        killer.join(timeout=10)
        assert len(killed) == 1
        assert log_file(cut, SLIM).read_text().count("slim:   0%") == 1, "the second attempt did not begin anew"
        check_equal(whole, cut)
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "rayspec-drafters"]
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] * 2
    for run in runs:
        steps = {metric.step for metric in client.get_metric_history(run.info.run_id, "loss")}
        assert steps == set(range(1, 151))


@pytest.mark.slow
def test_workers_that_do_not_see_one_checkpoint_are_refused(tmp_path: Path) -> None:
    """As where each machine has a work folder of its own."""

    def start_apart() -> None:
        group = Group.joined()
        _check_same_start(100 * group.rank, Path("unfinished"), group, torch.device("cpu"))

    trainer = TorchTrainer(
        start_apart,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=str(tmp_path)),
    )
    with pytest.raises(
        train.TrainingFailedError, match=r"worker 1 finds .* at step 100, the first worker at 0; set work"
    ):
        trainer.fit()


@pytest.mark.slow
def test_what_fails_on_every_worker_names_the_cause(data: Path, tiny_target: FrozenTarget, tmp_path: Path) -> None:
    config = config_of(data, tiny_target, tmp_path / "none", workers=replace(TWO, max_failures=0))
    (config.work_folder / "answers").unlink()
    with pytest.raises(WorkersFailed, match="no answers in") as caught:
        train_by_workers(config, SLIM, tiny_target.sha256)
    assert "max_failures" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    # not tried again, however many attempts there are: it would be met again
    gone = replace(
        config_of(data, tiny_target, tmp_path / "gone", workers=replace(TWO, max_failures=5)), target="/nowhere"
    )
    with pytest.raises(ValueError, match=r"worker 0 on \S+: target is '/nowhere', but there is no model"):
        train_by_workers(gone, SLIM, tiny_target.sha256)
    wild = replace(RECIPE, lr=1e30, clip_norm=1e30, warmup_steps=0)
    config = config_of(data, tiny_target, tmp_path / "wild", workers=replace(TWO, max_failures=5), recipe=wild)
    with pytest.raises(FloatingPointError, match="gradient norm is"):
        train_by_workers(config, SLIM, tiny_target.sha256)
    assert log_file(config, SLIM).read_text().count("slim:   0%") == 1
