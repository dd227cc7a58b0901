"""Drafters and token lists from other projects' formats to ours, and EAGLE-3 drafters to SGLang's and speculators'.

`rayspec export` writes finished drafters of ours, several at a time, for serving; this reads and writes anyone's, one
at a time, and keeps every tensor's bits. Both write the stock form by sglang_ext/drafters/stock.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rayspec.artifacts import write_artifacts
from rayspec.formats import WRITES, format_module, recognised
from rayspec.formats.result import Converted, Target, Tokens
from rayspec.formats.source import Source
from sglang_ext.folder_kinds import CALIBRATION, DRAFTER, EXPORTED, WEIGHTS
from sglang_ext.folders import check_place, save_tensors, written_whole


@dataclass(frozen=True)
class Conversion:
    """What was read, checked, and what is to be written where."""

    source: Source
    format: str
    target: Target
    result: Converted | Tokens
    folder: Path
    to: str
    provenance: Mapping[str, Any]
    stored: tuple[dict[str, Any], dict[str, Tensor]] | None  # config.json and tensors; None for a list of tokens

    def describe(self) -> str:
        what = f"{len(self.result.ids)} tokens" if isinstance(self.result, Tokens) else (
            f"{self.result.config.kind} drafter, head {self.result.head}, {self.result.dtype}"
        )  # fmt: skip
        lines = [f"{self.source.path} ({self.format}): {what} -> {self.folder} ({self.to})"]
        lines += [f"  {note}" for note in self.result.notes]
        if isinstance(self.result, Converted) and self.target.dtype not in (None, self.result.dtype):
            lines.append(f"  stored in {self.result.dtype}, served in the target's {self.target.dtype}")
        lost = self.result.stops_out_of_reach(self.target) if isinstance(self.result, Converted) else []
        if lost:
            lines.append(f"  warning: its head lacks the stop tokens {lost}; no draft of it ends there")
        return "\n".join(lines)


def prepare(
    source: Path, folder: Path, target: str, *, format: str = "auto", to: str = "rayspec", allow_pickle: bool = False
) -> Conversion:
    """Read and check everything; nothing is written. Raises ValueError for whatever cannot be converted."""
    if to not in WRITES:
        raise ValueError(f"unknown --to {to!r}; known: {', '.join(WRITES)}")
    if folder.resolve() == source.resolve():
        raise ValueError(f"{folder} is what is to be read; name another folder to write")
    found, own = Source(source, allow_pickle), Target.read(target)
    _ = found.config  # whether it is there
    name = recognised(found) if format == "auto" else format
    result = format_module(name).read(found, own)
    provenance: dict[str, Any] = {
        "converted": {"format": name, "source": source.name, "sha256": found.sha256(), "notes": list(result.notes)}
    }
    stored = None
    if isinstance(result, Tokens):
        if to != "rayspec":
            raise ValueError(
                f"{source} is a list of tokens, which becomes a calibration; --to must be rayspec, got {to!r}"
            )
        check_place(folder, CALIBRATION)
    else:
        result.check(source, own)
        stored = format_module(WRITES[to]).write(result, own, provenance)
        check_place(folder, DRAFTER)
    return Conversion(found, name, own, result, folder, to, provenance, stored)


def write(conversion: Conversion) -> None:
    """Write the folder, whole or not at all."""
    if isinstance(conversion.result, Tokens):
        _write_tokens(conversion, conversion.result)
        return
    assert conversion.stored is not None, "a drafter"
    config, tensors = conversion.stored
    with written_whole(conversion.folder, DRAFTER) as draft:
        save_tensors(
            {n: t.contiguous().clone() for n, t in tensors.items()}, draft / WEIGHTS, metadata={"format": "pt"}
        )
        (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if conversion.to != "rayspec":  # whose config.json has room for it
            (draft / EXPORTED).write_text(json.dumps(conversion.provenance, indent=1) + "\n")


def _write_tokens(conversion: Conversion, tokens: Tokens) -> None:
    own = conversion.target.frozen.info(tap_layers=())
    description = {
        "rule": {"kind": "frspec", "top_k": len(tokens.ids)},
        "source": {"kind": "published", **conversion.provenance["converted"]},
        "target": {"name": own.name, "vocab_size": own.vocab_size, "tokenizer_sha256": own.tokenizer_sha256},
        "stop_ids": sorted(conversion.target.frozen.eos_ids),
        "figures": {"size": len(tokens.ids)},
    }
    write_artifacts(conversion.folder, tokens.artifacts(own.vocab_size), description, {})
