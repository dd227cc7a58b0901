"""SLiM: the tree of the likeliest hypotheses, made anew at every step from Medusa's candidates and bigram correlations.
EAGLE-3's candidates are chosen by the same score (slim_pruner.py).

score(x_1 .. x_j) = prod p(x_i | h) * prod r(x_{i-1}, x_i), x_0 the root; r(x, y) = p(x, y) / (p(x) p(y)) from counts of
neighbouring tokens in the target's answers. The K best hypotheses of all lengths are kept, and all of their beginnings:
r is unbounded, so that a long path can outrank them. Scores are logarithms and unnormalised on purpose.

h has told both heads of a pair what is coming, which r, counted without it, tells once more; an exponent below 1 on r
(`strength`, not in the paper) takes the excess away.

B = requests, D = draft positions, k = candidates of a position, K = hypotheses, N = nodes with the root, V =
vocabulary, P = counted pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from rayspec_kernels.slim_posterior import slim_posterior
from rayspec_kernels.slim_posterior.correlations import Correlations
from sglang_ext.settings import Settings, require
from sglang_ext.trees.base import Draft, Embed, HiddenDrafter, Pick, Proposer, PruningTree, TreeOptions, most_likely
from sglang_ext.trees.slim_pruner import SlimPruner

UNSEEN = ("zero", "one", "smoothed")


@dataclass(frozen=True, kw_only=True)
class SlimScore(Settings):
    """`hypotheses`: K. `correlation`: false takes r = 1. `unseen`: r of a pair that was not counted: zero (the formula;
    such a path is never verified), one, or smoothed, which adds `smoothing` to the count of every pair. `strength`:
    exponent of r, 1 in the paper. `length_bonus`: lambda of a factor exp(lambda j) on a hypothesis of j tokens."""

    hypotheses: int = 20
    correlation: bool = True
    unseen: str = "one"
    smoothing: float = 0.01
    strength: float = 1.0
    length_bonus: float = 0.0

    def __post_init__(self) -> None:
        require(self.hypotheses >= 1, "hypotheses", self.hypotheses, "at least 1")
        require(self.unseen in UNSEEN, "unseen", self.unseen, f"one of {', '.join(UNSEEN)}")
        require(self.smoothing > 0.0, "smoothing", self.smoothing, "above 0")
        if self.strength <= 0.0:
            raise ValueError(f"strength must be above 0, got {self.strength}; correlation: false takes r = 1")


@dataclass(frozen=True, kw_only=True)
class SlimOptions(SlimScore, TreeOptions):
    """`pairs`: how many were counted."""

    kind: ClassVar[str] = "slim"

    pairs: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs < 0:
            raise ValueError(f"pairs must be at least 0, got {self.pairs}")
        if self.correlation and not self.pairs:
            raise ValueError(
                "correlation needs counted pairs; make them with rayspec calibrate (rule bigram), or set "
                "correlation: false"
            )


class SlimTree(PruningTree):
    """The counts are a CSR matrix [V, V]: row x holds how often each y followed x."""

    Options = SlimOptions
    options: SlimOptions
    bigram_indptr: Tensor
    bigram_ids: Tensor
    bigram_counts: Tensor

    def __init__(self, options: SlimOptions, vocab_size: int) -> None:
        super().__init__()
        self.options, self.vocab_size = options, vocab_size
        self.register_buffer("bigram_indptr", torch.full((vocab_size + 1,), -1, dtype=torch.int64))
        self.register_buffer("bigram_ids", torch.full((options.pairs,), -1, dtype=torch.int32))
        self.register_buffer("bigram_counts", torch.full((options.pairs,), -1, dtype=torch.int32))
        if not options.pairs:
            self.bigram_indptr.zero_()

    @classmethod
    def from_options(cls, options: SlimOptions, vocab_size: int) -> Self:
        return cls(options, vocab_size)

    @classmethod
    def with_counts(cls, options: SlimOptions, indptr: Tensor, ids: Tensor, counts: Tensor) -> Self:
        """A tree with the pair counts of a CSR matrix [V, V]. Raises ValueError where it is none."""
        tree = cls(options, len(indptr) - 1)
        tree.bigram_indptr.copy_(indptr)
        tree.bigram_ids.copy_(ids)
        tree.bigram_counts.copy_(counts)
        tree.check()
        return tree

    def check(self) -> None:
        indptr, V = self.bigram_indptr, self.vocab_size
        steps = indptr[1:] - indptr[:-1]
        ends = (int(indptr[0]), int(indptr[-1]))
        if ends != (0, self.options.pairs) or bool((steps < 0).any()):
            raise ValueError(f"draft_tree.bigram_indptr must ascend from 0 to {self.options.pairs}, got {ends}")
        key = self._keys()
        ids_fit = not len(key) or 0 <= int(self.bigram_ids.min()) <= int(self.bigram_ids.max()) < V
        if not ids_fit or bool((key[1:] <= key[:-1]).any()):
            raise ValueError(f"draft_tree.bigram_ids must ascend within each row and be in 0..{V - 1}")
        if bool((self.bigram_counts < 1).any()):
            raise ValueError("draft_tree.bigram_counts must be at least 1")

    def _keys(self) -> Tensor:
        """x V + y of every counted pair, int64, ascending."""
        rows = torch.arange(self.vocab_size, device=self.bigram_ids.device)
        x = rows.repeat_interleave(self.bigram_indptr[1:] - self.bigram_indptr[:-1])
        return x * self.vocab_size + self.bigram_ids.long()

    def correlations(self) -> Correlations:
        """log r of every pair, with its exponent, computed in float64."""
        s, V, key = self.options, self.vocab_size, self._keys()
        if not s.correlation:
            return Correlations.none(V, key.device)
        added = s.smoothing if s.unseen == "smoothed" else 0.0
        counts = self.bigram_counts.double()
        zeros_V = torch.zeros(V, dtype=torch.float64, device=key.device)
        x_V = zeros_V.index_add(0, key // V, counts) + added * V
        y_V = zeros_V.index_add(0, key % V, counts) + added * V
        log_n = x_V.sum().log()
        log_r = (counts + added).log() + log_n - x_V.log()[key // V] - y_V.log()[key % V]
        if s.unseen == "smoothed":
            first_V, second_V = -x_V.log(), math.log(added) + log_n - y_V.log()
        else:
            unseen = float("-inf") if s.unseen == "zero" else 0.0
            first_V, second_V = zeros_V, zeros_V + unseen
        return Correlations(key, *((s.strength * x).float() for x in (log_r, first_V, second_V)))

    def most_nodes(self, draft_steps: int, topk: int) -> int:
        everything = sum(topk**depth for depth in range(1, draft_steps + 1))
        return min(everything, draft_steps * self.options.hypotheses) + 1

    def fewest_nodes(self, draft_steps: int) -> int:
        return draft_steps + 1  # the nodes of one whole hypothesis

    def fit(self, draft_steps: int, topk: int, num_nodes: int, device: torch.device) -> SlimProposer:
        _check_room(draft_steps, num_nodes)
        return SlimProposer(self.options, self.correlations().to(device), draft_steps, topk, num_nodes)

    def pruner(self, draft_steps: int, topk: int, num_nodes: int, device: torch.device) -> SlimPruner:
        _check_room(draft_steps, num_nodes)
        return SlimPruner(
            self.correlations().to(device),
            length_bonus=self.options.length_bonus,
            hypotheses=self.options.hypotheses,
            draft_steps=draft_steps,
            topk=topk,
            num_nodes=num_nodes,
        )


def _check_room(draft_steps: int, num_nodes: int) -> None:
    if num_nodes <= draft_steps:
        raise ValueError(
            f"a hypothesis of {draft_steps} draft steps and the root are {draft_steps + 1} nodes, but {num_nodes} are "
            "to be verified; raise num_draft_tokens, or lower draft_steps"
        )


class SlimProposer(Proposer):
    """Proposes trees of `num_nodes` nodes at most; what a step does not need is padding at the end."""

    def __init__(
        self, settings: SlimOptions, correlations: Correlations, draft_steps: int, topk: int, num_nodes: int
    ) -> None:
        self.options, self.correlations = settings, correlations
        self.draft_steps, self.topk, self.num_nodes = draft_steps, topk, num_nodes

    def rows_by_level(self) -> list[int]:
        return [1] * self.draft_steps

    def candidates_by_level(self) -> list[int]:
        return [self.topk] * self.draft_steps

    def propose(
        self, drafter: HiddenDrafter, hidden_BH: Tensor, root_B: Tensor, embed: Embed, pick: Pick = most_likely
    ) -> Draft:
        k, ids, log_p = self.topk, [], []
        own_BKH = drafter.begin(hidden_BH, self.draft_steps)
        for step in range(self.draft_steps):
            head = drafter.lm_head.at(step)
            routed = head.route(embed(root_B), hidden_BH, step) if head.routes else None
            picked = pick(head, drafter.state(step, own_BKH[:, step], None), step, k, routed)
            assert picked.log_p_Tk is not None, "a tree has two candidates of a position at least"
            ids.append(picked.token_ids_Tk)
            log_p.append(picked.log_p_Tk)
        return self.of_candidates(root_B, torch.stack(ids, dim=1), torch.stack(log_p, dim=1))

    def of_candidates(self, root_B: Tensor, ids_BDk: Tensor, log_p_BDk: Tensor) -> Draft:
        """The tree of candidates with their log-probabilities."""
        s = self.options
        found = slim_posterior(
            root_B, ids_BDk, log_p_BDk, self.correlations, s.length_bonus, s.hypotheses, self.num_nodes
        )
        return Draft(*found)
