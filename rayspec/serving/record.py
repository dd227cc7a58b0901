"""What a champion's folder says of itself: `serving.json`, written when it is promoted."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_ext.artefacts import SERVING
from sglang_ext.fingerprints import file_sha256
from sglang_ext.json_text import parse_json
from sglang_ext.settings import Settings, build

RECORD = SERVING


@dataclass(frozen=True, kw_only=True)
class ServingRecord(Settings):
    """`target` and `target_sha256`: what it was measured on. `files`: SHA-256 of each file of the drafter. `flags`:
    ServerArgs fields that it was measured with, without paths. `evidence`: the figures that it was chosen by."""

    head: str
    target: str
    target_sha256: str
    files: dict[str, str]
    flags: dict[str, Any]
    num_threads: int | None = None
    nodes: int = 1
    evidence: dict[str, str] = field(default_factory=dict)

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
        values = parse_json(file.read_bytes())
        if not isinstance(values, dict):
            raise ValueError("it holds no JSON object")
        return build(ServingRecord, values)
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); promote the champion again") from error


def files_sha256(folder: Path) -> dict[str, str]:
    """Of every file below a folder but its record, by its path there."""
    found = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / RECORD)
    return {str(p.relative_to(folder)): file_sha256(p) for p in found}
