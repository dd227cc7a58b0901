"""What is converted: a folder with config.json and weights, or a file of tokens. Nothing in it runs.

Weights are safetensors. A pickled file is refused, unless the user allows torch's own reader of tensors alone
(`weights_only=True`), which builds tensors and plain containers and refuses every other class.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rayspec.messages import first_line
from sglang_ext.fingerprints import combined_sha256, file_sha256
from sglang_ext.json_text import parse_json

PICKLED = (".pt", ".bin", ".pth")
ALLOW_PICKLE = "--allow-weights-only-pickle"
NOT_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@dataclass(frozen=True)
class Source:
    path: Path
    allow_pickle: bool = False
    used: set[Path] = field(default_factory=set)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json; empty of a file. Raises ValueError where a folder has none."""
        if not self.path.exists():
            raise ValueError(f"there is no {self.path}; download the published folder first")
        if self.path.is_file():
            return {}
        file = self.path / "config.json"
        if not file.is_file():
            raise ValueError(f"{self.path} has no config.json; copy the published folder whole")
        try:
            found = parse_json(file.read_bytes())
        except (ValueError, OSError) as error:
            raise ValueError(f"{file} is no valid JSON ({error}); copy the published folder again") from error
        if not isinstance(found, dict):
            raise ValueError(f"{file} must hold a JSON object, got {type(found).__name__}")
        self.used.add(file)
        return found

    @cached_property
    def weight_files(self) -> list[Path]:
        """Its safetensors, or its pickled files where it has no others. Raises ValueError for none."""
        if self.path.is_file():
            return [self.path]
        files = sorted(self.path.glob("*.safetensors"))
        files = files or sorted(f for s in PICKLED for f in self.path.glob(f"*{s}") if f.name not in NOT_WEIGHTS)
        if not files:
            raise ValueError(f"{self.path} has no weights (*.safetensors); copy the published folder whole")
        return files

    def load(self) -> Any:
        """What the one file of weights holds: tensors by name, or what a pickled list is. Raises ValueError."""
        (file,) = self.weight_files
        return self._load(file)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All of them. Raises ValueError for files that are not whole, pickled ones, and one name in two files."""
        found: dict[str, Tensor] = {}
        for file in self.weight_files:
            part = self._load(file)
            if not isinstance(part, Mapping) or not all(isinstance(t, Tensor) for t in part.values()):
                raise ValueError(f"{file} must hold tensors by name, got {type(part).__name__}")
            twice = sorted(set(part) & set(found))
            if twice:
                raise ValueError(f"{file} holds {twice[0]}, which another file has, too; keep one of them")
            found |= part
        missing = sorted(self._indexed() - {file.name for file in self.weight_files})
        if missing:
            raise ValueError(f"{self.path} lacks {', '.join(missing)}, which its index names; copy it again")
        return found

    def _indexed(self) -> set[str]:
        indices = [] if self.path.is_file() else sorted(self.path.glob("*.safetensors.index.json"))
        try:
            return {name for index in indices for name in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ValueError(f"{self.path} has an index that is none ({error!r}); copy it again") from error

    def _load(self, file: Path) -> Any:
        self.used.add(file)
        if file.suffix not in PICKLED:
            try:
                return load_file(file)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is no whole safetensors file ({error}); copy it again") from error
        if not self.allow_pickle:
            raise ValueError(
                f"{file} is pickled, and a pickle can run code when it is read; convert it to safetensors, or pass "
                f"{ALLOW_PICKLE} to have torch read tensors and plain lists out of it and refuse all else"
            )
        try:
            # asked for by --allow-pickle; torch refuses all but tensors and plain containers
            return torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            raise ValueError(f"{file} is no file of tensors alone ({first_line(error)}); it is not read") from error

    def sha256(self) -> str:
        """One hash of all files that were read."""
        return combined_sha256({file.name: file_sha256(file) for file in self.used})
