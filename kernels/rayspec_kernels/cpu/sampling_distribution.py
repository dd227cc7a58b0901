"""The distribution that a request samples from: top-k, top-p and min-p over the target's probabilities.

T = rows, V = vocabulary, S = sorted columns.
"""

import torch
from torch import Tensor

SORTED_FIRST = (256, 4096)  # columns that are tried before all are sorted, which takes a CPU 3 ms for 32,768 of them


def sampling_distribution_reference(
    p_TV: Tensor,
    top_k_T: Tensor | None = None,
    top_p_T: Tensor | None = None,
    min_p_T: Tensor | None = None,
    *,
    max_top_k: int | None = None,
    top_p_after_top_k_T: Tensor | None = None,
) -> Tensor:
    """Keep the tokens that pass every filter and renormalise, as SGLang's plain sampler does in PyTorch: all filters
    look at the untouched distribution, so a token of rank k stays only if the mass before it is at most top_p.

    A row with top_k 1 is greedy: one-hot at its argmax (the lowest id where several are equal). Waits for no device.

    Args:
        p_TV: float probabilities after the temperature; rows sum to 1.
        top_k_T, top_p_T, min_p_T: a filter of each row; None where no row has one.
        max_top_k: an upper bound of top_k_T, so that fewer columns are sorted; None if unknown.
        top_p_after_top_k_T: rows (bool) whose top_p is a share of the mass that top_k left, as in flashinfer's chain
            of filters; None for none.

    Returns:
        [T, V] in the dtype of p_TV; rows sum to 1.
    """
    if top_k_T is None and top_p_T is None:
        kept_TV = p_TV if min_p_T is None else _drop_below(p_TV, p_TV.amax(dim=-1, keepdim=True), min_p_T)
        return kept_TV / kept_TV.sum(dim=-1, keepdim=True)

    if not p_TV.is_cuda:  # to look at values would make it wait
        is_cut_T = _is_cut(p_TV, top_k_T, top_p_T)
        if not bool(is_cut_T.all()):  # spare the other rows the sorting
            probs_TV = torch.empty_like(p_TV)
            probs_TV[~is_cut_T] = sampling_distribution_reference(p_TV[~is_cut_T], min_p_T=_rows(min_p_T, ~is_cut_T))
            probs_TV[is_cut_T] = sampling_distribution_reference(
                p_TV[is_cut_T],
                _rows(top_k_T, is_cut_T),
                _rows(top_p_T, is_cut_T),
                _rows(min_p_T, is_cut_T),
                max_top_k=max_top_k,
                top_p_after_top_k_T=_rows(top_p_after_top_k_T, is_cut_T),
            )
            return probs_TV

    sorted_TS, order_TS = _best_first(p_TV, top_k_T, top_p_T, max_top_k)
    best_T1 = sorted_TS[:, :1]
    before_TS = sorted_TS.cumsum(dim=-1) - sorted_TS
    kept_TS = sorted_TS
    if top_k_T is not None:
        rank_S = torch.arange(sorted_TS.shape[-1], device=p_TV.device)
        kept_TS = kept_TS.masked_fill(rank_S >= top_k_T[:, None], 0.0)
        # topk has no tie rule and argmax has one; scatter_add_ below then meets this id twice, once with 0
        order_TS[:, :1] = torch.where(top_k_T[:, None] <= 1, p_TV.argmax(dim=-1, keepdim=True), order_TS[:, :1])
    if top_p_T is not None:
        limit_T = top_p_T
        if top_p_after_top_k_T is not None:
            limit_T = torch.where(top_p_after_top_k_T, top_p_T * kept_TS.sum(dim=-1), top_p_T)
        kept_TS = kept_TS.masked_fill(before_TS > limit_T[:, None], 0.0)
    if min_p_T is not None:
        kept_TS = _drop_below(kept_TS, best_T1, min_p_T)
    kept_TS = kept_TS / kept_TS.sum(dim=-1, keepdim=True)
    return torch.zeros_like(p_TV).scatter_add_(1, order_TS, kept_TS)


def _is_cut(p_TV: Tensor, top_k_T: Tensor | None, top_p_T: Tensor | None) -> Tensor:
    is_cut_T = torch.zeros(len(p_TV), dtype=torch.bool, device=p_TV.device)
    if top_k_T is not None:
        is_cut_T |= top_k_T < p_TV.shape[-1]
    if top_p_T is not None:
        is_cut_T |= top_p_T < 1.0
    return is_cut_T


def _rows(values_T: Tensor | None, mask_T: Tensor) -> Tensor | None:
    return None if values_T is None else values_T[mask_T]


def _best_first(
    p_TV: Tensor, top_k_T: Tensor | None, top_p_T: Tensor | None, max_top_k: int | None
) -> tuple[Tensor, Tensor]:
    """The likeliest columns of each row in order, with their ids: at least all that pass top_k and top_p."""
    V = p_TV.shape[-1]
    if max_top_k is not None and max_top_k < V:
        return p_TV.topk(max_top_k, dim=-1)
    if not p_TV.is_cuda:
        for S in SORTED_FIRST:
            if S >= V:
                break
            sorted_TS, order_TS = p_TV.topk(S, dim=-1)
            is_whole_T = torch.zeros(len(p_TV), dtype=torch.bool, device=p_TV.device)
            if top_k_T is not None:
                is_whole_T |= top_k_T <= S
            if top_p_T is not None:
                is_whole_T |= sorted_TS.sum(dim=-1) > top_p_T  # so the first column left out is past top_p
            if bool(is_whole_T.all()):
                return sorted_TS, order_TS
    return p_TV.sort(dim=-1, descending=True, stable=True)


def _drop_below(p_TS: Tensor, best_T1: Tensor, min_p_T: Tensor) -> Tensor:
    return p_TS.masked_fill(p_TS < best_T1 * min_p_T[:, None], 0.0)
