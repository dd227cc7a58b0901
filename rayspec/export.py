"""Drafters in EAGLE's and EAGLE-3's stock forms, which SGLang serves without rayspec."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rayspec.shipped import drafter_label, drafter_path
from sglang_ext.drafters.checkpoint import check_files, load_drafter, save_drafter
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, empty_head, read_info
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.fingerprints import weights_sha256
from sglang_ext.folder_kinds import DRAFTER, EXPORTED, WEIGHTS
from sglang_ext.folders import check_name, check_place
from sglang_ext.json_text import check_mapping, parse_json
from sglang_ext.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Settings):
    """`drafters`: shipped names or folders; each is written to output_dir/<its name>/."""

    drafters: list[str] = field(default_factory=list)
    output_dir: str = "stock_drafters"

    def __post_init__(self) -> None:
        if not self.drafters:
            raise ValueError("drafters is empty; name some, such as drafters=[full], or give folders")
        labels = [drafter_label(drafter) for drafter in self.drafters]
        for label in labels:
            check_name(label, "the last part of each of drafters")
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"drafters must have different names to lie side by side, got {twice[0]!r} more than once")


@dataclass(frozen=True, kw_only=True)
class Export:
    """One drafter and its destination, found and checked; `rows` of the stock head's matrix, which of EAGLE's is the
    target's."""

    info: CheckpointInfo
    target: TargetInfo
    folder: Path
    rows: int
    origin: Mapping[str, Any]
    is_done: bool

    def describe(self) -> str:
        state = "already exported" if self.is_done else "to write"
        head = f"{self.info.head} as {self.rows} rows of {self.info.body.vocab_size}"
        return f"{self.info.path}: {head} -> {self.folder}: {state}"


def prepare(config: ExportConfig) -> list[Export]:
    """What `write` is to do. Raises ValueError for a drafter that is not there, is not whole or has a head that the
    stock form cannot express, and for a destination that holds anything else."""
    return [_prepare(drafter, Path(config.output_dir)) for drafter in config.drafters]


def stock_form(drafter: str) -> tuple[CheckpointInfo, int]:
    """What is read of a drafter, and the rows of its stock head. Raises ValueError for one that is not there, is not
    whole or has no stock form."""
    info = read_info(drafter_path(drafter))
    if info.target is None:
        raise ValueError(f"{info.path} is a stock EAGLE-3 checkpoint already; serve it as it is")
    if info.body.stock is None:
        raise ValueError(
            f"cannot export {info.path}: SGLang has no stock form of a {info.kind} drafter; serve it with rayspec"
        )
    if info.tree is not None:
        raise ValueError(
            f"cannot export {info.path}: SGLang has no stock form of a draft_tree; export the drafter that it was made "
            "from, or serve it with rayspec"
        )
    check_files(info)
    with torch.device("meta"):  # shapes alone
        return info, info.body.stock.rows(empty_head(info), info.provenance, f"cannot export {info.path}")


def _prepare(drafter: str, output_dir: Path) -> Export:
    info, rows = stock_form(drafter)
    assert info.target is not None, "a stock checkpoint was refused"
    assert info.body.stock is not None, "and so was a family without this form"
    version = info.body.stock.version
    origin = {
        **({} if version is None else {"form": version}),
        "drafter": drafter_label(drafter),
        "sha256": weights_sha256(Path(info.path) / WEIGHTS),
        "draft_head": info.head.spec(),
        "target": info.target.to_dict(),
        **info.provenance,
    }
    if info.shares:
        origin["shares"] = [asdict(entry) for entry in info.shares]
    origin = json.loads(json.dumps(origin))  # tuples become lists, as in the file
    folder = output_dir / drafter_label(drafter)
    return Export(
        info=info,
        target=info.target,
        folder=folder,
        rows=rows,
        origin=origin,
        is_done=_is_done(folder, origin),
    )


def _is_done(folder: Path, origin: Mapping[str, Any]) -> bool:
    """Whether this very drafter lies there. Raises ValueError where something else does."""
    file = folder / EXPORTED
    if not file.is_file():
        if DRAFTER.is_ours(folder):
            raise ValueError(f"{folder} is there already and is no export; choose another output_dir")
        check_place(folder, DRAFTER)
        return False
    try:
        found = check_mapping(parse_json(file.read_bytes()), str(file))
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete {folder}, or choose another output_dir") from error
    if found == origin:
        return True
    if found == {key: value for key, value in origin.items() if key != "form"}:
        raise ValueError(
            f"{folder} holds this drafter in the form of an earlier release, which vLLM reads wrongly; delete it to "
            "export again, or choose another output_dir"
        )
    raise ValueError(
        f"{folder} holds an export of {found.get('drafter')!r} as it was before; delete it to export again, or choose "
        "another output_dir"
    )


def write(export: Export) -> None:
    """Write the drafter, whole or not at all. Raises ValueError for tensors that do not fit its config.json."""
    drafter, _ = load_drafter(export.info.path)
    extras = {EXPORTED: json.dumps(export.origin, indent=1) + "\n"}
    save_drafter(export.folder, drafter, export.target, export.info.provenance, extras=extras, stock=True)
