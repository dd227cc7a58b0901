"""SGLang's speculative operations for the CPU platform: its signatures around the torch references.

SGLang ships these for CUDA (Triton, JIT) or as compiled CPU kernels, neither of which runs on a plain CPU install.
The arguments keep SGLang's names, because it passes them by name; tensors marked mutable are written in place.
`demands` (contracts.py) are those of the operation that SGLang runs on CUDA: B requests, N verified nodes of each, D of
the longest path, P entries of the beam, M drafts, R requests' rows and C columns of the slot table, V tokens.
"""

from typing import Any

import torch
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from rayspec_kernels.common.draft_tree import build_chain_reference, build_tree_reference
from rayspec_kernels.cpu.kv_slots import (
    pack_front_reference,
    read_window_reference,
    write_slots_reference,
)
from rayspec_kernels.cpu.murmur_hash import murmur_hash32_reference
from rayspec_kernels.cpu.tree_verify import (
    Accepted,
    verify_chain_reference,
    verify_greedy_reference,
    verify_sampled_reference,
)
from sglang_ext.adapter.cpu.attention import CpuAttentionBackend, CpuDraftDecodeBackend
from sglang_ext.adapter.cpu.contracts import demands


@demands(
    seq_lens="int64 B",
    parent_list="int64 B P",
    top_scores_index="int64 B M",
    retrieve_index="int64 B N",
    retrieve_next_token="int64 B N",
    retrieve_next_sibling="int64 B N",
    positions="int64 B*N",
    tree_mask="byte >=B*N*N",
)
def build_tree(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,  # mutable, bool [B * N * N]
    positions: Tensor,  # mutable, [B * N]
    retrieve_index: Tensor,  # mutable, [B, N]
    retrieve_next_token: Tensor,  # mutable, [B, N]
    retrieve_next_sibling: Tensor,  # mutable, [B, N]
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: TreeMaskMode,
) -> None:
    assert tree_mask_mode == TreeMaskMode.QLEN_ONLY, "CpuAttentionBackend.verify_mask asks for QLEN_ONLY"
    B, N = len(seq_lens), num_verify_tokens
    if topk == 1:
        tree = build_chain_reference(B, N, seq_lens.device)
    else:
        tree = build_tree_reference(parent_list, top_scores_index, topk)
    tree_mask.view(B, N, N).copy_(tree.mask_BNN)
    positions.view(B, N).copy_(tree.depth_BN + seq_lens[:, None])
    retrieve_index.copy_(torch.arange(B * N).view(B, N))
    retrieve_next_token.copy_(tree.first_child_BN)
    retrieve_next_sibling.copy_(tree.next_sibling_BN)


def _write_accepted(
    accepted: Accepted, tokens_BN: Tensor, predicts: Tensor, accept_index: Tensor, lens: Tensor
) -> None:
    """SGLang's form: token after each path node at the node's place, and paths in batch-wide node numbers."""
    B, N = tokens_BN.shape
    path_BD, is_node_BD = accepted.path_BD, accepted.path_BD >= 0
    index_BD = path_BD + torch.arange(B)[:, None] * N
    accept_index.copy_(index_BD.where(is_node_BD, -1))
    lens.copy_(accepted.num_drafts_B)
    next_BD = torch.nn.functional.pad(path_BD[:, 1:], (0, 1), value=-1)
    drafted_BD = tokens_BN.gather(1, next_BD.clamp(min=0))
    after_BD = drafted_BD.where(next_BD >= 0, accepted.bonus_B[:, None])
    predicts[index_BD[is_node_BD]] = after_BD[is_node_BD].to(predicts.dtype)


