"""Folders of ours are replaced whole; those of others stay as they are."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from disks import fill, small_disk
from head_cases import toy_body, toy_target

from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.folder_kinds import DRAFTER
from sglang_ext.folders import FolderKind, check_name, check_place, save_tensors, written_whole
from sglang_ext.heads import head_from_target, parse_head
from sglang_ext.whole import whole_folder

NOTE = FolderKind(what="note", files=("note.txt", "*.png"), is_ours=lambda folder: (folder / "note.txt").is_file())


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def write(folder: Path, text: str) -> None:
    with written_whole(folder, NOTE) as draft:
        (draft / "note.txt").write_text(text)


def test_a_folder_of_ours_is_replaced_whole(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", "old")
    (tmp_path / "a" / "b" / "old.png").write_bytes(b"old")
    write(tmp_path / "a" / "b", "new")
    assert content(tmp_path) == {"a/b/note.txt": b"new"}
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o755
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "new")
    assert content(tmp_path / "empty") == {"note.txt": b"new"}


def test_a_failure_leaves_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")

    def fail() -> None:
        with written_whole(tmp_path / "a", NOTE) as draft:
            (draft / "note.txt").write_text("new")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="28"):
        fail()
    assert content(tmp_path) == {"a/note.txt": b"old"}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", "old")
    rename = Path.rename

    def second_fails(source: Path, destination: Path) -> None:
        if destination == tmp_path / "a" and not source.name.endswith(".old"):
            raise OSError(28, "No space left on device")
        rename(source, destination)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(OSError, match="28"):
        write(tmp_path / "a", "new")
    assert content(tmp_path) == {"a/note.txt": b"old"}


def test_a_place_of_ours_is_replaced_whatever_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_anything(text: str) -> None:
        with whole_folder(tmp_path / "a") as draft:
            (draft / "b").mkdir()
            (draft / "b" / "any").write_text(text)

    write_anything("old")
    (tmp_path / "a" / "link").symlink_to("/etc")
    rename = Path.rename

    def second_fails(source: Path, destination: Path) -> None:
        if destination == tmp_path / "a" and (source / "b" / "any").read_text() == "new":
            raise OSError(28, "No space left on device")
        rename(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", second_fails)
        with pytest.raises(OSError, match="28"):
            write_anything("new")
    assert content(tmp_path) == {"a/b/any": b"old"}
    write_anything("new")
    assert content(tmp_path) == {"a/b/any": b"new"}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert not (tmp_path / "a" / "link").is_symlink()


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (lambda d: (d.mkdir(), (d / "thesis.txt").touch()), r"holds thesis.txt and is no note of rayspec's"),
    "more files": (lambda d: (write(d, "x"), (d / "mine.md").touch()), r"beside the note that is there lies mine.md"),
    "a folder in it": (lambda d: (write(d, "x"), (d / "b.png").mkdir()), r"beside the note that is there lies b.png"),
    "a file": (lambda d: d.touch(), "a file is there"),
    "a link": (lambda d: (write(d.with_name("other"), "x"), d.symlink_to(d.with_name("other"))), "a link is there"),
    "a lost link": (lambda d: d.symlink_to("nowhere"), "a link is there, to nowhere"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_not_ours_stays(name: str, tmp_path: Path) -> None:
    put, message = FOREIGN[name]
    put(tmp_path / "a")
    before = content(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "a", "new")
    assert content(tmp_path) == before
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_what_comes_while_ours_is_written_stays(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")

    def write_slowly() -> None:
        with written_whole(tmp_path / "a", NOTE) as draft:
            (draft / "note.txt").write_text("new")
            (tmp_path / "a" / "mine.md").write_text("mine")

    with pytest.raises(ValueError, match=r"lies mine\.md"):
        write_slowly()
    assert content(tmp_path) == {"a/note.txt": b"old", "a/mine.md": b"mine"}


@pytest.mark.parametrize("place", ["..", ".", "/", "a/.."])
def test_a_place_that_is_no_new_folder(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="it is no folder's own name"):
        check_place(Path(place), NOTE)


def test_names() -> None:
    check_name("full-2.0", "name")
    for bad in ("", ".", "..", "a/b", "a/", "/", "a\0b", "a" * 201):
        with pytest.raises(ValueError, match=r"^name must be a plain folder name"):
            check_name(bad, "name")


def test_a_drafter_replaces_nothing_but_a_drafter(tmp_path: Path) -> None:
    """The model of a user has files of the same names."""
    torch.manual_seed(0)
    drafter = Eagle3Drafter(toy_body(16, 96), head_from_target(parse_head({"kind": "full"}), torch.randn(96, 16)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    before = content(tmp_path)
    for place in ("model", "model/.."):
        with pytest.raises(ValueError, match="cannot write the drafter"):
            save_drafter(tmp_path / place, drafter, toy_target(16, 96))
    assert content(tmp_path) == before
    save_drafter(tmp_path / "new", drafter, toy_target(16, 96))
    assert DRAFTER.is_ours(tmp_path / "new")
    load_drafter(tmp_path / "new")


def test_a_full_disk_is_an_oserror_and_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        write(disk / "a", "old")
        with (
            pytest.raises(OSError, match=r"x\.safetensors could not be written: .*No space left on device"),
            written_whole(disk / "a", NOTE) as draft,
        ):
            save_tensors({"x": torch.zeros(1_000_000)}, draft / "x.safetensors")
        assert content(disk) == {"a/note.txt": b"old"}
        ballast = fill(disk)
        with pytest.raises(OSError, match="No space left on device"):
            write(disk / "a", "new" * 10_000)
        ballast.unlink()
        assert content(disk) == {"a/note.txt": b"old"}
