"""CSRA, CORAL's cross-step representation alignment (Weng et al. 2025, arXiv 2502.16880): a contrastive loss under
which the drafter's states of one position agree across the steps of training-time test.

K = rollout steps, N = positions, H = drafter hidden size.

InfoNCE over every ordered pair of steps (i, j), i != j: position n at step i is to recognise itself among all positions
at step j. With u the states at unit length and t the temperature,

    loss = mean over (i, j), n of -log( exp(u_in . u_jn / t) / sum_m exp(u_in . u_jm / t) )

The paper's exact pairing and temperature were not found; this is the plain form of its words.
"""

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F


def csra_gradient(hidden_KNH: Tensor, *, temperature: float, chunk_rows: int) -> tuple[Tensor, Tensor]:
    """(d loss / d hidden [K, N, H], loss, a float32 scalar); K must be at least 2 and N at least 1.

    No more than [chunk_rows, N] similarities exist at once: each chunk goes backward before the next is made.
    """
    K, N, _ = hidden_KNH.shape
    leaf_KNH = hidden_KNH.detach().requires_grad_()
    unit_KNH = F.normalize(leaf_KNH, dim=-1)
    units = [unit_NH.detach().requires_grad_() for unit_NH in unit_KNH]
    place_N = torch.arange(N, device=hidden_KNH.device)
    loss = torch.zeros((), device=hidden_KNH.device)
    for start in range(0, N, chunk_rows):
        rows = slice(start, start + chunk_rows)
        for anchor_NH, other_NH in itertools.permutations(units, 2):
            similarity_nN = (anchor_NH[rows] @ other_NH.T).float() / temperature
            part = F.cross_entropy(similarity_nN, place_N[rows], reduction="sum") / (N * K * (K - 1))
            part.backward()
            loss += part.detach()
    unit_KNH.backward(torch.stack([unit_NH.grad for unit_NH in units]))
    return leaf_KNH.grad, loss
