"""Attention of the CPU platform in plain torch, for every pass that speculative decoding makes.

B = requests (or draft branches), Q = new tokens a request, S = longest context, A = query heads, K = key/value heads,
G = A / K, D = head dimension, T = all new tokens.

Every pass is the same computation: new tokens of a request attend to the slots of its context under a mask. The
passes differ only in the layout (which slots, which mask, which positions), which is made once a pass and used by all
layers. A layer may see a window of the context alone, and may have attention sinks.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.adapter.cpu.contracts import Contract

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# What SGLang's attention on CUDA (Triton, FA3) takes of a pass. It addresses requests and lengths as contiguous
# integers and the slots of a request as a row of the table, and stores keys at slots of any stride; keys and values
# themselves come from SGLang's own layers. N nodes of a verification, W branches of n draft steps, R x C the table.
_PASS = {"req_to_token": "int32 R C", "req_pool_indices": "integer B", "seq_lens": "integer B"}
DECODED = Contract("attention (decode)", {**_PASS, "out_cache_loc": "slot B strided"})
EXTENDED = Contract(
    "attention (extend)",
    {**_PASS, "extend_seq_lens": "integer B", "extend_prefix_lens": "integer B", "out_cache_loc": "slot T strided"},
)
DRAFTED = Contract(
    "attention (draft loop)", {**_PASS, "positions": "integer B*W", "out_cache_loc": "slot B*W*n strided"}
)
# the least mask is N x N of each request; the layout with a column for each token before them is larger
VERIFIED = Contract(
    "attention (verification)",
    {
        **_PASS,
        **{"draft_token": "int64 B*N", "positions": "int64 B*N", "custom_mask": "byte >=B*N*N"},
        "out_cache_loc": "slot B*N strided",
    },
)


@dataclass
class Segment:
    """Requests with equally many new tokens, computed in one call."""

    first: int  # where their tokens start among the T
    queries: int  # Q
    slots_BS: Tensor  # int64, padded with slot 0
    visible_BQS: Tensor | None  # bool; None where everything is visible
    at_BQ: Tensor  # position of each new token in its text
    slot_at_BS: Tensor  # position of what each slot holds, or [1, S] where it is the same for all requests
    _bias: dict[tuple[int, torch.dtype, int | None], Tensor] = field(default_factory=dict)

    def bias(self, groups: int, dtype: torch.dtype, window: int | None = None) -> Tensor | None:
        """Additive mask [B, 1, G * Q, S], made once for all layers of one kind; `window`: how many tokens back a layer
        sees, None for all."""
        if self.visible_BQS is None and window is None:
            return None
        key = (groups, dtype, window)
        if key not in self._bias:
            visible_BQS = self._visible(window)
            zero = torch.zeros(visible_BQS.shape, dtype=dtype, device=visible_BQS.device)
            bias_BQS = zero.masked_fill_(~visible_BQS, float("-inf"))
            self._bias[key] = bias_BQS.repeat(1, groups, 1)[:, None]
        return self._bias[key]

    def _visible(self, window: int | None) -> Tensor:
        if window is None:
            assert self.visible_BQS is not None, "without a window and a mask there is no bias"
            return self.visible_BQS
        near_BQS = self.at_BQ[:, :, None] - self.slot_at_BS[:, None, :] <= window
        return near_BQS if self.visible_BQS is None else near_BQS & self.visible_BQS


def context_segment(table_RC: Tensor, row_B: Tensor, context_B: Tensor, queries: int, first: int = 0) -> Segment:
    """New tokens at the end of contexts of `context_B` tokens (themselves included), causal among each other."""
    longest = int(context_B.max())
    slots_BS = table_RC[row_B.long(), :longest].long().contiguous()
    at_BQ = context_B.long()[:, None] - queries + torch.arange(queries, device=context_B.device)
    slot_at_S = torch.arange(longest, device=context_B.device)
    visible_BQS = None if len(context_B) == 1 and queries == 1 else slot_at_S <= at_BQ[:, :, None]
    return Segment(first, queries, slots_BS, visible_BQS, at_BQ, slot_at_S[None])


def apply_tree_mask(segment: Segment, prefix_B: Tensor, tree_BQQ: Tensor, at_BQ: Tensor) -> None:
    """Replace the causal part after each request's prefix by the draft tree's mask, and the positions of its nodes by
    `at_BQ`: siblings are equally far from the prefix."""
    assert segment.visible_BQS is not None, "a tree has more than one node"
    queries = segment.queries
    columns_BQ = prefix_B.long()[:, None] + torch.arange(queries, device=prefix_B.device)
    segment.visible_BQS.scatter_(2, columns_BQ[:, None].expand(-1, queries, -1), tree_BQQ)
    segment.at_BQ = at_BQ
    segment.slot_at_BS = segment.slot_at_BS.repeat(len(at_BQ), 1).scatter_(1, columns_BQ, at_BQ)


def attend_with_sinks(
    q_BKRD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, bias_B1RS: Tensor | None, sink_KR: Tensor, scale: float
) -> Tensor:
    """Attention [B, K, R, D] of R = G * Q rows, each with one more logit that takes a share of the softmax and gives
    nothing (gpt-oss, arXiv 2508.10925)."""
    logits_BKRS = q_BKRD @ k_BKSD.transpose(-1, -2) * scale
    if bias_B1RS is not None:
        logits_BKRS = logits_BKRS + bias_B1RS
    sink_BKR1 = sink_KR[None, :, :, None].expand(len(q_BKRD), -1, -1, 1)
    return torch.cat([logits_BKRS, sink_BKR1], dim=-1).softmax(dim=-1)[..., :-1] @ v_BKSD


class CpuAttentionBackend(AttentionBackend):
    """Serves extend (with a cached prefix, chunked), decode, draft extend and target verify of chains and trees."""

    def __init__(self, runner: "ModelRunner") -> None:
        super().__init__()
        self.table_RC = runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = runner.token_to_kv_pool  # by this name models look for it, too
        self.max_context_len = runner.model_config.context_len
        self.segments: list[Segment] = []
        # QLEN_ONLY: the tree mask without the prefix columns; no preallocated buffer, so each batch gets its own
        self._verify_mask = VerifyMask(
            buffer=torch.empty(0, dtype=torch.bool), mode=TreeMaskMode.QLEN_ONLY, max_bs=0, is_read=True
        )

    @property
    def verify_mask(self) -> VerifyMask:
        return self._verify_mask

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        mode, row_B, seq_lens_B = forward_batch.forward_mode, forward_batch.req_pool_indices, forward_batch.seq_lens
        if mode.is_idle() or len(seq_lens_B) == 0:
            self.segments = []
        elif mode.is_decode():
            check_pass(DECODED, self.table_RC, forward_batch)
            self.segments = [context_segment(self.table_RC, row_B, seq_lens_B, 1)]
        elif mode.is_target_verify():
            spec = forward_batch.spec_info
            nodes = spec.draft_token_num
            drafted = {name: getattr(spec, name) for name in ("draft_token", "positions", "custom_mask")}
            check_pass(VERIFIED, self.table_RC, forward_batch, N=nodes, **drafted)
            segment = context_segment(self.table_RC, row_B, seq_lens_B + nodes, nodes)
            if spec.tree_topk != 1 and nodes > 1:  # without drafts there is the root alone
                tree_BQQ = spec.custom_mask[: len(seq_lens_B) * nodes**2].view(-1, nodes, nodes)
                at_BQ = spec.positions.view(-1, nodes)
                apply_tree_mask(segment, seq_lens_B, tree_BQQ, at_BQ)
            self.segments = [segment]
        else:
            check_pass(EXTENDED, self.table_RC, forward_batch)
            self.segments = self._extend_segments(row_B, seq_lens_B, forward_batch.extend_seq_lens)

    def _extend_segments(self, row_B: Tensor, seq_lens_B: Tensor, new_B: Tensor) -> list[Segment]:
        lengths = new_B.tolist()
        if len(set(lengths)) == 1:
            return [context_segment(self.table_RC, row_B, seq_lens_B, lengths[0])]
        segments, first = [], 0
        for i, queries in enumerate(lengths):
            if queries:
                segments.append(context_segment(self.table_RC, row_B[i : i + 1], seq_lens_B[i : i + 1], queries, first))
            first += queries
        return segments

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Attention output [T, A * D] of the new tokens, after their keys and values are in the cache."""
        _check_supported(layer)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        A, K, D = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
        window = layer.sliding_window_size  # so many tokens back, -1 or None for all
        window = None if window is None or window < 0 else window
        q_TAD = q.reshape(-1, A, D)
        out_TAD = torch.empty_like(q_TAD)
        keys, values = (
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
        )
        for segment in self.segments:
            B, Q, G = len(segment.slots_BS), segment.queries, A // K
            slots = segment.slots_BS.view(-1)  # index_select costs a third of advanced indexing
            k_BKSD = keys.index_select(0, slots).to(q.dtype).view(B, -1, K, D).transpose(1, 2)
            v_BKSD = values.index_select(0, slots).to(q.dtype).view(B, -1, K, D).transpose(1, 2)
            span = slice(segment.first, segment.first + B * Q)
            # the query heads of one key head become rows, so that keys and values are read once
            q_rows = q_TAD[span].view(B, Q, K, G, D).permute(0, 2, 3, 1, 4).reshape(B, K, G * Q, D)
            bias = segment.bias(G, q.dtype, window)
            if sinks is None:
                out = scaled_dot_product_attention(q_rows, k_BKSD, v_BKSD, attn_mask=bias, scale=layer.scaling)
            else:
                sink_KR = sinks.to(q.dtype).view(K, G).repeat_interleave(Q, dim=1)
                out = attend_with_sinks(q_rows, k_BKSD, v_BKSD, bias, sink_KR, layer.scaling)
            out_TAD[span] = out.view(B, K, G, Q, D).permute(0, 3, 1, 2, 4).reshape(B * Q, A, D)
        return out_TAD.view(-1, A * D)

    forward_decode = forward_extend  # the layout tells the passes apart

    def support_triton(self) -> bool:
        return False


