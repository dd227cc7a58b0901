"""The drafter that a calibration is for: what its head's rows are and what its forward pass costs.

V = vocabulary, H = hidden size, k = kept rows of the head.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rayspec.calibration.vocabulary import Vocabulary
from rayspec.shipped import drafter_path
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters import DEFAULT, family, parse_drafter
from sglang_ext.drafters.base import DrafterConfig
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, empty_head, read_info
from sglang_ext.heads import DraftHead, build_head
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.heads.full import FullConfig


class DrafterFlops(NamedTuple):
    """FLOPs of one token through the drafter's matrices: `body`, and `per_row` for each kept row of the head.

    Attention over the context is left out: it grows with the context and not with k.
    """

    body: int
    per_row: int

    def share(self, size: Tensor | int, vocab_size: int) -> Tensor | float:
        """FLOPs(size) / FLOPs(V)."""
        return (self.body + self.per_row * size) / (self.body + self.per_row * vocab_size)


@dataclass(frozen=True)
class ReferenceDrafter:
    """`name`: a drafter with a full head (shipped, or a folder). None: the target's LM head on a body shaped like one
    of the target's layers, which is what rayspec train starts from."""

    target_folder: str
    vocabulary: Vocabulary
    name: str | None = None

    @cached_property
    def head_VH(self) -> Tensor:
        """Float32 rows of the LM head. Raises ValueError."""
        if self.name is None:
            return FrozenTarget.load(self.target_folder, torch.float32).head_VG
        drafter, info = load_drafter(drafter_path(self.name, self.vocabulary.target))
        self._check_head(info, drafter.lm_head, must_be_full=True)
        if info.target is not None and info.target.tokenizer_sha256 != self.vocabulary.tokenizer_sha256:
            raise ValueError(
                f"rule.drafter={self.name} was trained for target {info.target.name!r} with another tokenizer than "
                f"{self.vocabulary.target!r}; name a drafter of this target"
            )
        head_VH = drafter.lm_head.get_parameter("weight").detach()
        if len(head_VH) != self.vocabulary.size:
            raise ValueError(
                f"rule.drafter={self.name} has {len(head_VH)} rows, the target {self.vocabulary.size}; name a drafter "
                "of this target"
            )
        return head_VH

    @cached_property
    def head_sha256(self) -> str:
        return hashlib.sha256(self.head_VH.contiguous().numpy().tobytes()).hexdigest()

    @cached_property
    def flops(self) -> DrafterFlops:
        return drafter_flops(self._body())

    def _check_head(self, info: CheckpointInfo, head: DraftHead | PositionHeads, *, must_be_full: bool) -> None:
        if isinstance(head, PositionHeads) or (must_be_full and not info.head.gives_rows):
            where = " a position" if isinstance(head, PositionHeads) else ""
            raise ValueError(
                "rule.drafter must name a drafter with one head of kind 'full', without a bias and not in fewer bits, "
                f"for all draft steps, {self.name} is of kind {info.kind} with {info.head}{where}; name another, or "
                "none for the target's own head"
            )

    def _body(self) -> DrafterConfig:
        if self.name is not None:
            info = read_info(drafter_path(self.name, self.vocabulary.target))
            with torch.device("meta"):
                self._check_head(info, empty_head(info), must_be_full=False)
            return info.body
        target = FrozenTarget.without_weights(self.target_folder)
        return family(DEFAULT).training.config_for(target, parse_drafter({"kind": DEFAULT}))


def drafter_flops(config: DrafterConfig) -> DrafterFlops:
    """Multiply-adds counted as two."""
    with torch.device("meta"):
        head = build_head(FullConfig(), hidden_size=config.hidden_size, vocab_size=config.vocab_size)
        drafter = family(config.kind).drafter_class(config, head)
    body = sum(m.weight.numel() for m in drafter.modules() if isinstance(m, nn.Linear))
    return DrafterFlops(body=2 * body, per_row=2 * config.hidden_size)
