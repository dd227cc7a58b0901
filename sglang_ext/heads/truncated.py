"""A head over a fixed part of the vocabulary: FR-Spec, VocabTrim, BCL, and EAGLE-3's own reduced head.

The kinds of the literature differ in how the ids were chosen (rayspec.calibration) and in whether the rows were
trained with the truncation (VocabTrim-T, BCL) or taken from a trained full head; the head is the same.
T = rows, H = hidden, V = vocabulary, S = kept tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor

from rayspec_kernels.common.best import Best
from rayspec_kernels.head_topk import head_topk
from sglang_ext.heads.base import Candidates, DraftHead, HeadCost, Shard, Share, dense_cost
from sglang_ext.heads.config import HeadConfig
from sglang_ext.heads.losses import KL, Objective
from sglang_ext.settings import Count


@dataclass(frozen=True, kw_only=True, repr=False)
class TruncatedConfig(HeadConfig):
    """`size`: how many tokens are kept; None leaves it to the calibration, which keeps all of its ids (`complete`).
    `step_sizes` (PA-FR): how many of the ids, most frequent first, are scored at draft step 0, 1, ...; the last
    entry holds for all later steps. None: all of them at every step, sorted by id."""

    kind: ClassVar[str] = "truncated"

    size: Count | None = None
    step_sizes: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None

    @property
    def taken_over(self) -> tuple[str, ...]:
        return ("weight",)

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        super().check_sizes(hidden_size, vocab_size)
        if self.size is None:
            raise ValueError("draft_head.size has no value; it needs one")
        if not 1 <= self.size <= vocab_size:  # the calibration's, where none was written
            raise ValueError(f"draft_head.size must be in 1..{vocab_size} (the vocabulary), got {self.size}")
        steps = self.step_sizes
        if steps is not None and max(steps) > self.size:
            raise ValueError(
                f"draft_head.step_sizes must be a list of sizes in 1..{self.size} (size), got {list(steps)}"
            )

    def complete(self, artifacts: Mapping[str, Tensor]) -> Self:
        if self.size is not None:
            return self
        if "ids" not in artifacts:
            found = f"those named hold {', '.join(sorted(artifacts))} and no ids" if artifacts else "none are named"
            raise ValueError(
                f"draft_head.size is absent, which leaves it to the artifacts, but {found}; write a size, or name as "
                "artifacts what rayspec calibrate made by a rule that chooses tokens (bcl, vocabtrim, frspec)"
            )
        return replace(self, size=len(artifacts["ids"]))

    def check_artifacts(self, artifacts: Mapping[str, Tensor], vocab_size: int) -> None:
        found = len(artifacts.get("ids", ()))
        if self.size is None or found < self.size:
            raise ValueError(
                f"a truncated head of size {self.size} needs as many ids, got {found}; choose them with "
                "rayspec calibrate and name its output as draft_head's artifacts"
            )


class TruncatedHead(DraftHead):
    """`weight` [S, H] holds the rows of the target ids `ids` [S]."""

    projections = ("weight",)
    Config = TruncatedConfig
    config: TruncatedConfig
    ids: Tensor

    def __init__(self, config: TruncatedConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size)
        assert config.size is not None, "check_sizes has looked"
        self.size = config.size
        self.weight = self.new_parameter(self.size, hidden_size)
        self.register_buffer("ids", torch.full((self.size,), -1))

    def size_at(self, step: int) -> int:
        sizes = self.config.step_sizes
        return self.size if sizes is None else sizes[min(step, len(sizes) - 1)]

    @classmethod
    def from_target(cls, config: TruncatedConfig, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        """`artifacts["ids"]`: at least `size` target ids, the most useful first."""
        head = cls.unloaded(config, target_head_VH)
        config.check_artifacts(artifacts, head.vocab_size)
        ids_S = artifacts["ids"][: head.size].long()
        head.ids.copy_(ids_S.sort().values if config.step_sizes is None else ids_S)
        head.check()
        head.weight.data.copy_(target_head_VH[head.ids])
        return head

    def check(self, stop_ids: Iterable[int] = ()) -> None:
        super().check(stop_ids)
        V = self.vocab_size
        distinct, counts = self.ids.unique(return_counts=True)
        wrong = distinct[(distinct < 0) | (distinct >= V) | (counts > 1)]
        if len(wrong):
            times = int(counts[distinct == wrong[0]])
            raise ValueError(
                f"the ids of a truncated head must be distinct and in 0..{V - 1}, got {int(wrong[0])}"
                f"{f', which is there {times} times' if times > 1 else ''}; calibrate it again"
            )
        smallest = min(self.config.step_sizes or (self.size,))
        missing = sorted(set(stop_ids) - set(self.ids[:smallest].tolist()))
        if missing:
            raise ValueError(
                f"the truncated head of {smallest} ids lacks the stop tokens {missing}, so its drafts could never end; "
                "calibrate it again with the tokenizer and generation config of this target"
            )

    def fewest_candidates(self, draft_steps: int) -> int:
        return min(self.size_at(step) for step in range(draft_steps))

    def shortlist_size(self, step: int) -> int:
        return self.size_at(step)

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        size = self.size_at(step)
        return Candidates(self.project(hidden_TH, "weight", size), self.ids[:size])

    def fused(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Best:
        size = self.size_at(step)
        return head_topk(hidden_TH, self.stored("weight", size), k, self.ids[:size])

    def shard(self, rank: int, ranks: int) -> Shard | None:
        steps = self.config.step_sizes
        if min(steps or (self.size,)) < ranks:
            return None
        share = Share(rank, ranks, steps or (self.size,))
        own = len(self.ids[share.rows])
        config = replace(self.config, size=own, step_sizes=share.own_sizes if steps else None)
        part = self.with_rows(config, own, share.rows, "weight", "ids")
        part.ids = torch.arange(own, device=self.ids.device)
        return Shard(part, share, self.ids)

    def as_matrix(self) -> tuple[Tensor, Tensor] | None:
        return None if self.config.step_sizes else (self.all_rows("weight"), self.ids)

    def pack(self) -> None:
        self._packed = {}
        for size in set(self.config.step_sizes or (self.size,)):
            self.pack_rows("weight", size)

    def training_targets(self, p_TV: Tensor, objective: Objective = KL) -> tuple[Tensor, Tensor]:
        """The target's distribution over the kept tokens, renormalised; rows whose likeliest token is not kept do not
        count (EAGLE-3's scheme), unless the objective keeps them."""
        p_TS = p_TV[:, self.ids]
        kept_V = torch.zeros(p_TV.shape[1], dtype=torch.bool, device=p_TV.device).index_fill_(0, self.ids, True)
        # a target without any mass on the kept tokens does not count, but 0/0 would
        norm_T1 = p_TS.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p_TS.dtype).tiny)
        if objective.keeps_cut_rows:
            return p_TS / norm_T1, p_TS.amax(dim=-1) > 0
        return p_TS / norm_T1, kept_V[p_TV.argmax(dim=-1)]

    def loss(
        self, hidden_TH: Tensor, step: int, routed: Tensor | None, p_TV: Tensor, objective: Objective = KL
    ) -> Tensor:
        # on all of its ids at every step: a prefix of them is only a cheaper look at the same rows
        targets_TS, counts_T = self.training_targets(p_TV, objective)
        return objective.of(self.project(hidden_TH, "weight"), targets_TS) * counts_T

    def cost(self, rows: int, step: int = 0, scored: float | None = None) -> HeadCost:
        size = self.size_at(step)
        product = dense_cost(rows, self.weight, size)
        return product._replace(bytes=product.bytes + size * self.ids.element_size())