@demands(
    candidates="int64 B N",
    retrieve_index="int64 B N",
    retrieve_next_token="int64 B N",
    retrieve_next_sibling="int64 B N",
    target_predict="int64 B N",
    predicts="int32 B*N",
    accept_index="int32 B D",
    accept_token_num="int32 B",
)
def verify_tree_greedy(
    predicts: Tensor,  # mutable, int32 [B * N]
    accept_index: Tensor,  # mutable, int32 [B, D]
    accept_token_num: Tensor,  # mutable, int32 [B]
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    if candidates.shape[1] == 1:  # nothing was drafted, as in each plain step of a policy
        predicts.copy_(target_predict.flatten())
        accept_index[:, :1] = retrieve_index
        accept_token_num.zero_()
        return predicts, accept_index, accept_token_num
    accepted = verify_greedy_reference(
        candidates, target_predict, retrieve_next_token, retrieve_next_sibling, accept_index.shape[1]
    )
    _write_accepted(accepted, candidates, predicts, accept_index, accept_token_num)
    return predicts, accept_index, accept_token_num


@demands(
    candidates="int64 B N",
    retrive_index="int64 B N",
    retrive_next_token="int64 B N",
    retrive_next_sibling="int64 B N",
    uniform_samples="float32 B N",
    uniform_samples_for_final_sampling="float32 B",
    target_probs="float32 B N V",
    draft_probs="float32 B N V",
    predicts="int32 B*N",
    accept_index="int32 B D",
    accept_token_num="int32 B",
)
def verify_tree_sampled(
    predicts: Tensor,  # mutable, int32 [B * N]
    accept_index: Tensor,  # mutable, int32 [B, D]
    accept_token_num: Tensor,  # mutable, int32 [B]
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    assert threshold_single == threshold_acc == 1.0, "CpuPlatform refuses thresholds that change the distribution"
    accepted = verify_sampled_reference(
        candidates,
        target_probs,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        uniform_samples_for_final_sampling,
        accept_index.shape[1],
    )
    _write_accepted(accepted, candidates, predicts, accept_index, accept_token_num)


@demands(
    candidates="int64 B N strided",
    retrive_index="int64 B N",  # whose strides it takes for those of accept_index
    uniform_samples="float32 B N strided",
    uniform_samples_for_final_sampling="float32 B",
    target_probs="float32 B N V strided",
    draft_probs="float32 B K V strided",
    predicts="int32 B*N",
    accept_index="int32 B N",
    accept_token_num="int32 B",
)
def verify_chain_sampled(
    predicts: Tensor,  # mutable, int32 [B * N]
    accept_index: Tensor,  # mutable, int32 [B, N]
    accept_token_num: Tensor,  # mutable, int32 [B]
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
    *,
    block_verification: bool = False,
) -> None:
    assert not block_verification, "SGLang refuses --speculative-use-block-verification without CUDA"
    accepted = verify_chain_reference(
        candidates, target_probs, draft_probs, uniform_samples, uniform_samples_for_final_sampling
    )
    _write_accepted(accepted, candidates, predicts, accept_index, accept_token_num)


@demands(
    x="float32 T V strided",
)
def row_argmax(x: Tensor) -> Tensor:
    return x.argmax(dim=-1)


@demands(
    seed="integer T",
    positions="integer T",
    col_indices="integer n",
)
def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    return murmur_hash32_reference(seed, positions, col_indices)


@demands(
    req_pool_indices="integer B",
    req_to_token="integer R C",
    seq_lens="integer B",
    out_cache_loc="int64 B*topk*num_cols",
    positions="int64 B*topk",
)
def draft_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,  # mutable, int64 [B * topk * num_cols]
    topk: int,
    num_cols: int,
    positions: Tensor | None = None,  # mutable
    mrope: Tensor | None = None,
) -> None:
    assert mrope is None, "multimodal positions are prepared on CUDA only"
    window_Bn = read_window_reference(req_to_token, req_pool_indices, seq_lens, topk * num_cols)
    out_cache_loc.copy_(window_Bn.view(-1))
    if positions is not None:
        positions.view(-1, topk).copy_(seq_lens[:, None])


@demands(
    req_pool_indices="integer B",
    req_to_token="integer R C",
    start_offset="integer B",
    end_offset="integer B",
)
def extend_slots(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Tensor:
    """The platform's own seam (`get_speculative_cache_locs_fn`): int64 slots of start..end of each request, all
    `draft_token_num` of them."""
    return read_window_reference(req_to_token, req_pool_indices, start_offset, draft_token_num).view(-1)


@demands(
    num_front="integer B",
    out_cache_loc="int64 n",
    front_out_cache_loc="int64 m",
)
def front_slots(num_front: Tensor, out_cache_loc: Tensor, front_out_cache_loc: Tensor) -> None:
    packed = pack_front_reference(out_cache_loc.view(num_front.numel(), -1), num_front)
    front_out_cache_loc[: len(packed)] = packed


@demands(
    accept_index="integer B D",
    out_cache_loc="int64 n",
    accept_out_cache_loc="int64 >=size",
)
def accepted_slots(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, size: int) -> None:
    index = accept_index.view(-1)
    slots = out_cache_loc[index[index >= 0].long()]
    accept_out_cache_loc[: len(slots)] = slots


@demands(
    accept_tokens="integer B accept_stride",
    accept_lens="integer B",
    bonus_tokens="integer B",
)
def bonus_tokens(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int, batch_size: int
) -> None:
    last_B = torch.arange(batch_size) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[last_B])


@demands(
    req_pool_indices="integer B",
    req_to_token="integer R C",
    start_offset="integer B",
    end_offset="integer B",
    out_cache_loc="int64 n",
)
def assign_slots(
    req_pool_indices: Tensor,
    req_to_token: Tensor,  # mutable
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    write_slots_reference(req_to_token, req_pool_indices, start_offset, end_offset, out_cache_loc)


def skip_kv_copy_warmup(pool: Any) -> None:
    """Stands in for the warm-up of a Triton copy; `SGLANG_NATIVE_MOVE_KV_CACHE=1` selects the torch move."""
    pool._kv_copy_config = None


def create_decode_backend(factory: Any) -> CpuDraftDecodeBackend | None:
    """The draft loop's attention; one draft step has no decode pass."""
    if factory.speculative_num_steps <= 1:
        return None
    return CpuDraftDecodeBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def create_draft_extend_backend(factory: Any) -> CpuAttentionBackend:
    return CpuAttentionBackend(factory.draft_model_runner)
