"""A draft head whose rows tensor-parallel ranks share, so that its time shrinks with them as that of SGLang's own does.

A rank finds the k best of its rows, and all ranks merge what they found (`common/shards.py`): k scores, k ids and a
normaliser of each row are exchanged instead of logits. Where a distribution is asked for, logits are gathered, as
SGLang gathers its own. Small heads, heads that are more than rows of one matrix, and heads in fewer bits every rank has
whole.
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
from sglang_ext.heads import DraftHead
from sglang_ext.heads.base import NO_TOKEN, Candidates, HeadCost, Proposal, Shard

MAX_EXACT = 2**24  # ids travel beside the scores as float32
# What a rank must no longer read for the exchange and the merge of a draft step to pay: about as much as a GPU reads in
# the time of their dozen small kernels. An estimate; no GPU has been asked yet.
MIN_SAVED_BYTES = 2**26


def shared_over_ranks(head: DraftHead) -> DraftHead:
    """This rank's share of a head, or the head where it is not shared."""
    parallel = get_parallel()
    # under attention of data-parallel ranks these have different rows, for which each needs the whole head
    if parallel.tp_size == 1 or parallel.attn_dp_enabled or head.vocab_size > MAX_EXACT:
        return head
    if head.cost(1).bytes * (parallel.tp_size - 1) / parallel.tp_size < MIN_SAVED_BYTES:
        return head
    shard = head.shard(parallel.tp_rank, parallel.tp_size)
    return head if shard is None else ShardedHead(head, shard, tensor_model_parallel_all_gather)


class ShardedHead(DraftHead):
    """`gather`: puts the last dimensions of all ranks' tensors, which have the same shape, side by side."""

    def __init__(self, whole: DraftHead, shard: Shard, gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__(whole.config, whole.hidden_size, whole.vocab_size)
        self.part, self.first_id, self.rows, self.own_rows = shard.head, shard.first_id, shard.rows, shard.own_rows
        self.register_buffer("ids", shard.ids, persistent=False)
        self.gather = gather

    @classmethod
    def from_target(cls, config: Any, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        raise NotImplementedError("a whole head is made and loaded, then shared")

    def pack(self) -> None:
        self.part.pack()

    def best(self, hidden_TH: Tensor, step: int, routed: Tensor | None = None) -> Tensor:
        return self.propose(hidden_TH, step, 1, routed).token_ids_Tk

    def propose(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None = None) -> Proposal:
        own = of_shard(Best(*self.part.propose(hidden_TH, step, min(k, self.own_rows), routed)), self.first_id, k)
        sent_T = torch.cat([own.scores_Bk, own.ids_Bk.float(), own.log_norm_B[:, None]], dim=1)
        parts = self.gather(sent_T).chunk(len(self.rows), dim=1)
        return Proposal(*merge_shards([Best(p[:, :k], p[:, k:-1].long(), p[:, -1]) for p in parts], k))

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        logits_TS = self.part.candidates(hidden_TH, step, routed).logits_TS
        widest = max(self.rows)
        parts = self.gather(pad(logits_TS, (0, widest - logits_TS.shape[1]), value=NO_TOKEN)).split(widest, dim=1)
        return Candidates(torch.cat([p[:, :n] for p, n in zip(parts, self.rows, strict=True)], dim=1), self.ids)

    def shortlist_size(self, step: int) -> int:
        return sum(self.rows)

    def cost(self, rows: int, step: int = 0, scored: float | None = None) -> HeadCost:
        return self.part.cost(rows, step, scored)
