"""Every kind of draft head with its variants, small enough to be checked by brute force.

T = rows, H = hidden, V = vocabulary. Sizes are odd where a size could be taken for another, clusters are uneven, and
the ids of a truncated head come in no order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_ext.drafters.eagle3 import Eagle3Config
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.heads import Candidates, DraftHead, head_from_target, parse_head
from sglang_ext.heads.base import NO_TOKEN

V, H = 53, 24
TAPS = (2, 4, 5)
STOPS = (0, 38)
STEPS = (0, 1, 2, 6)  # budgets and step sizes differ
CLUSTER_SIZES = {11: [1, 4, 5, 6, 4, 5, 6, 4, 5, 6, 4], 5: [1, 9, 17, 12, 11]}  # of the routed ones; 3 are pinned

TRUNCATED = {"kind": "truncated", "size": 19, "step_sizes": None}
SPECVOCAB = {"kind": "specvocab", "rank": 5, "size": 13}
DYNASPEC = {
    "kind": "dynaspec", "clusters": 11, "union": False, "first": 3, "later": 2, "rule": "rounded", "router_width": 10
}  # fmt: skip
CORAL = {"kind": "coral", "clusters": 5, "union": False, "top": 2}
RDK = {"kind": "rdk", "base": TRUNCATED, "neighbours": 3, "self_weight": 0.8}
# every option is spelled out, as a checkpoint has it
SPECS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "full_biased": {"kind": "full", "bias": True},
    "slimspec": {"kind": "slimspec", "rank": 5},
    "truncated": TRUNCATED,
    "truncated_by_step": {**TRUNCATED, "step_sizes": [19, 11, 5]},
    "truncated_to_all": {**TRUNCATED, "size": V},
    "specvocab": SPECVOCAB,
    "specvocab_all": {**SPECVOCAB, "size": V},
    "dynaspec": DYNASPEC,
    "dynaspec_union": {**DYNASPEC, "union": True},
    "dynaspec_request": {**DYNASPEC, "union": "request"},
    "dynaspec_all": {**DYNASPEC, "first": 11, "later": 11, "rule": "fixed"},
    "coral": CORAL,
    "coral_union": {**CORAL, "union": True},
    "coral_request": {**CORAL, "union": "request"},
    "rdk_truncated": RDK,
    "rdk_dynaspec": {**RDK, "base": DYNASPEC},
    "rdk_dynaspec_request": {**RDK, "base": {**DYNASPEC, "union": "request"}},
    "rdk_full": {**RDK, "base": {"kind": "full"}},
}


def toy_body(hidden_size: int = H, vocab_size: int = V) -> Eagle3Config:
    return Eagle3Config(
        hidden_size=hidden_size,
        target_hidden_size=hidden_size,
        intermediate_size=40,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=vocab_size,
        tap_layers=TAPS,
    )


def toy_target(hidden_size: int = H, vocab_size: int = V) -> TargetInfo:
    return TargetInfo(
        name="toy", hidden_size=hidden_size, vocab_size=vocab_size, tokenizer_sha256="abc", tap_layers=TAPS
    )


def seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TARGET_HEAD_VH = seeded(V, H, seed=0)


def ranked_ids() -> Tensor:
    """All ids, the stop ids first, the rest shuffled."""
    shuffled = torch.randperm(V, generator=torch.Generator().manual_seed(2)).tolist()
    return torch.tensor([*STOPS, *(v for v in shuffled if v not in STOPS)])


def cluster_map(clusters: int) -> Tensor:
    cluster_of = torch.zeros(V, dtype=torch.int64)
    sizes = torch.tensor(CLUSTER_SIZES[clusters])
    cluster_of[ranked_ids()[3:]] = torch.arange(1, clusters + 1).repeat_interleave(sizes)
    return cluster_of


def make_head(spec: dict[str, Any], target_head_VH: Tensor = TARGET_HEAD_VH) -> DraftHead:
    """As calibrated and untrained, in float32."""
    artifacts = {"ids": ranked_ids()}
    clusters = spec.get("base", spec).get("clusters")
    return head_from_target(
        parse_head(spec), target_head_VH, artifacts | ({"cluster_of": cluster_map(clusters)} if clusters else {})
    )


class Rows(NamedTuple):
    """What a head is asked about."""

    hidden_TH: Tensor
    embed_TH: Tensor
    feature_TH: Tensor

    @classmethod
    def draw(cls, T: int, seed: int = 1, hidden_size: int = H) -> "Rows":
        return cls(*(seeded(T, hidden_size, seed=10 * seed + i) for i in range(3)))

    def to(self, kind: Any) -> "Rows":
        return Rows(*(x.to(kind) for x in self))

    def pick(self, rows: slice) -> "Rows":
        return Rows(*(x[rows] for x in self))

    def routed(self, head: DraftHead, step: int) -> Tensor | None:
        return head.route(self.embed_TH, self.feature_TH, step)

    def candidates(self, head: DraftHead, step: int = 0) -> Candidates:
        return head.candidates(self.hidden_TH, step, self.routed(head, step))

    @torch.no_grad()
    def distribution(self, head: DraftHead, step: int = 0, temperature: float | None = None) -> Tensor:
        """q [T, V] in target ids."""
        temperature_T1 = None if temperature is None else torch.full((len(self.hidden_TH), 1), temperature)
        q_TS, ids = head.distribution(self.hidden_TH, step, self.routed(head, step), temperature_T1)
        if ids is None:
            return q_TS
        return torch.zeros(len(q_TS), V).scatter_add_(1, ids.expand_as(q_TS), q_TS)


def ids_of(candidates: Candidates) -> list[list[int]]:
    """The target ids of each row's columns, padding left out."""
    logits_TS, ids = candidates
    ids_TS = (torch.arange(logits_TS.shape[1]) if ids is None else ids).expand_as(logits_TS)
    return [row[kept].tolist() for row, kept in zip(ids_TS, logits_TS > NO_TOKEN / 2, strict=True)]


def some_distribution(T: int, seed: int = 3) -> Tensor:
    """A target's distribution, float32 [T, V]; peaked as one is."""
    return (2 * seeded(T, V, seed=seed)).softmax(dim=-1).float()


def cross_entropy(logits: Tensor, p: Tensor) -> Tensor:
    """Of each row, in plain torch."""
    return -(p * logits.log_softmax(dim=-1)).sum(dim=-1)
