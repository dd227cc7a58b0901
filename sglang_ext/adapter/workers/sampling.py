"""Sampling at temperature > 0 under speculation: the distribution that is verified, and draws from a drafter's
distribution.

R = B * N rows of B requests with N verified nodes each, T = rows, V = vocabulary.

Who calls whom: SGLang's verification runs inside of `verify_plain_distribution`, its sampler of first tokens and of
plain decoding inside of `sample_min_p`; our draft worker calls `draw_drafts`.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayspec_kernels.cpu.sampling_distribution import sampling_distribution_reference
from rayspec_kernels.cpu.sibling_distribution import Siblings, sibling_distribution_reference
from sglang_ext.adapter.internals import CHAIN_VERIFICATION, TOP_K_FILTER
from sglang_ext.adapter.patches import lent


def verify_plain_distribution(
    original: Callable[..., Any],
    verify_input: Any,
    batch: Any,
    *args: Any,
    uno_target_max_top_k: int | None = None,
    **kwargs: Any,
) -> Any:
    """AROUND eagle_utils.eagle_sample: verify against the distribution that plain decoding samples from.

    A tree of drawn siblings is verified as such (`verify_siblings`).

    SGLang's verification takes top_p of the distribution that top_k has left, and no min_p; its plain sampler lets all
    filters look at the same distribution. Greedy batches, and those without a filter that this concerns, pass through
    untouched, as does UNO, which samples in a way of its own.
    """
    info = batch.sampling_info
    is_ours = not batch.forward_mode.is_idle() and not info.is_all_greedy and uno_target_max_top_k is None
    siblings = getattr(verify_input, "siblings", None) if is_ours else None
    with (
        _one_filter(batch) if is_ours and _distributions_differ(info) else nullcontext(),
        nullcontext() if siblings is None else lent(CHAIN_VERIFICATION.target, partial(verify_siblings, siblings)),
    ):
        return original(verify_input, batch, *args, uno_target_max_top_k=uno_target_max_top_k, **kwargs)


def verify_siblings(
    siblings: Siblings, *, candidates: Tensor, target_probs: Tensor, draft_probs: Tensor, **arguments: Any
) -> None:
    """In the place of SGLang's verification of a drawn chain: its verification of a tree of any tokens, whose
    distribution we change so that it does what drawn siblings need.

    Args:
        draft_probs: float32 [B, R, V], as `siblings` name them.
        arguments: of both operations.
    """
    from sglang.srt.speculative import eagle_utils

    probs_BNV = sibling_distribution_reference(target_probs, draft_probs, candidates, siblings)
    eagle_utils.tree_speculative_sampling_target_only(
        candidates=candidates, target_probs=probs_BNV, draft_probs=torch.zeros_like(probs_BNV), **arguments
    )


def _distributions_differ(info: Any) -> bool:
    """Decided by the batch's flags alone: asking for its values would stall an accelerator."""
    if info.top_ks.device.type == "cpu":  # SGLang has no filters for it, so all are ours
        return info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    return info.need_min_p_sampling or (info.need_top_k_sampling and info.need_top_p_sampling)


@contextmanager
def _one_filter(batch: Any) -> Iterator[None]:
    """Within it, SGLang's verification sees a batch with a top_k filter only, and that filter applies all of them."""
    from sglang.srt.runtime_context import get_exec

    info = batch.sampling_info
    # flashinfer's sampler with a min_p filters in turn, its sampler without one jointly as PyTorch's
    in_turn = get_exec().kernel.sampling_backend != "pytorch"

    def all_filters(p_RV: Tensor, top_k_R: Tensor) -> Tensor:
        return requested_distribution(p_RV, info, min_p_in_turn=in_turn)

    seen = copy.copy(info)
    seen.need_top_k_sampling, seen.need_top_p_sampling = True, False
    batch.sampling_info = seen
    try:
        with lent(TOP_K_FILTER.target, all_filters):
            yield
    finally:
        batch.sampling_info = info


