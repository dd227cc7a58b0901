"""Heads that score whole clusters of the vocabulary: what DynaSpec and CORAL share.

`cluster_of` [V] maps every token to a cluster. Cluster 0 is pinned: its tokens (all stop tokens are among them) are
scored for every row. A router scores the clusters 1..M, and each row's best ones are scored too.
T = rows, H = hidden, V = vocabulary, M = routed clusters, m = chosen clusters, C = tokens of the largest one,
P = pinned tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

import torch
from torch import Tensor

from rayspec_kernels.common.best import Best
from rayspec_kernels.cpu.packed_linear import linear_of_rows
from rayspec_kernels.gather_dot.reference import MAX_ROWS
from rayspec_kernels.head_topk import head_topk
from rayspec_kernels.indexed_head import indexed_head
from rayspec_kernels.indexed_head.reference import Tiles
from rayspec_kernels.router_topk import union_tiles
from rayspec_kernels.router_topk.reference import most_tiles
from sglang_ext.heads.base import NO_TOKEN, Candidates, DraftHead, HeadCost, dense_cost, gather_cost
from sglang_ext.heads.config import HeadConfig
from sglang_ext.heads.quantized import QuantizedMatrix
from sglang_ext.settings import Count, one_of

# Of the vocabulary: a call that would gather more rows of the matrix than this reads all of it in order instead, which
# is faster from about there on (docs/heads.md).
MAX_GATHERED = 0.5
MAX_GATHERED_BESIDE_PACKED = 1 / 3  # on a CPU, where the packed copy multiplies faster than rows that are gathered
TILE = 64  # tokens of a cluster that a kernel scores at a time


@dataclass(frozen=True, kw_only=True, repr=False)
class ClusteredConfig(HeadConfig, ABC):
    """`union`: instead of its own clusters alone a row scores what the rows beside it have chosen, too: "request",
    those of the same request (DynaSpec's distribution on trees; a chain has one row), or true, all rows of the call.
    More tokens are in reach, and a row's distribution depends on these rows."""

    inference_options = HeadConfig.inference_options | {"union"}

    clusters: Count
    union: Annotated[bool | str, one_of((True, False, "request"))] = False

    @property
    def taken_over(self) -> tuple[str, ...]:
        return ("weight",)

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        super().check_sizes(hidden_size, vocab_size)
        if self.clusters > vocab_size:
            raise ValueError(f"draft_head.clusters must be in 1..{vocab_size} (the vocabulary), got {self.clusters}")

    def check_artifacts(self, artifacts: Mapping[str, Tensor], vocab_size: int) -> None:
        if "cluster_of" not in artifacts:
            raise ValueError(
                f"a head of kind '{self.kind}' needs a cluster map; make one with rayspec calibrate and name its "
                "output as the head's artifacts"
            )
        found = artifacts["cluster_of"]
        if tuple(found.shape) != (vocab_size,):
            raise ValueError(
                f"the cluster map must have one entry a token, [{vocab_size}], got {list(found.shape)}; "
                "calibrate it with this target's tokenizer"
            )
        if int(found.max()) != self.clusters:
            raise ValueError(
                f"the cluster map has {int(found.max())} clusters beside the pinned one, but draft_head.clusters is "
                f"{self.clusters}; set it to that, or calibrate again"
            )

    @abstractmethod
    def budget(self, step: int) -> int:
        """How many routed clusters a row scores at this draft step, 1..clusters."""


class ClusteredHead(DraftHead):
    """`weight` [V, H]: the full head. Subclasses hold the router's parameters and implement `cluster_scores`."""

    gathered = ("weight",)
    maps = ("cluster_of",)
    config: Any
    cluster_of: Tensor
    _pinned_P: Tensor
    _members_MC: Tensor  # token ids of each routed cluster, ascending, padded with -1
    _listed_V: Tensor  # int32: all token ids, cluster by cluster
    _starts: Tensor  # int64 [M + 2]: where each cluster begins in that list, and its end

    def __init__(self, config: ClusteredConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size)
        self.weight = self.new_parameter(vocab_size, hidden_size)
        self.register_buffer("cluster_of", torch.full((vocab_size,), -1))
        for name in ("_pinned_P", "_members_MC", "_listed_V", "_starts"):  # laid out by index_clusters
            self.register_buffer(name, torch.empty(0, dtype=torch.int64), persistent=False)
        self._is_packed = False  # no graph captures what is packed, and wants a fixed shape
        self._copied: Tensor  # memory of `_dot`, once it is packed
        self._tiles_of: list[int] = []  # tiles that the pinned cluster and so many others can need
        self.register_load_state_dict_post_hook(lambda head, _: head.index_clusters())

    @classmethod
    def from_target(cls, config: Any, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        """`artifacts["cluster_of"]`: int [V] in 0..clusters, 0 for the pinned tokens."""
        head = cls.unloaded(config, target_head_VH)
        config.check_artifacts(artifacts, head.vocab_size)
        head.weight.data.copy_(target_head_VH)
        head.cluster_of.copy_(artifacts["cluster_of"])
        head.index_clusters()
        head.init_router()
        return head

    @abstractmethod
    def init_router(self) -> None:
        """Initialise the router's parameters (in place)."""

    def index_clusters(self) -> None:
        """Lay out the members of each cluster; again whenever `cluster_of` changed. Raises ValueError."""
        M = self.config.clusters
        cluster_of, order_V = self.cluster_of.sort(stable=True)  # ids ascend within a cluster
        counts = torch.bincount(cluster_of.clamp(min=0), minlength=M + 1)
        outside_V = (self.cluster_of < 0) | (self.cluster_of > M)
        if bool(outside_V.any()) or bool((counts[1:] == 0).any()):
            if bool(outside_V.any()):
                token = int(outside_V.nonzero()[0])
                found = f"token {token} is in cluster {int(self.cluster_of[token])}"
            else:
                found = f"cluster {int((counts[1:] == 0).nonzero()[0]) + 1} has no token"
            raise ValueError(
                f"the cluster map is no partition of the vocabulary into {M} clusters and the pinned one: {found}; "
                f"every token needs a cluster in 0..{M} and every routed cluster a token; calibrate it again"
            )
        pinned, routed = int(counts[0]), counts[1:]
        self._pinned_P = order_V[:pinned].contiguous()
        self._listed_V = order_V.int()
        self._starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self._tiles_of = [most_tiles(self._starts, TILE, clusters) for clusters in range(M + 1)]
        place_C = torch.arange(int(routed.max()), device=order_V.device)
        first_M = pinned + routed.cumsum(0) - routed
        index_MC = (first_M[:, None] + place_C).clamp(max=len(order_V) - 1)
        self._members_MC = torch.where(place_C < routed[:, None], order_V[index_MC], -1)

    def check(self, stop_ids: Iterable[int] = ()) -> None:
        super().check(stop_ids)
        loose = sorted(set(stop_ids) - set(self._pinned_P.tolist()))
        if loose:
            raise ValueError(
                f"the stop tokens {loose} are not in the pinned cluster 0, so a router could make them unreachable; "
                "calibrate the clusters again with the tokenizer and generation config of this target"
            )

    def take_maps(self, maps: Mapping[str, Tensor]) -> None:
        self.cluster_of = maps["cluster_of"]
        self.index_clusters()

    def fewest_candidates(self, draft_steps: int) -> int:
        sizes_M = (self._members_MC >= 0).sum(dim=1).sort().values
        budget = min(self.config.budget(step) for step in range(draft_steps))
        return len(self._pinned_P) + int(sizes_M[:budget].sum())

    @abstractmethod
    def cluster_scores(self, hidden_TH: Tensor, routed: Tensor | None) -> Tensor:
        """Router logits [T, M]."""

    def _groups(self, rows: int, step: int) -> int:
        """How many groups of equally many rows, side by side, each share what they have chosen."""
        if self.config.union == "request":
            of_a_request = self.rows_of_a_request(step)
            assert rows % of_a_request == 0, "a draft step has as many rows of each request as `expect_rows` was told"
            return rows // of_a_request
        return 1 if self.config.union else rows

    def shortlist_size(self, step: int) -> int | None:
        """Clusters have unequal sizes, so that nothing but all of them is a number known before."""
        return self.vocab_size if self.config.budget(step) == self.config.clusters else None

    def scored(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Tensor:
        T, budget = len(hidden_TH), self.config.budget(step)
        if budget == self.config.clusters:
            return super().scored(hidden_TH, step, routed)
        chosen_Tm = self.cluster_scores(hidden_TH, routed).topk(budget, dim=-1).indices
        return _each_row(self._scored_by(chosen_Tm, self._groups(T, step)), T)

    def _scored_by(self, chosen_Tm: Tensor, groups: int) -> Tensor:
        """How many tokens each group of rows scores, [G], in few operations where every row is one."""
        sizes_M = self._starts[2:] - self._starts[1:-1]
        if groups == len(chosen_Tm):
            return len(self._pinned_P) + sizes_M[chosen_Tm].sum(dim=1)
        is_chosen_GM = _chosen(chosen_Tm, groups, self.config.clusters, sizes_M.dtype)
        return len(self._pinned_P) + (is_chosen_GM * sizes_M).sum(dim=1)

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        T, budget = len(hidden_TH), self.config.budget(step)
        if budget == self.config.clusters:
            self._note_all(T, step)
            return Candidates(self.project(hidden_TH, "weight"), None)
        groups = self._groups(T, step)
        scores_TM = self.cluster_scores(hidden_TH, routed)
        with self.choosing():
            chosen_Tm = scores_TM.topk(budget, dim=-1).indices
        if self.noted is not None:
            self.note(T, step, self._scored_by(chosen_Tm, groups))
        if self._is_packed:
            return self._score_chosen(hidden_TH, chosen_Tm, groups)
        if self._reads_all(T, groups, budget):
            return self._score_all(hidden_TH, chosen_Tm, groups)
        if groups == T:
            return self._score_rows(hidden_TH, chosen_Tm)
        return self._score_union(hidden_TH, chosen_Tm, groups)

    def fused(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Best | None:
        """The union of all rows' clusters, each tile of which is read where it lies, once, and counts for the groups of
        rows that chose its cluster."""
        T, budget = len(hidden_TH), self.config.budget(step)
        if budget == self.config.clusters:
            self._note_all(T, step)
            return head_topk(hidden_TH, self.stored("weight"), k)
        scores_TM = self.cluster_scores(hidden_TH, routed)
        # Enough for rows that all choose differently. Where that is everything, it is still no more of the matrix than
        # `_score_all` reads, and no logits are written.
        num_tiles = self._tiles_of[self._most_clusters(T, 1, budget)]
        tiles = union_tiles(scores_TM, budget, self._starts, TILE, num_tiles, self._groups(T, step))
        if self.noted is not None:
            self.note(T, step, _scored_in(tiles))
        return indexed_head(hidden_TH, self.stored("weight"), self._listed_V, k, tiles)

    def _note_all(self, rows: int, step: int) -> None:
        """The whole vocabulary, as the budget of one position may be where those of others are not."""
        if self.noted is not None:
            self.note(rows, step, self._starts[-1:])

    def _most_clusters(self, rows: int, groups: int, budget: int) -> int:
        """The most clusters that a group can choose: its rows may all choose different ones."""
        return min(self.config.clusters, rows // max(groups, 1) * budget)

    def _reads_all(self, rows: int, groups: int, budget: int) -> bool:
        """Whether so many rows, in groups, read the whole matrix: decided by these numbers and the largest cluster
        alone, as shapes are."""
        P, C = len(self._pinned_P), self._members_MC.shape[1]
        return groups * (P + self._most_clusters(rows, groups, budget) * C) > MAX_GATHERED * self.vocab_size

    def _score_rows(self, hidden_TH: Tensor, chosen_Tm: Tensor) -> Candidates:
        """Each row its own clusters."""
        with self.choosing():
            members_Tn = self._members_MC[chosen_Tm].flatten(1)
            ids_Tn = torch.cat([self._pinned_P.expand(len(hidden_TH), -1), members_Tn], dim=1)
        logits_Tn = self.gather_dot(hidden_TH, "weight", ids_Tn.clamp(min=0))
        return Candidates(logits_Tn.masked_fill(ids_Tn < 0, NO_TOKEN), ids_Tn.clamp(min=0))

    def _score_union(self, hidden_TH: Tensor, chosen_Tm: Tensor, groups: int) -> Candidates:
        """Each row the clusters of its group, whose rows of the matrix are gathered once."""
        T, budget = chosen_Tm.shape
        with self.choosing():
            is_chosen_GM = _chosen(chosen_Tm, groups, self.config.clusters, hidden_TH.dtype)
            kept_Gu, union_Gu = is_chosen_GM.topk(self._most_clusters(T, groups, budget), dim=-1)
            members_GuC = torch.where(kept_Gu[:, :, None] > 0, self._members_MC[union_Gu], -1)
            ids_Gn = torch.cat([self._pinned_P.expand(groups, -1), members_GuC.flatten(1)], dim=1)
        rows_nH = self.rows_of("weight", ids_Gn.clamp(min=0).flatten()).to(hidden_TH.dtype)
        rows_GnH = rows_nH.view(groups, -1, self.hidden_size)
        logits_Tn = (hidden_TH.view(groups, T // groups, self.hidden_size) @ rows_GnH.mT).flatten(0, 1)
        # ids of padding repeat token 0, which one dimension of ids does not allow
        ids_Tn = _each_row(ids_Gn, T)
        return Candidates(logits_Tn.masked_fill(ids_Tn < 0, NO_TOKEN), ids_Tn.clamp(min=0))

    def _score_chosen(self, hidden_TH: Tensor, chosen_Tm: Tensor, groups: int) -> Candidates:
        """The clusters that any row of the call has chosen, without padding and gathered once; of which each row's rest
        is then struck out. What has been chosen decides whether that is worth it, and not what might have been."""
        with self.choosing():
            is_read_M1 = torch.ones(self.config.clusters + 1, dtype=torch.bool, device=chosen_Tm.device)
            is_read_M1[1:] = _chosen(chosen_Tm, 1, self.config.clusters, torch.bool)[0]
            read = int(self._starts.diff()[is_read_M1].sum())
        share = MAX_GATHERED_BESIDE_PACKED if ("weight", None) in self._packed else MAX_GATHERED
        if read > share * self.vocab_size:
            return self._score_all(hidden_TH, chosen_Tm, groups)
        with self.choosing():
            ids_n = is_read_M1.index_select(0, self.cluster_of).nonzero().flatten()
        logits_Tn = torch.cat([self._dot(hidden_TH, ids) for ids in ids_n.split(MAX_ROWS)], dim=1)
        if groups == 1:
            return Candidates(logits_Tn, ids_n)
        return Candidates(self._struck_out(logits_Tn, chosen_Tm, groups, self.cluster_of[ids_n]), ids_n)

    def _dot(self, hidden_TH: Tensor, ids_n: Tensor) -> Tensor:
        """The dot products [T, n] of all rows with `MAX_ROWS` rows of the matrix at most."""
        if isinstance(self.weight, QuantizedMatrix):
            rows_nH = self.weight.rows(ids_n).to(hidden_TH.dtype)
        else:  # into memory that is there: new pages took longer than the copy
            rows_nH = self._copied[: len(ids_n)]
            torch.index_select(self.weight.detach(), 0, ids_n, out=rows_nH)
        return linear_of_rows(hidden_TH, rows_nH)

    def _score_all(self, hidden_TH: Tensor, chosen_Tm: Tensor, groups: int) -> Candidates:
        """The whole vocabulary, of which what was not chosen is then struck out."""
        logits_TV = self.project(hidden_TH, "weight")
        return Candidates(self._struck_out(logits_TV, chosen_Tm, groups, self.cluster_of), None)

    def _struck_out(self, logits_Tn: Tensor, chosen_Tm: Tensor, groups: int, cluster_of_n: Tensor) -> Tensor:
        """In place: columns whose cluster no row of a group has chosen hold no token for the group's rows."""
        with self.choosing():
            limit_GM1 = logits_Tn.new_full((groups, self.config.clusters + 1), NO_TOKEN)
            limit_GM1[:, 0] = torch.inf
            of_a_group = chosen_Tm.shape[1] * len(chosen_Tm) // max(groups, 1)
            limit_GM1.scatter_(1, (chosen_Tm + 1).view(groups, of_a_group), torch.inf)
            # several times faster than masked_fill
            limit_Gn = limit_GM1.index_select(1, cluster_of_n)
        logits_Grn = logits_Tn.view(groups, len(logits_Tn) // max(groups, 1), logits_Tn.shape[1])
        return logits_Grn.clamp_(max=limit_Gn[:, None]).flatten(0, 1)

    def pack(self) -> None:
        super().pack()
        self.pack_rows("weight", None)
        self._is_packed = True
        if not isinstance(self.weight, QuantizedMatrix):
            with torch.inference_mode(False):  # passes in any mode write to it
                self._copied = torch.empty(MAX_ROWS, self.hidden_size, dtype=self.weight.dtype)

    def cost(self, rows: int, step: int = 0, scored: float | None = None) -> HeadCost:
        """Cost of rows of one request, as the method counts it, with clusters of mean size that are all different where
        `scored` is not known: rows with clusters of their own gather them, or read the whole matrix where that is less;
        a union is read once. What a call reads really depends on what its rows choose."""
        c, budget = self.config, self.config.budget(step)
        if budget == c.clusters:
            return dense_cost(rows, self.weight)
        groups = 1 if c.union else rows
        if scored is None:
            pinned = len(self._pinned_P)
            scored = pinned + self._most_clusters(rows, groups, budget) * (self.vocab_size - pinned) // c.clusters
        if groups == 1 < rows:
            scoring = dense_cost(rows, self.weight, round(scored))
        else:
            ways = gather_cost(rows, self.weight, round(scored)), dense_cost(rows, self.weight)
            scoring = min(ways, key=lambda way: way.bytes)
        parts = [scoring, *(dense_cost(rows, getattr(self, name)) for name in self.projections)]
        return HeadCost(bytes=sum(part.bytes for part in parts), flops=sum(part.flops for part in parts))


def _chosen(chosen_Tm: Tensor, groups: int, clusters: int, dtype: torch.dtype) -> Tensor:
    """1 where some row of a group has chosen a cluster, else 0; [G, M]."""
    is_chosen_GM = torch.zeros(groups, clusters, dtype=dtype, device=chosen_Tm.device)
    width = chosen_Tm.shape[1] * len(chosen_Tm) // max(groups, 1)
    return is_chosen_GM.scatter_(1, chosen_Tm.reshape(groups, width), 1)


def _scored_in(tiles: Tiles) -> Tensor:
    """How many tokens of these tiles each group of rows scores, [G]."""
    count_t1 = tiles.ranges_t2[:, 1:]
    return (count_t1 if tiles.is_of_tG is None else count_t1 * tiles.is_of_tG).sum(dim=0)


def _each_row(values_G: Tensor, rows: int) -> Tensor:
    """What each of so many rows has of its group."""
    return values_G.repeat_interleave(rows // max(len(values_G), 1), dim=0)
