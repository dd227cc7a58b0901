"""Spherical k-means: unit rows, centroids of unit length, similarity by cosine (Dhillon and Modha 2001).

N = rows, H = their width, M = clusters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

ITERATIONS = 50
_CHUNK = 8192  # rows whose similarities are held at once, without a capacity


class Clustering(NamedTuple):
    labels_N: Tensor  # int64, 0..M - 1, every cluster has a row
    cosine_N: Tensor  # float32, of each row and its centroid


def spherical_kmeans(
    rows_NH: Tensor, clusters: int, *, seed: int = 0, iterations: int = ITERATIONS, capacity: int | None = None
) -> Clustering:
    """Cluster rows (any float dtype; computed in float32) until nothing moves, at most `iterations` times.

    Starts from k-means++ under `seed`; the same seed, rows and number of threads give the same labels. `capacity`: the
    most rows of a cluster. Raises ValueError for more clusters than rows, or too little room.
    """
    N = len(rows_NH)
    if not 1 <= clusters <= N:
        raise ValueError(f"clusters must be in 1..{N} (the tokens to cluster), got {clusters}")
    if capacity is not None and capacity * clusters < N:
        raise ValueError(f"{clusters} clusters of at most {capacity} tokens hold fewer than {N}; allow larger ones")
    unit_NH = F.normalize(rows_NH.float(), dim=1)
    generator = torch.Generator().manual_seed(seed)
    centroids_MH = unit_NH[_spread_rows(unit_NH, clusters, generator)]
    labels_N = torch.full((N,), -1)
    for _ in tqdm(range(iterations), desc=f"k-means: {clusters} clusters", unit="round", leave=False):
        before_N = labels_N
        labels_N, cosine_N = assign(unit_NH, centroids_MH, capacity)
        fill_empty(labels_N, cosine_N, clusters)
        if torch.equal(labels_N, before_N):
            break
        sums_MH = torch.zeros_like(centroids_MH).index_add_(0, labels_N, unit_NH)
        centroids_MH = F.normalize(sums_MH, dim=1)
    return Clustering(labels_N, (unit_NH * centroids_MH[labels_N]).sum(dim=1))


def _spread_rows(unit_NH: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """k-means++ (Arthur and Vassilvitskii 2007): rows drawn with chance 1 - cosine to the nearest one drawn before."""
    picks = [int(torch.randint(len(unit_NH), (1,), generator=generator))]
    distance_N = torch.full((len(unit_NH),), 2.0)
    is_free_N = torch.ones(len(unit_NH))
    for _ in range(clusters - 1):
        newest = picks[-1]
        distance_N = torch.minimum(distance_N, (1 - unit_NH @ unit_NH[newest]).clamp_min(0))
        distance_N[newest] = is_free_N[newest] = 0.0
        chances_N = distance_N * is_free_N
        if not bool(chances_N.any()):  # only copies of drawn rows are left
            chances_N = is_free_N
        picks.append(int(torch.multinomial(chances_N, 1, generator=generator)))
    return torch.tensor(picks)


def assign(unit_NH: Tensor, centroids_MH: Tensor, capacity: int | None = None) -> tuple[Tensor, Tensor]:
    """(labels [N], cosines [N]): the nearest centroid of each row, the first of equals; with a capacity, the nearest
    one with room."""
    if capacity is not None:
        return assign_with_room(unit_NH @ centroids_MH.T, capacity)
    best = [(chunk @ centroids_MH.T).max(dim=1) for chunk in unit_NH.split(_CHUNK)]
    return torch.cat([b.indices for b in best]), torch.cat([b.values for b in best])


def assign_with_room(cosine_NM: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """As `assign`, but from cosines [N, M] (changed in place): a full cluster keeps its nearest rows, and the others go
    on to their next best one (deferred acceptance, Gale and Shapley 1962), so the order of the rows does not matter."""
    N, M = cosine_NM.shape
    labels_N, best_N = torch.full((N,), -1), torch.zeros(N)
    moving = torch.arange(N)
    while len(moving):
        best_N[moving], labels_N[moving] = cosine_NM[moving].max(dim=1)
        order_N = best_N.argsort(descending=True, stable=True)
        order_N = order_N[labels_N[order_N].argsort(stable=True)]  # by cluster, the nearest first
        sizes_M = labels_N.bincount(minlength=M)
        first_M = sizes_M.cumsum(0) - sizes_M
        place_N = torch.arange(N) - first_M[labels_N[order_N]]
        moving = order_N[place_N >= capacity]
        cosine_NM[moving, labels_N[moving]] = float("-inf")
    return labels_N, best_N


def fill_empty(labels_N: Tensor, cosine_N: Tensor, clusters: int) -> None:
    """Give each empty cluster the row that fits worst where it is and leaves others behind (in place)."""
    sizes_M = labels_N.bincount(minlength=clusters)
    for empty in (sizes_M == 0).nonzero().squeeze(1).tolist():
        worst = int(cosine_N.masked_fill(sizes_M[labels_N] < 2, float("inf")).argmin())
        sizes_M[labels_N[worst]] -= 1
        sizes_M[empty] += 1
        labels_N[worst], cosine_N[worst] = empty, 1.0
