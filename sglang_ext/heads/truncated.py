"""A head over a fixed part of the vocabulary: FR-Spec, VocabTrim, BCL, and EAGLE-3's own reduced head.

The kinds of the literature differ in how the ids were chosen (rayspec.calibration) and in whether the rows were
trained with the truncation (VocabTrim-T, BCL) or taken from a trained full head; the head is the same.
T = rows, H = hidden, V = vocabulary, S = kept tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from rayspec_kernels.common.best import Best
from rayspec_kernels.head_topk import head_topk
from sglang_ext.heads.base import Candidates, DraftHead, HeadConfig, HeadCost, Shard, dense_cost, even_rows
from sglang_ext.heads.losses import KL, Objective


@dataclass(frozen=True, kw_only=True)
class TruncatedConfig(HeadConfig):
    """`step_sizes` (PA-FR): how many of the ids, most frequent first, are scored at draft step 0, 1, ...; the last
    entry holds for all later steps. None: all of them at every step, sorted by id."""

    size: int
    step_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.size <= self.vocab_size:
            raise ValueError(f"draft_head.size must be in 1..{self.vocab_size} (the vocabulary), got {self.size}")
        if self.step_sizes is not None:
            object.__setattr__(self, "step_sizes", tuple(self.step_sizes))  # a list in JSON and YAML
            if not self.step_sizes or not all(1 <= n <= self.size for n in self.step_sizes):
                raise ValueError(
                    f"draft_head.step_sizes must be a list of sizes in 1..{self.size} (size), "
                    f"got {list(self.step_sizes)}"
                )

    def size_at(self, step: int) -> int:
        return self.size if self.step_sizes is None else self.step_sizes[min(step, len(self.step_sizes) - 1)]


class TruncatedHead(DraftHead):
    """`weight` [S, H] holds the rows of the target ids `ids` [S]."""

    kind = "truncated"
    projections = ("weight",)
    taken_over = ("weight",)
    Config = TruncatedConfig
    config: TruncatedConfig
    ids: Tensor

    def __init__(self, config: TruncatedConfig) -> None:
        super().__init__(config)
        self.weight = self.new_parameter(config.size, config.hidden_size)
        self.register_buffer("ids", torch.full((config.size,), -1))

    @classmethod
    def complete(cls, options: Mapping[str, Any], artifacts: Mapping[str, Tensor]) -> dict[str, Any]:
        """An absent `size` is that of the calibration: all of its ids."""
        if "size" in options:
            return dict(options)
        if "ids" not in artifacts:
            found = f"those named hold {', '.join(sorted(artifacts))} and no ids" if artifacts else "none are named"
            raise ValueError(
                f"draft_head.size is absent, which leaves it to the artifacts, but {found}; write a size, or name as "
                "artifacts what rayspec calibrate made by a rule that chooses tokens (bcl, vocabtrim, frspec)"
            )
        return {**options, "size": len(artifacts["ids"])}

    @classmethod
    def check_artifacts(cls, config: TruncatedConfig, artifacts: Mapping[str, Tensor]) -> None:
        if "ids" not in artifacts or len(artifacts["ids"]) < config.size:
            found = len(artifacts.get("ids", ()))
            raise ValueError(
                f"a truncated head of size {config.size} needs as many ids, got {found}; choose them with "
                "rayspec calibrate and name its output as draft_head's artifacts"
            )

    @classmethod
    def from_target(cls, config: TruncatedConfig, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        """`artifacts["ids"]`: at least `size` target ids, the most useful first."""
        cls.check_artifacts(config, artifacts)
        head = cls(config)
        ids_S = artifacts["ids"][: config.size].long()
        head.ids.copy_(ids_S.sort().values if config.step_sizes is None else ids_S)
        head.check()
        head.weight.data.copy_(target_head_VH[head.ids])
        return head

    def check(self, stop_ids: Iterable[int] = ()) -> None:
        V = self.config.vocab_size
        distinct, counts = self.ids.unique(return_counts=True)
        wrong = distinct[(distinct < 0) | (distinct >= V) | (counts > 1)]
        if len(wrong):
            times = int(counts[distinct == wrong[0]])
            raise ValueError(
                f"the ids of a truncated head must be distinct and in 0..{V - 1}, got {int(wrong[0])}"
                f"{f', which is there {times} times' if times > 1 else ''}; calibrate it again"
            )
        smallest = min(self.config.step_sizes or (self.config.size,))
        missing = sorted(set(stop_ids) - set(self.ids[:smallest].tolist()))
        if missing:
            raise ValueError(
                f"the truncated head of {smallest} ids lacks the stop tokens {missing}, so its drafts could never end; "
                "calibrate it again with the tokenizer and generation config of this target"
            )

    def fewest_candidates(self, draft_steps: int) -> int:
        return min(self.config.size_at(step) for step in range(draft_steps))

    def scored(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Tensor:
        return torch.full((len(hidden_TH),), self.config.size_at(step), device=hidden_TH.device)

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        size = self.config.size_at(step)
        return Candidates(self.project(hidden_TH, "weight", size), self.ids[:size])

    def fused(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Best:
        size = self.config.size_at(step)
        return head_topk(hidden_TH, self.stored("weight", size), k, self.ids[:size])

    def shard(self, rank: int, ranks: int) -> Shard | None:
        if self.config.weight_format is not None or self.config.step_sizes is not None or self.config.size < ranks:
            return None
        rows = even_rows(self.config.size, ranks)
        own = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
        part = self.with_rows(replace(self.config, size=rows[rank]), weight=self.weight[own], ids=self.ids[own])
        return Shard(part, 0, rows, rows[rank], self.ids)

    def as_matrix(self) -> tuple[Tensor, Tensor] | None:
        return None if self.config.step_sizes else (self.all_rows("weight"), self.ids)

    def pack(self) -> None:
        self._packed = {}
        for size in set(self.config.step_sizes or (self.config.size,)):
            self.pack_rows("weight", size)

    def training_targets(self, p_TV: Tensor, objective: Objective = KL) -> tuple[Tensor, Tensor]:
        """The target's law over the kept tokens, renormalised; rows whose likeliest token is not kept do not count
        (EAGLE-3's scheme), unless the objective keeps them."""
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
        size = self.config.size_at(step)
        product = dense_cost(rows, self.weight, size)
        return product._replace(bytes=product.bytes + size * self.ids.element_size())
