"""Drafters without the rows that the target has: packed, put together again bit for bit, found by name."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rayspec import shipped
from rayspec.commands.sweep import main as sweep
from rayspec.packing import pack, unpack
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.drafters.eagle3.config import Eagle3Options
from sglang_ext.drafters.eagle3.training import config_for
from sglang_ext.folder_kinds import PACKED, WEIGHTS
from sglang_ext.heads import head_from_target, parse_head

IDS = torch.tensor([0, 7, 3, 250, 11, 64])
HEADS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "truncated": {"kind": "truncated", "size": 5},
    "slimspec": {"kind": "slimspec", "rank": 4},
}


def in_bfloat16(source: Path, folder: Path, scale: float = 1.0) -> Path:
    """A copy of a target with weights as published models have them."""
    shutil.copytree(source, folder)
    model = FrozenTarget.load(source, torch.bfloat16).model
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(scale)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return FrozenTarget.load(in_bfloat16(tiny_target_folder, tmp_path_factory.mktemp("models") / "tiny"), torch.float32)


@pytest.fixture(scope="module")
def drafters(target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each head; the truncated one shares its body with the full one."""
    folder = tmp_path_factory.mktemp("drafters")
    torch.manual_seed(0)
    body: dict[str, torch.Tensor] | None = None
    for name, spec in HEADS.items():
        head = head_from_target(parse_head(spec), target.head_VG, {"ids": IDS})
        drafter = Eagle3Drafter(config_for(target, Eagle3Options()), head)
        if body is None:
            body = {n: t for n, t in drafter.state_dict().items() if not n.startswith("lm_head.")}
        drafter.load_state_dict(body, strict=False)
        save_drafter(folder / name, drafter, target.info(), share_with=folder / "full" if name == "truncated" else None)
    return folder


@pytest.mark.parametrize("name", HEADS)
def test_a_packed_drafter_comes_out_as_it_was(name: str, drafters: Path, target: FrozenTarget, tmp_path: Path) -> None:
    packed, again = tmp_path / "packed" / name, tmp_path / "again" / name
    pack(drafters / name, packed, Path(target.folder))
    stored = set(load_file(packed / WEIGHTS))
    assert "lm_head.weight" not in stored, "those of slimspec have other names"
    unpack(packed, again, Path(target.folder))
    for file in (drafters / name).iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_another_target_is_refused_and_leaves_nothing(drafters: Path, target: FrozenTarget, tmp_path: Path) -> None:
    pack(drafters / "full", tmp_path / "packed" / "full", Path(target.folder))
    other = in_bfloat16(Path(target.folder), tmp_path / "other", scale=2.0)
    with pytest.raises(ValueError, match=r"the target .*other is another one, or a file is damaged"):
        unpack(tmp_path / "packed" / "full", tmp_path / "again" / "full", other)
    assert not list((tmp_path / "again").iterdir())


def test_a_trained_head_is_kept_whole(drafters: Path, target: FrozenTarget, tmp_path: Path) -> None:
    """Rows that differ from the target's in one number are no rows of the target's."""
    drafter, info = load_drafter(drafters / "full")
    with torch.no_grad():
        drafter.lm_head.get_parameter("weight")[3, 2] += 1
    assert info.target is not None
    save_drafter(tmp_path / "trained", drafter, info.target)
    pack(tmp_path / "trained", tmp_path / "packed", Path(target.folder))
    assert "lm_head.weight" in load_file(tmp_path / "packed" / WEIGHTS)


@pytest.fixture
def home(drafters: Path, target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, where all the drafters ship."""
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(shipped, "ASSETS", tmp_path / "assets")
    for name in HEADS:
        pack(drafters / name, tmp_path / "assets" / "drafters" / "tiny" / name, Path(target.folder))
    return tmp_path / "home"


def test_shipped_drafters_are_put_together_by_name(home: Path, drafters: Path, target: FrozenTarget) -> None:
    assert shipped.names("drafters", target.folder) == sorted(HEADS)
    folder = Path(shipped.drafter_path("truncated", target.folder))  # which shares with `full`
    assert folder == home / "drafters" / "tiny" / "truncated"
    loaded, _ = load_drafter(folder)
    expected, _ = load_drafter(drafters / "truncated")
    for (name, ours), theirs in zip(loaded.state_dict().items(), expected.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    with pytest.raises(ValueError, match=r"no drafter 'ful': neither one of target tiny \(full, slimspec, truncated\)"):
        shipped.drafter_path("ful", target.folder)


def test_a_plan_leaves_nothing_of_them(
    home: Path, drafters: Path, target: FrozenTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["x = "]}\n')
    with shipped.leaving_nothing(True):
        folder = Path(shipped.drafter_path("truncated", target.folder))
        load_drafter(folder)
        assert shipped.drafter_path("truncated", target.folder) == str(folder)
    assert not folder.exists()
    arguments = [f"target={target.folder}", f"workload={tmp_path}/prompts.jsonl", "max_new_tokens=8", "concurrency=[1]"]
    assert sweep(["--plan", "drafters=[full, truncated]", "baseline=full", "draft_steps=[2]", *arguments]) == 0
    assert "| truncated-s2-c1 " in capsys.readouterr().out
    assert not home.exists()

    full = Path(shipped.drafter_path("full", target.folder))
    with shipped.leaving_nothing(True):
        load_drafter(Path(shipped.drafter_path("truncated", target.folder)))  # which finds the one that is there
    assert list(home.glob("drafters/*/*")) == [full]


def test_what_was_trained_here_comes_before_what_ships(home: Path, drafters: Path, target: FrozenTarget) -> None:
    own = home / "drafters" / "tiny" / "full"
    shutil.copytree(drafters / "slimspec", own)
    assert shipped.drafter_path("full", target.folder) == str(own)
    assert read_info(own).head.spec()["kind"] == "slimspec"
    assert not (own / PACKED).exists()


def test_a_shipped_head_is_not_put_beside_another_body(home: Path, drafters: Path, target: FrozenTarget) -> None:
    """As of an earlier release: its `full` is there, and the head that ships today shares with today's."""
    own = home / "drafters" / "tiny" / "full"
    shutil.copytree(drafters / "slimspec", own)
    with pytest.raises(ValueError, match=r"'truncated' ships with a drafter 'full' .* is another one.*move it away"):
        shipped.drafter_path("truncated", target.folder)
    assert [folder.name for folder in own.parent.iterdir()] == ["full"]
