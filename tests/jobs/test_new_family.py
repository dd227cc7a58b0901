"""A drafter family that the project knows nothing of: trained, served and swept from a folder of its own."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from answerers import answer_in_process
from fixture_models import DRAFTERS, TARGET, drafters_setting, prompt_texts, sweep_settings
from mlflow import MlflowClient

from rayspec.training.data.answers import AnswersConfig
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters import families

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "__init__.py": '"""Draft positions from one matrix each."""',
    "config.py": """
        from dataclasses import dataclass
        from typing import ClassVar

        from sglang_ext.drafters.base import DrafterOptions
        from sglang_ext.drafters.shared.last_hidden.config import LastHiddenConfig, LastHiddenOptions


        @dataclass(frozen=True, kw_only=True, repr=False)
        class Options(LastHiddenOptions):
            kind: ClassVar[str] = "plain_matrices"
            bias: bool = False


        @dataclass(frozen=True, kw_only=True)
        class Config(Options, LastHiddenConfig):
            Options: ClassVar[type[DrafterOptions]] = Options
            architecture: ClassVar[str] = "PlainMatrices"
            takes_trees: ClassVar[str] = "which is served as a chain"
        """,
    "module.py": """
        import torch
        from torch import nn

        from sglang_ext.drafters.shared.last_hidden.module import LastHiddenDrafter


        class Drafter(LastHiddenDrafter):
            reads_path = False

            def __init__(self, config, head, draft_tree=None):
                super().__init__(config, head, draft_tree)
                H = config.hidden_size
                self.maps = nn.ModuleList(nn.Linear(H, H, bias=config.bias) for _ in range(config.positions))

            def parts(self, step):
                return [self.maps[step]]

            def state(self, step, hidden_TH, path_TdH):
                return hidden_TH + self.maps[step](hidden_TH)
        """,
    "training.py": """
        from plain_matrices.config import Config
        from sglang_ext.drafters.shared.last_hidden.training import draft_steps, head_rows, init_body, roll_out


        def config_for(target, options, recipe=None):
            return Config.from_options(options, target.sizes())
        """,
    "cost.py": "from sglang_ext.drafters.shared.last_hidden.cost import count",
    "serving.py": """
        from sglang_ext.drafters.shared.last_hidden.serving import served_by

        SERVING = served_by(chain="PLAIN_MATRICES", trees={})
        """,
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a process that finds the family among the installed distributions."""
    package, distribution = tmp_path / "site" / "plain_matrices", tmp_path / "site" / "plain_matrices-0.1.dist-info"
    for folder in (package, distribution):
        folder.mkdir(parents=True)
    for name, text in FILES.items():
        (package / name).write_text(dedent(text))
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-matrices\nVersion: 0.1\n")
    (distribution / "entry_points.txt").write_text("[rayspec.drafters]\nplain_matrices = plain_matrices\n")
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "RAYSPEC_HOME": str(tmp_path / "home")}
    return {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "RAY_"))} | own


@pytest.mark.engine
@pytest.mark.parametrize("sweeps", ["planned", pytest.param("measured", marks=pytest.mark.slow)])
def test_it_is_trained_served_and_swept(environment: dict[str, str], sweeps: str, tmp_path: Path) -> None:
    assert "plain_matrices" not in families()
    work, settings = answer(tmp_path / "work")
    run = partial(job, environment)
    entry = "{name: new, draft_head: {kind: slimspec, rank: 16}, drafter: {kind: plain_matrices, positions: 2}}"
    trained = run(
        "train",
        *(f"drafters=[{entry}]", f"output_dir={tmp_path}", f"work_dir={work}", "mlflow=false", *settings),
        *("recipe.num_steps=2", "recipe.batch_size=2", "recipe.warmup_steps=1", "evaluation.draft_steps=2"),
        "evaluation.served_prompts=2",
    )
    assert "new: tau in SGLang " in trained
    assert json.loads((tmp_path / "new" / "config.json").read_text())["architectures"] == ["PlainMatrices"]
    printed = run(
        "sweep",
        *(s for s in sweep_settings(2) if not s.startswith(("target=", "drafters="))),
        *(drafters_setting(DRAFTERS["full"], tmp_path / "new"), "draft_steps=[2]", "max_new_tokens=12"),
        *("head_latency=false", "engine.max_total_tokens=4096", "engine.num_threads=1"),
        *(["--plan"] if sweeps == "planned" else []),
    )
    if sweeps == "planned":
        assert "new-s2-c1" in printed
        return
    client = MlflowClient(f"sqlite:///{tmp_path / 'home'}/mlflow.db")
    (experiment,) = (e for e in client.search_experiments() if e.name == "rayspec-sweep")
    runs = {r.info.run_name: r for r in client.search_runs([experiment.experiment_id])}
    measured = runs["new-s2-c1"].data.metrics
    assert measured["valid/output_mismatches"] == 0
    assert measured["work/gflops_per_token"] > 0


def answer(folder: Path) -> tuple[Path, list[str]]:
    """Answers to train on in a new folder, and the settings that they were made with."""
    target = FrozenTarget.load(TARGET, torch.float32)
    config = AnswersConfig(prompts="held_out", count=2, answer_tokens=12, greedy_share=1.0, batch_size=2)
    ids = [target.tokenizer(text).input_ids[:16] for text in prompt_texts(2)]
    settings = []
    for name in ("answers", "held_out"):
        answer_in_process(folder / name, target, config, ids)
        settings += [f"{name}.{key}={value}" for key, value in asdict(config).items()]
    return folder, settings


def job(environment: dict[str, str], name: str, *arguments: str) -> str:
    command = [sys.executable, f"jobs/{name}.py", f"target={TARGET}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
