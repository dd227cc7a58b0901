"""What a champion's folder says of itself: `serving.json`, written when it is promoted."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rayspec.champion_fields import NOT_OF_A_RECORD, not_measured
from rayspec.records import CanaryAnswer
from sglang_ext.adapter.server_fields import check_overrides
from sglang_ext.fingerprints import file_sha256
from sglang_ext.folder_kinds import SERVING
from sglang_ext.json_text import check_mapping, parse_json
from sglang_ext.settings import Settings, build, require

RECORD = SERVING


@dataclass(frozen=True, kw_only=True)
class ServingRecord(Settings):
    """`target` and `target_sha256`: what it was measured on. `files`: SHA-256 of each file of the drafter. `flags`:
    ServerArgs fields that it was measured with, without paths. `evidence`: the figures that it was chosen by. `canary`:
    what it answered to the canary prompts then; empty where nobody asked."""

    head: str
    target: str
    target_sha256: str
    files: dict[str, str]
    flags: dict[str, Any]
    num_threads: int | None = None
    nodes: int = 1
    evidence: dict[str, str] = field(default_factory=dict)
    canary: tuple[CanaryAnswer, ...] = ()

    def __post_init__(self) -> None:
        own = sorted(set(self.flags) & NOT_OF_A_RECORD)
        if own:
            raise ValueError(f"flags must be without {', '.join(own)}, which are decided where it is served")
        check_overrides(self.flags, "flags")
        if others := not_measured(self.flags):
            raise ValueError(
                f"flags must be without {', '.join(others)}: no setting of speed that a champion may bring; sweep "
                "without it, and give it to SGLang's server yourself (rayspec serve ... -- --flag)"
            )
        for name, value in (("num_threads", self.num_threads), ("nodes", self.nodes)):
            require(value is None or value >= 1, name, value, "at least 1")

    def without_evidence(self) -> "ServingRecord":
        """For one that is not served as it was measured, so that nothing can be held against it."""
        return replace(self, evidence={}, canary=())

    def write(self, folder: Path) -> str:
        """The fingerprint of the file that is written."""
        (folder / RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n")
        return file_sha256(folder / RECORD)


def read_record(folder: Path) -> ServingRecord:
    """Raises ValueError for a folder without a record, and for one that is damaged."""
    file = folder / RECORD
    if not file.is_file():
        raise ValueError(
            f"{folder} carries no evidence of what it was measured to be ({RECORD} is missing); rayspec report "
            "--promote registers a champion with it"
        )
    try:
        return build(ServingRecord, check_mapping(parse_json(file.read_bytes()), "it"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); promote the champion again") from error


def files_sha256(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder but its record, by the file's path. Raises ValueError for no plain file."""
    found = sorted(p for p in folder.rglob("*") if p != folder / RECORD and not (p.is_dir() and not p.is_symlink()))
    odd = [str(p.relative_to(folder)) for p in found if p.is_symlink() or not p.is_file()]
    if odd or (folder / RECORD).is_symlink():
        raise ValueError(
            f"{folder} holds {', '.join(odd) or RECORD}, which are no plain files: what they stand for can be "
            "exchanged; put the files themselves there (cp -rL)"
        )
    return {str(p.relative_to(folder)): file_sha256(p) for p in found}
