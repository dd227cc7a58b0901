import json
from pathlib import Path

import pytest
from hostile import ask
from mlflow import MlflowClient

from rayspec.config import load_config
from rayspec.farm.actor import cluster
from rayspec.training.drafter_config import DrafterTrainConfig
from sglang_ext.drafters.checkpoint import load_drafter

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "train" / "drafters.yaml"
HEADS = "drafters=[{name: slim, draft_head: {kind: slimspec, rank: 8}}]"


def arguments(target: Path, texts: Path, folder: Path) -> list[str]:
    return [
        "--config",
        str(CONFIG),
        f"target={target}",
        f"output_dir={folder / 'out'}",
        HEADS,
        *(f"{name}.prompts={texts}" for name in ("answers", "held_out")),
        *(
            f"{name}.{key}"
            for name in ("answers", "held_out")
            for key in ("count=6", "batch_size=4", "answer_tokens=10", "max_prompt_tokens=40", "follow_up_share=0")
        ),
        "engines.max_running_requests=4",
        "recipe.num_steps=4",
        "recipe.warmup_steps=1",
        "recipe.batch_size=3",
        "evaluation.every=2",
        "evaluation.draft_steps=3",
        "evaluation.served_prompts=2",
        "log_every=1",
    ]


def test_shipped_config_loads_and_its_heads_differ_in_the_head_alone() -> None:
    config = load_config(DrafterTrainConfig, CONFIG)
    assert [head.name for head in config.drafters] == [
        "full",
        "slimspec-r72",
        "slimspec-r144",
        "slimspec-r288",
        "full-trained",
    ]
    assert config.answers.prompts == config.held_out.prompts == "self"
    assert config.held_out.greedy_share == 1.0


def test_shipped_configs_share_their_answers() -> None:
    """A home folder has one set of a target: what one config makes, the next one uses. Others lie elsewhere."""
    configs = {file.stem: load_config(DrafterTrainConfig, file) for file in sorted(CONFIG.parent.glob("*.yaml"))}
    sharing = [config for config in configs.values() if config.work_dir is None]
    assert len(sharing) > 5
    assert len({repr((config.answers, config.held_out)) for config in sharing}) == 1
    assert [name for name, config in configs.items() if config.work_dir is not None] == ["many_openings", "users"]


def test_unknown_key_names_the_key_and_the_known_ones() -> None:
    with pytest.raises(ValueError, match="ttt_step") as caught:
        load_config(DrafterTrainConfig, CONFIG, ["recipe.ttt_step=3"])
    assert "ttt_steps" in str(caught.value)


def test_end_to_end_then_rerun_then_refusal(
    tiny_target_folder: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, with one cluster for the engines that answer and for the one that serves."""
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settings = arguments(tiny_target_folder, text_folder, tmp_path)
    planned = ask("train", *settings, "--plan")
    assert planned.code == 0, planned
    assert "2 of 2 shards to generate" in planned.out
    assert "to train" in planned.out
    assert not (tmp_path / "home").exists()

    with cluster(None):
        trained = ask("train", *settings, patience_s=1500)
    assert trained.code == 0, trained
    assert trained.out.count("tau in SGLang") == 1
    folder = tmp_path / "out" / "slim"
    _, info = load_drafter(folder)
    assert info.head.spec()["kind"] == "slimspec"
    assert info.target is not None
    assert info.target.name == "tiny"
    report = json.loads((folder / "training.json").read_text())
    assert [entry["step"] for entry in report["evaluations"]] == [2, 4]
    files = {"config.json", "model.safetensors", "training.json", "training.png"}
    assert {path.name for path in folder.iterdir()} == files
    client = MlflowClient(f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "rayspec-drafters"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("slim", "FINISHED")
    assert run.data.params["recipe.num_steps"] == "4"
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 4
    assert len(client.get_metric_history(run.info.run_id, "held_out.tau_3")) == 2

    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    again = ask("train", *settings)
    assert again.code == 0, again
    assert again.out.count("already exported") >= 1
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}

    other = ask("train", *settings, "recipe.lr=0.5")
    assert other.is_refusal, other
    assert "holds a drafter with recipe" in other.err
