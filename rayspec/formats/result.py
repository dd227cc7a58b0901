"""What a format is read as: a drafter of ours with its tensors as they were stored, or a list of tokens; and the target
that it is for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rayspec.shipped import target_path
from rayspec.target import INDEX, check_weights
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.base import DrafterConfig
from sglang_ext.drafters.checkpoint import check_tensors
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, empty_drafter
from sglang_ext.drafters.numbers import check_finite
from sglang_ext.heads import HeadConfig


@dataclass(frozen=True)
class Target:
    """The target, of whose weights only the embedding and the LM head are read, and only where they are asked for."""

    name: str
    frozen: FrozenTarget

    @classmethod
    def read(cls, name: str) -> Target:
        """Raises ValueError for a target that is no folder or not whole."""
        folder = target_path(name)
        if not Path(folder).is_dir():
            raise ValueError(f"--target {name} is no folder; rayspec fetch {name} brings it to this machine")
        return cls(name, FrozenTarget.without_weights(folder))

    @property
    def folder(self) -> Path:
        return Path(self.frozen.folder)

    @property
    def dtype(self) -> str | None:
        """The type that SGLang computes in; None where the target's config.json does not say."""
        named = getattr(self.frozen.model.config, "dtype", None)
        return None if named is None else str(named).removeprefix("torch.")

    @property
    def embedding_VG(self) -> Tensor:
        return self._tensor("model.embed_tokens.weight")

    @property
    def head_VG(self) -> Tensor:
        is_tied = getattr(self.frozen.model.config, "tie_word_embeddings", False)
        return self.embedding_VG if is_tied else self._tensor("lm_head.weight")

    def _tensor(self, name: str) -> Tensor:
        check_weights(self.folder)
        index = self.folder / INDEX
        files = sorted(self.folder.glob("*.safetensors"))
        if index.is_file():
            named = json.loads(index.read_text())["weight_map"].get(name)
            files = [self.folder / named] if named else []
        for file in files:
            with safe_open(file, framework="pt") as handle:
                if name in handle.keys():  # noqa: SIM118
                    return handle.get_tensor(name)
        raise ValueError(f"the target {self.name} has no tensor {name}, which this drafter needs")


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A drafter. `tensors` have our names and the dtypes that they were stored in; `notes` say what was left out."""

    config: DrafterConfig
    head: HeadConfig
    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()

    def check(self, source: Path, target: Target) -> None:
        """Raise ValueError unless tensors and sizes fit each other and the target."""
        own = target.frozen.model.config
        for name, ours, theirs in (
            ("hidden_size", getattr(self.config, "target_hidden_size", self.config.hidden_size), own.hidden_size),
            ("vocab_size", self.config.vocab_size, own.vocab_size),
        ):
            if ours != theirs:
                raise ValueError(
                    f"{source}: {name} is {ours}, the target {target.name} has {theirs}; name its own target"
                )
        outside = [tap for tap in self.config.tap_layers if not 0 < tap < own.num_hidden_layers]
        if outside or len(set(self.config.tap_layers)) != len(self.config.tap_layers):
            raise ValueError(
                f"{source}: it taps the inputs of the layers {list(self.config.tap_layers)}, which must be different "
                f"ones in 1..{own.num_hidden_layers - 1} of {target.name}; name its own target"
            )
        info = CheckpointInfo(
            path=str(source),
            body=self.config,
            head=self.head,
            target=target.frozen.info(target.name, self.config.tap_layers),
        )
        check_tensors(self.tensors, info)
        check_finite(self.tensors, str(source))
        drafter = empty_drafter(info)
        drafter.load_state_dict(dict(self.tensors))
        drafter.lm_head.check()

    def stops_out_of_reach(self, target: Target) -> list[int]:
        """Stop tokens that a reduced head cannot propose: its drafts go on past them."""
        ids = self.tensors.get("lm_head.ids")
        return [] if ids is None else sorted(set(target.frozen.eos_ids) - set(ids.tolist()))

    @property
    def dtype(self) -> str:
        """The widest of the stored ones, by its name in config.json."""
        floats = {t.dtype for t in self.tensors.values() if t.is_floating_point()}
        return str(max(floats, key=lambda d: (d.itemsize, str(d)))).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The most useful ids of a vocabulary, the best first, stop tokens in front."""

    ids: Tensor
    notes: tuple[str, ...] = ()

    def artifacts(self, vocab_size: int) -> dict[str, Tensor]:
        return {"ids": self.ids, "counts": torch.zeros(vocab_size, dtype=torch.int64)}
