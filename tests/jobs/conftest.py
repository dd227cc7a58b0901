"""The small things that tests of bad inputs break, and the arguments with which a job's plan is in order."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import shared_fixtures  # noqa: F401  (defines kernels so that they can be interpreted, before others import them)
from small_world import World, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> World:
    return make_world(tmp_path_factory.mktemp("world"), tiny_target_folder)


@pytest.fixture
def untouched_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A home folder of the test's own, in which nothing must be begun."""
    home = tmp_path / "home"
    monkeypatch.setenv("RAYSPEC_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    assert not list(home.glob("**/*.db")), "something was begun"
    assert not list(home.glob("sweeps/*")), "something was begun"


@pytest.fixture
def place(tmp_path: Path, world: World) -> Path:
    sizes = "count: 6, batch_size: 4, answer_tokens: 10, max_prompt_tokens: 16, min_prompt_tokens: 8"
    (tmp_path / "train.yaml").write_text(
        "drafters: [{name: full, draft_head: {kind: full}}]\n"
        + "".join(f"{name}: {{prompts: {world.texts}, {sizes}}}\n" for name in ("answers", "held_out"))
        + "recipe: {num_steps: 4, warmup_steps: 1}\n"
    )
    (tmp_path / "calibrate.yaml").write_text(
        f"sources: {{raw: {{kind: raw, documents: {world.texts}}}}}\n"
        "calibrations: [{name: a, source: raw, rule: {kind: frspec, top_k: 8}}]\n"
    )
    lines = [{"id": i, "prompt": f"def f{i}(a, b):"} for i in range(24)]
    (tmp_path / "gate.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path
