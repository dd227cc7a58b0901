"""A calibration on disk: written whole or not at all, read strictly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayspec.artifacts import load_artifacts, write_artifacts
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.folder_kinds import CALIBRATED, CALIBRATION_JSON
from sglang_ext.heads import head_from_target, parse_head

IDS = torch.tensor([4, 1, 7, 0])
CLUSTER_OF = torch.tensor([1, 0, 2, 2, 0, 1, 1, 0])
COUNTS = torch.arange(8)
TARGET = TargetInfo(name="toy", hidden_size=4, vocab_size=8, tokenizer_sha256="abc", tap_layers=(2, 4, 5))


def description(**changes: Any) -> dict[str, Any]:
    target = {"name": "toy", "vocab_size": 8, "tokenizer_sha256": "abc"}
    return {"name": "toy", "kind": "ids", "target": target, "stop_ids": [1, 4], **changes}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"ids": IDS, "cluster_of": CLUSTER_OF, "counts": COUNTS}
    write_artifacts(tmp_path / "toy", tensors, description(), {"coverage.png": b"png"})
    return tmp_path / "toy"


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / CALIBRATED)
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / CALIBRATED)


def test_written_is_read_and_suits_the_heads(folder: Path) -> None:
    tensors, found = load_artifacts(folder, TARGET, [1, 4])
    assert torch.equal(tensors["ids"], IDS)
    assert found == {"format_version": 1, **description()}
    assert sorted(p.name for p in folder.parent.iterdir()) == ["toy"]
    assert sorted(p.name for p in folder.iterdir()) == [CALIBRATION_JSON, CALIBRATED, "coverage.png"]
    weight_VH = torch.randn(8, 4)
    head_from_target(parse_head({"kind": "truncated", "size": 3}), weight_VH, tensors).check([1, 4])
    head_from_target(parse_head({"kind": "truncated", "size": 4, "step_sizes": [4, 2]}), weight_VH, tensors).check(
        [1, 4]
    )
    head_from_target(parse_head({"kind": "coral", "clusters": 2, "top": 1}), weight_VH, tensors).check([1, 4])


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("ids", torch.tensor([4, 1, 7, 7]), "ids holds a token twice"),
        ("ids", torch.tensor([4, 1, 8]), r"ids must be in 0\.\.7"),
        ("ids", torch.tensor([4, 7, 1]), r"the stop tokens \[1\] are not in front of ids"),
        ("ids", torch.arange(9).remainder(8), r"ids must be 1\.\.8 tokens \(the vocabulary\), got 9"),
        ("ids", torch.empty(0, dtype=torch.int64), r"got 0"),
        ("ids", IDS.int(), r"ids must be int64 and one-dimensional, got torch.int32"),
        ("cluster_of", CLUSTER_OF[:7].clone(), r"cluster_of must have an entry a token \(8\), got 7"),
        ("cluster_of", CLUSTER_OF * 2, "no partition into 1..M: a routed cluster is empty"),
        ("cluster_of", CLUSTER_OF - 1, "no partition: it holds a negative cluster"),
        ("cluster_of", torch.zeros(8, dtype=torch.int64), "no partition into 1..M"),
        ("cluster_of", (CLUSTER_OF + 1).clamp(max=2), r"the stop tokens \[1, 4\] are not in the pinned cluster 0"),
        ("counts", -COUNTS, "counts must not be negative"),
        ("counts", None, "it needs counts, and ids, cluster_of or"),
        ("extra", COUNTS, "unknown tensors extra"),
    ],
)
def test_contradictory_tensors_are_refused(folder: Path, name: str, tensor: Tensor | None, message: str) -> None:
    change(folder, name, tensor)
    with pytest.raises(ValueError, match=message) as caught:
        load_artifacts(folder)
    assert "rayspec calibrate" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 9}, "with vocab_size 8, but target 'other' has 9"),
        ({"tokenizer_sha256": "xyz"}, "with tokenizer_sha256 abc, but target 'other' has xyz"),
    ],
)
def test_another_target_is_refused(folder: Path, changed: dict[str, Any], message: str) -> None:
    other = TargetInfo.from_dict({**TARGET.to_dict(), "name": "other", **changed})
    with pytest.raises(ValueError, match=message):
        load_artifacts(folder, other)


def test_a_new_stop_token_of_the_target_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"does not know the stop tokens \[6\]"):
        load_artifacts(folder, TARGET, [1, 6])


def test_broken_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no calibration '.*nowhere': neither one of target"):
        load_artifacts(tmp_path / "nowhere")
    text = (folder / CALIBRATION_JSON).read_text()
    for broken, message in (
        ("{", "is no description of a calibration"),
        ("{}", "KeyError"),
        (json.dumps({"format_version": 1, "target": {}}), "KeyError"),
        (text.replace('"format_version": 1', '"format_version": 2'), "format_version 2, this release reads 1"),
    ):
        (folder / CALIBRATION_JSON).write_text(broken)
        with pytest.raises(ValueError, match=message):
            load_artifacts(folder)
    (folder / CALIBRATION_JSON).write_text(text)
    (folder / CALIBRATED).write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot be read"):
        load_artifacts(folder)
    (folder / CALIBRATED).unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        load_artifacts(folder)


def test_nothing_is_written_that_would_be_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stop token 8 is not in 0\.\.7"):
        write_artifacts(tmp_path / "bad", {"ids": IDS, "counts": COUNTS}, description(stop_ids=[4, 8]), {})
    with pytest.raises(ValueError, match="ids holds a token twice"):
        write_artifacts(tmp_path / "bad", {"ids": IDS.repeat(2), "counts": COUNTS}, description(), {})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_what_was_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def fail(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("rayspec.artifacts.save_tensors", fail)
    with pytest.raises(OSError, match="no space"):
        write_artifacts(folder, {"ids": IDS, "counts": COUNTS}, description(), {})
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in folder.parent.iterdir()] == ["toy"]


PAIRS = {  # 0 was followed by 1 and 3, and 7 by 0
    "bigram_indptr": torch.tensor([0, 2, 2, 2, 2, 2, 2, 2, 3]),
    "bigram_ids": torch.tensor([1, 3, 0]),
    "bigram_counts": torch.tensor([4, 1, 2]),
}


def test_pairs_are_a_calibration_too(tmp_path: Path) -> None:
    write_artifacts(tmp_path / "toy", {**PAIRS, "counts": COUNTS}, description(kind="pairs"), {})
    tensors, _ = load_artifacts(tmp_path / "toy", TARGET, [1, 4])
    assert all(torch.equal(tensors[name], tensor) for name, tensor in PAIRS.items())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("bigram_ids", torch.tensor([3, 1, 0]), "bigram_ids must ascend within each row"),
        ("bigram_ids", torch.tensor([1, 3]), "must have an entry a pair each, got 2 and 3"),
        ("bigram_counts", torch.tensor([4, 0, 2]), "bigram_counts must be at least 1"),
        ("bigram_indptr", torch.arange(8), "bigram_indptr must have an entry a token and one more"),
        ("bigram_indptr", torch.tensor([0, 2, 2, 2, 2, 2, 2, 2, 4]), "must ascend from 0 to 3"),
    ],
)
def test_contradictory_pairs_are_refused(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_artifacts(tmp_path / "toy", {**PAIRS, name: tensor, "counts": COUNTS}, description(kind="pairs"), {})
    assert not list(tmp_path.iterdir())