def requested_distribution(p_RV: Tensor, info: Any, *, min_p_in_turn: bool = False) -> Tensor:
    """Probabilities after each request's own filters, [R, V] float32: rows r // (R / B) are request r's.

    Args:
        info: SGLang's SamplingBatchInfo of the B requests.
        min_p_in_turn: requests with a min_p take top_p of what top_k has left.
    """
    rows = len(p_RV) // len(info)

    def each_row(values_B: Tensor, needed: bool) -> Tensor | None:
        return values_B.repeat_interleave(rows, dim=0) if needed else None

    in_turn = min_p_in_turn and info.need_min_p_sampling
    return sampling_distribution_reference(
        p_RV,
        each_row(info.top_ks, info.need_top_k_sampling),
        each_row(info.top_ps, info.need_top_p_sampling),
        each_row(info.min_ps, info.need_min_p_sampling),
        # fewer sorted columns can break a tie in another way, and a seeded request must not see its batch
        max_top_k=info.max_top_k if info.sampling_seed is None else None,
        top_p_after_top_k_T=each_row(info.min_ps > 0, in_turn),
    )


def draw_drafts(
    q_TV: Tensor, sampling_info: Any, positions_B: Tensor, step: int, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw drafts from the drafter's distribution, filtered as the target's will be: k of each row, without
    replacement.

    Any distribution is exact as long as drafts are drawn from the one that is verified; the filtered one is accepted
    more often. Waits for no device.

    Args:
        q_TV: float32 probabilities in target ids at the requests' temperatures, 0 off the head's support; the rows of B
            requests in the batch's order, each with equally many.
        sampling_info: SGLang's SamplingBatchInfo of these requests.
        positions_B: int64, of the drafted token: the length with all tokens before it. With the request's seed and
            `step` it is the key of a seeded draw, as in SGLang's `sample_draft_proposal`. Rows of a request share it:
            verification goes through one of them at most.
        step: draft position, 0 for the token after the verified one.

    Returns:
        The filtered distribution [T, V], the drawn ids int64 [T, k] in the order of the draws and their probabilities
        [T, k]. Where the distribution has fewer than k tokens, the last ids are any others.
    """
    from sglang.srt.speculative.spec_utils import fast_sample

    probs_TV = requested_distribution(q_TV, sampling_info)
    rows, seed_B = len(q_TV) // len(sampling_info), sampling_info.sampling_seed
    seed_T = None if seed_B is None else seed_B.repeat_interleave(rows)
    positions_T = positions_B.repeat_interleave(rows)
    _, drawn_Tk = fast_sample(probs_TV, k, sampling_seed=seed_T, positions=positions_T, draft_step=step)
    # the batch that a CUDA graph is captured with has no filters, so that its greedy rows are not one-hot; the target's
    # distribution of a greedy request is, and then any proposal is verified exactly
    best_T1 = q_TV.argmax(dim=-1, keepdim=True)
    # among equals topk may take another one first than argmax does, which that distribution is made of
    best_Tk = best_T1 if k == 1 else q_TV.scatter(1, best_T1, 2.0).topk(k, dim=-1).indices
    is_greedy_T1 = (sampling_info.top_ks <= 1).repeat_interleave(rows)[:, None]
    token_ids_Tk = torch.where(is_greedy_T1, best_Tk, drawn_Tk)
    return probs_TV, token_ids_Tk, probs_TV.gather(1, token_ids_Tk)


def sample_min_p(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    sampling_seed: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """AROUND sampler.top_k_top_p_min_p_sampling_from_probs_torch, which ends the scheduler by an assertion where a
    request has a min_p and the batch has seeds: filter first, then let it draw from what is left."""
    if not need_min_p_sampling or sampling_seed is None:
        return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, *args, **kwargs)
    filtered = sampling_distribution_reference(probs, top_ks, top_ps, min_ps)
    all_k, all_p = torch.full_like(top_ks, probs.shape[-1]), torch.full_like(top_ps, 2.0)  # 2: no rounding reaches it
    kwargs.pop("max_top_k", None)
    return original(filtered, all_k, all_p, min_ps, False, sampling_seed, *args, **kwargs)
