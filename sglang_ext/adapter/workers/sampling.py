"""Sampling at temperature > 0 under speculation: the law that is verified, and draws from a drafter's law.

R = B * N rows of B requests with N verified nodes each, T = rows, V = vocabulary.

Who calls whom: SGLang's verification runs inside of `verify_plain_law`, its sampler of first tokens and of plain
decoding inside of `sample_min_p`; our draft worker calls `draw_drafts`.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rayspec_kernels.cpu.sampling_law import sampling_law_reference
from sglang_ext.adapter.internals import TOP_K_FILTER
from sglang_ext.adapter.patches import lent


def verify_plain_law(
    original: Callable[..., Any],
    verify_input: Any,
    batch: Any,
    *args: Any,
    uno_target_max_top_k: int | None = None,
    **kwargs: Any,
) -> Any:
    """AROUND eagle_utils.eagle_sample: verify against the law that plain decoding samples from.

    SGLang's verification takes top_p of the law that top_k has left, and no min_p; its plain sampler lets all filters
    look at the same law. Greedy batches, and those without a filter that this concerns, pass through untouched, as
    does UNO, which samples in a way of its own.
    """
    info = batch.sampling_info
    is_ours = not batch.forward_mode.is_idle() and not info.is_all_greedy and uno_target_max_top_k is None
    with _one_filter(batch) if is_ours and _laws_differ(info) else nullcontext():
        return original(verify_input, batch, *args, uno_target_max_top_k=uno_target_max_top_k, **kwargs)


def _laws_differ(info: Any) -> bool:
    """From the batch's flags alone: asking for its values would stall an accelerator."""
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
        return requested_law(p_RV, info, min_p_in_turn=in_turn)

    seen = copy.copy(info)
    seen.need_top_k_sampling, seen.need_top_p_sampling = True, False
    batch.sampling_info = seen
    try:
        with lent(TOP_K_FILTER.target, all_filters):
            yield
    finally:
        batch.sampling_info = info


def requested_law(p_RV: Tensor, info: Any, *, min_p_in_turn: bool = False) -> Tensor:
    """Probabilities after each request's own filters, [R, V] float32: rows r // (R / B) are request r's.

    Args:
        info: SGLang's SamplingBatchInfo of the B requests.
        min_p_in_turn: requests with a min_p take top_p of what top_k has left.
    """
    rows = len(p_RV) // len(info)

    def each_row(values_B: Tensor, needed: bool) -> Tensor | None:
        return values_B.repeat_interleave(rows, dim=0) if needed else None

    in_turn = min_p_in_turn and info.need_min_p_sampling
    return sampling_law_reference(
        p_RV,
        each_row(info.top_ks, info.need_top_k_sampling),
        each_row(info.top_ps, info.need_top_p_sampling),
        each_row(info.min_ps, info.need_min_p_sampling),
        # fewer sorted columns can break a tie in another way, and a seeded request must not see its batch
        max_top_k=info.max_top_k if info.sampling_seed is None else None,
        top_p_after_top_k_T=each_row(info.min_ps > 0, in_turn),
    )


def draw_drafts(q_TV: Tensor, sampling_info: Any, positions_T: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one draft a request from the drafter's law, filtered as the target's will be.

    Any law is exact as long as drafts are drawn from the one that is verified; the filtered one is accepted more often.
    Waits for no device.

    Args:
        q_TV: float32 probabilities in target ids at the requests' temperatures, 0 off the head's support; T requests in
            the batch's order.
        sampling_info: SGLang's SamplingBatchInfo of these requests.
        positions_T: int64, of the drafted token: the length with all tokens before it. With the request's seed and
            `step` it is the key of a seeded draw, as in SGLang's `sample_draft_proposal`.
        step: draft position, 0 for the token after the verified one.

    Returns:
        The filtered law [T, V], the drawn ids int64 [T, 1] and their probabilities [T, 1].
    """
    from sglang.srt.speculative.spec_utils import fast_sample

    law_TV = requested_law(q_TV, sampling_info)
    _, drawn_T1 = fast_sample(law_TV, sampling_seed=sampling_info.sampling_seed, positions=positions_T, draft_step=step)
    # the batch that a CUDA graph is captured with has no filters, so that its greedy rows are not one-hot; the target's
    # law of a greedy request is, and then any proposal is verified exactly
    best_T1 = q_TV.argmax(dim=-1, keepdim=True)
    token_ids_T1 = torch.where(sampling_info.top_ks[:, None] <= 1, best_T1, drawn_T1)
    return law_TV, token_ids_T1, law_TV.gather(1, token_ids_T1)


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
    law = sampling_law_reference(probs, top_ks, top_ps, min_ps)
    all_k, all_p = torch.full_like(top_ks, probs.shape[-1]), torch.full_like(top_ps, 2.0)  # 2: no rounding reaches it
    kwargs.pop("max_top_k", None)
    return original(law, all_k, all_p, min_ps, False, sampling_seed, *args, **kwargs)