class CpuDraftDecodeBackend:
    """The backends of the draft loop's decode steps; branch w of a request writes its own chain of slots.

    Branch w sees the request's prefix and the slots prefix + w * num_steps + (0..i) of its own chain at step i.
    """

    def __init__(self, runner: "ModelRunner", topk: int, num_steps: int) -> None:
        self.topk, self.num_steps = topk, num_steps
        self.attn_backends = [CpuAttentionBackend(runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        table_RC, prefix_B = self.attn_backends[0].table_RC, forward_batch.seq_lens.long()
        check_pass(DRAFTED, table_RC, forward_batch, W=self.topk, n=self.num_steps)
        row_B, longest, W, n = forward_batch.req_pool_indices.long(), int(prefix_B.max()), self.topk, self.num_steps
        branch_Wn = torch.arange(W * n, device=prefix_B.device).view(W, n)
        chain_BWn = table_RC[row_B[:, None, None], prefix_B[:, None, None] + branch_Wn].long()
        prefix_BS = table_RC[row_B, :longest].long()
        slots_RS = torch.cat([prefix_BS[:, None].expand(-1, W, -1), chain_BWn], dim=2).flatten(0, 1)
        at_Bn = prefix_B[:, None] + torch.arange(n, device=prefix_B.device)
        slot_at_BS = torch.cat([torch.arange(longest, device=prefix_B.device).expand(len(prefix_B), -1), at_Bn], dim=1)
        at_Rn, slot_at_RS = at_Bn.repeat_interleave(W, dim=0), slot_at_BS.repeat_interleave(W, dim=0)
        visible_RS = None
        if len(prefix_B) > 1:  # one request has no padding
            in_prefix_BS = torch.arange(longest, device=prefix_B.device) < prefix_B[:, None]
            in_chain_Bn = in_prefix_BS.new_ones(len(prefix_B), n)
            visible_RS = torch.cat([in_prefix_BS, in_chain_Bn], dim=1).repeat_interleave(W, dim=0)
        for step, backend in enumerate(self.attn_backends):
            end = longest + step + 1
            visible = None if visible_RS is None else visible_RS[:, None, :end]
            backend.segments = [
                Segment(0, 1, slots_RS[:, :end].contiguous(), visible, at_Rn[:, step : step + 1], slot_at_RS[:, :end])
            ]


def check_pass(contract: Contract, table_RC: Tensor, forward_batch: "ForwardBatch", **of_draft: Any) -> None:
    """Raise ContractBrokenError unless a pass is what SGLang's attention on CUDA takes. `of_draft`: what is not the
    batch's own, and sizes."""
    given = {"req_to_token": table_RC, **of_draft}
    contract.check(given | {name: getattr(forward_batch, name) for name in contract.demands if name not in given})


def _check_supported(layer: "RadixAttention") -> None:
    """Fail rather than compute something else than the model asks for."""
    problems = {
        "cross attention": layer.is_cross_attention,
        "attention without causality": layer.attn_type != AttentionType.DECODER,
        "soft-capped attention logits": bool(layer.logit_cap),
        "keys and values of different sizes": layer.qk_head_dim != layer.v_head_dim,
    }
    found = [name for name, present in problems.items() if present]
    if found:
        raise ValueError(
            f"rayspec's CPU platform has no {found[0]}, which layer {layer.layer_id} of this model uses; serve the "
            "model on a GPU, or with a CPU build of SGLang (SGLANG_USE_CPU_ENGINE=1), where this platform steps aside"
        )
