"""A draft head whose rows tensor-parallel ranks share, so that its time shrinks with them as that of SGLang's own does.

A rank finds the k best of its rows, and all ranks merge what they found (`common/shards.py`): k scores, k ids and a
normaliser of each row are exchanged instead of logits. Where a distribution is asked for, logits are gathered, as
SGLang gathers its own. Small heads and heads that are more than rows of one matrix every rank has whole.
T = rows, S = the head's support, k = candidates.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from sglang.srt.distributed import tensor_model_parallel_all_gather
from sglang.srt.runtime_context import get_parallel
from torch import Tensor
from torch.nn.functional import pad

from rayspec_kernels.common.best import Best
from rayspec_kernels.common.shards import merge_shards, of_shard
from sglang_ext.adapter.longest_draft import LongestDraft
from sglang_ext.heads import DraftHead
from sglang_ext.heads.base import NO_TOKEN, Candidates, HeadCost, Proposal, Shard, token_ids
from sglang_ext.heads.by_position import PositionHeads

MAX_EXACT = 2**24  # columns travel beside the scores as float32
# What a rank must no longer read for the exchange and the merge of a draft step to pay: about as much as a GPU reads in
# the time of their dozen small kernels. An estimate; no GPU has been asked yet.
MIN_SAVED_BYTES = 2**26


def shared_over_ranks(head: DraftHead) -> DraftHead:
    """This rank's share of a head, or the head where it is not shared."""
    parallel = get_parallel()
    # under attention of data-parallel ranks these have different rows, for which each needs the whole head
    if parallel.tp_size == 1 or parallel.attn_dp_enabled or head.vocab_size > MAX_EXACT:
        return head
    steps = LongestDraft.of_server().steps
    read = sum(head.cost(1, step).bytes for step in range(steps)) / steps
    if read * (parallel.tp_size - 1) / parallel.tp_size < MIN_SAVED_BYTES:
        return head
    shard = head.shard(parallel.tp_rank, parallel.tp_size)
    return head if shard is None else ShardedHead(head, shard, tensor_model_parallel_all_gather)


def all_shared_over_ranks(heads: DraftHead | PositionHeads) -> DraftHead | PositionHeads:
    """This rank's share of a drafter's head, or of each of its heads."""
    if isinstance(heads, PositionHeads):
        return PositionHeads([shared_over_ranks(head) for head in heads])
    return shared_over_ranks(heads)


class ShardedHead(DraftHead):
    """`gather`: puts the last dimensions of all ranks' tensors, which have the same shape, side by side."""

    def __init__(self, whole: DraftHead, shard: Shard, gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__(whole.config, whole.hidden_size, whole.vocab_size)
        self.part, self.share, self.gather = shard.head, shard.share, gather
        # behind them what column -1 is, which stands for none
        ids_or_none = None if shard.ids is None else torch.cat([shard.ids, shard.ids.new_tensor([-1])])
        self.register_buffer("ids_or_none", ids_or_none, persistent=False)

    @classmethod
    def from_target(cls, config: Any, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        raise NotImplementedError("a whole head is made and loaded, then shared")

    def pack(self) -> None:
        self.part.pack()

    def best(self, hidden_TH: Tensor, step: int, routed: Tensor | None = None) -> Tensor:
        return self.propose(hidden_TH, step, 1, routed).token_ids_Tk

    def propose(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None = None) -> Proposal:
        share = self.share
        found = self.part.propose(hidden_TH, step, min(k, share.rows_of(share.rank, step)), routed)
        own = of_shard(Best(*found), share.rank, k, share.ranks)
        sent_T = torch.cat([own.scores_Bk, own.ids_Bk.float(), own.log_norm_B[:, None]], dim=1)
        parts = self.gather(sent_T).chunk(share.ranks, dim=1)
        best = merge_shards([Best(p[:, :k], p[:, k:-1].long(), p[:, -1]) for p in parts], k)
        return Proposal(best.scores_Bk, token_ids(best.ids_Bk, self.ids_or_none), best.log_norm_B)

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        logits_TS = self.part.candidates(hidden_TH, step, routed).logits_TS
        size, most = self.share.size_at(step), self.share.rows_of(0, step)
        gathered = self.gather(pad(logits_TS, (0, most - logits_TS.shape[1]), value=NO_TOKEN))
        in_order_TS = gathered.unflatten(1, (-1, most)).transpose(1, 2).flatten(1)
        return Candidates(in_order_TS[:, :size], None if self.ids_or_none is None else self.ids_or_none[:size])

    def fewest_candidates(self, draft_steps: int) -> int:
        return min(self.share.size_at(step) for step in range(draft_steps))

    def shortlist_size(self, step: int) -> int:
        return self.share.size_at(step)

    def cost(self, rows: int, step: int = 0, scored: float | None = None) -> HeadCost:
        return self.part.cost(rows, step, scored)
