"""CORAL's contrastive loss: its value and gradient against the formula written out, and what it does to a drafter."""

import math

import pytest
import torch
from torch import Tensor

from rayspec.training.csra import csra_gradient


def drawn(K: int, N: int, H: int = 5) -> Tensor:
    return 3 * torch.randn(K, N, H, generator=torch.Generator().manual_seed(K + N), dtype=torch.float64)


def written_out(hidden_KNH: Tensor, temperature: float) -> Tensor:
    """Loop over anchors, positives and negatives."""
    K, N, _ = hidden_KNH.shape
    terms = []
    for i in range(K):
        for j in range(K):
            for n in range(N if i != j else 0):
                cosines = [torch.cosine_similarity(hidden_KNH[i, n], hidden_KNH[j, m], dim=0) for m in range(N)]
                powers = [(cosine / temperature).exp() for cosine in cosines]
                terms.append(-(powers[n] / sum(powers)).log())
    return torch.stack(terms).mean()


@pytest.mark.parametrize(("K", "N"), [(2, 1), (2, 6), (3, 7), (4, 5)])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100], ids=["single_rows", "ragged_chunks", "one_chunk"])
def test_gradient_equals_that_of_the_formula(K: int, N: int, chunk_rows: int) -> None:
    hidden_KNH = drawn(K, N)
    direct_KNH = hidden_KNH.clone().requires_grad_()
    expected = written_out(direct_KNH, 0.3)
    expected.backward()
    grad_KNH, loss = csra_gradient(hidden_KNH, temperature=0.3, chunk_rows=chunk_rows)
    # similarities go through float32
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad_KNH, direct_KNH.grad, rtol=1e-4, atol=1e-6)


def test_loss_by_hand() -> None:
    """Two positions at right angles, at both steps: each sees itself at cosine 1 and the other at 0."""
    hidden_KNH = torch.eye(2).expand(2, 2, 2) * torch.tensor([1.0, 7.0])[:, None, None]  # lengths do not matter
    _, loss = csra_gradient(hidden_KNH, temperature=0.5, chunk_rows=1)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-2)))


def test_a_position_finds_itself_at_every_other_step() -> None:
    hidden_KNH = drawn(3, 8).float()

    def found(hidden_KNH: Tensor) -> int:
        unit_KNH = hidden_KNH / hidden_KNH.norm(dim=-1, keepdim=True)
        nearest = torch.einsum("inh,jmh->ijnm", unit_KNH, unit_KNH).argmax(dim=-1)
        return int((nearest == torch.arange(8)).sum()) - 3 * 8  # of a step to itself it always is

    assert found(hidden_KNH) < 20  # of 6 pairs of steps x 8 positions
    for _ in range(200):
        grad_KNH, _ = csra_gradient(hidden_KNH, temperature=0.07, chunk_rows=4)
        hidden_KNH = hidden_KNH - 2.0 * grad_KNH
    assert found(hidden_KNH) == 48


def test_no_more_similarities_than_a_chunk_exist_at_once() -> None:
    """The largest tensor that autograd keeps, whatever the number of positions: [chunk_rows, N]."""
    K, N, H, chunk_rows = 3, 64, 8, 4
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        csra_gradient(drawn(K, N, H), temperature=0.07, chunk_rows=chunk_rows)
    assert max(kept) == max(K * N * H, chunk_rows * N) < N * N
