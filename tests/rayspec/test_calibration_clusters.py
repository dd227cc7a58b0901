"""Spherical k-means against a search of all partitions and scikit-learn, and the two cluster rules."""

from itertools import product

import pytest
import torch
from sklearn.cluster import KMeans as SklearnKMeans
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from torch.nn import functional as F

from rayspec.calibration.drafter import ReferenceDrafter
from rayspec.calibration.rules.clusters import Contiguous, KMeans
from rayspec.calibration.rules.kmeans import assign, assign_with_room, fill_empty, spherical_kmeans
from rayspec.calibration.vocabulary import Vocabulary
from sglang_ext.heads import head_from_target, parse_head
from sglang_ext.heads.base import NO_TOKEN

WORDS = Vocabulary(target="toy", size=60, tokenizer_sha256="0", stop_ids=(3, 59), unusable_ids=(57, 58))


class Drafter(ReferenceDrafter):
    """With a random head, from no folder."""

    head_VH = torch.randn(60, 8, generator=torch.Generator().manual_seed(7))  # type: ignore[assignment]


def rows(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def similarity(rows_NH: Tensor, labels_N: Tensor) -> float:
    """What spherical k-means maximises: sum of cosines = sum over clusters of |sum of its unit rows|."""
    sums = torch.zeros(int(labels_N.max()) + 1, rows_NH.shape[1]).index_add_(0, labels_N, F.normalize(rows_NH, dim=1))
    return float(sums.norm(dim=1).sum())


def test_best_of_some_seeds_is_the_best_partition() -> None:
    points_NH = rows(7, 3)
    partitions = (torch.tensor(p) for p in product(range(3), repeat=7))
    best = max(similarity(points_NH, p) for p in partitions)
    found = max(similarity(points_NH, spherical_kmeans(points_NH, 3, seed=s).labels_N) for s in range(10))
    assert found == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("scale", [1.0, 100.0], ids=["unit", "rows_of_unequal_length"])
def test_separate_groups_are_found_as_scikit_learn_finds_them(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(6, 16, generator=generator), dim=1)
    truth = torch.arange(300) % 6
    points = centres[truth] + 0.05 * torch.randn(300, 16, generator=generator)
    stretched = points * (1 + scale * torch.rand(300, 1, generator=generator))  # only the direction counts
    ours = spherical_kmeans(stretched, 6).labels_N
    theirs = SklearnKMeans(6, n_init=4, random_state=0).fit_predict(F.normalize(points, dim=1).numpy())
    assert adjusted_rand_score(theirs, ours) == 1.0
    assert adjusted_rand_score(truth, ours) == 1.0


def test_result_is_a_fixed_point() -> None:
    points_NH = rows(500, 12)
    found = spherical_kmeans(points_NH, 20, iterations=200)
    unit_NH = F.normalize(points_NH, dim=1)
    centroids_MH = F.normalize(torch.zeros(20, 12).index_add_(0, found.labels_N, unit_NH), dim=1)
    assert torch.equal((unit_NH @ centroids_MH.T).argmax(dim=1), found.labels_N)
    torch.testing.assert_close(found.cosine_N, (unit_NH * centroids_MH[found.labels_N]).sum(1))


def test_same_seed_same_clusters() -> None:
    points_NH = rows(200, 6)
    first, again, other = (spherical_kmeans(points_NH, 9, seed=s).labels_N for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("capacity", [10, 13, 100], ids=["exactly_full", "some_room", "no_limit"])
def test_capacity_is_kept_and_uses_the_nearest_room(capacity: int) -> None:
    unit_NH = F.normalize(rows(100, 4), dim=1)
    centroids_MH = F.normalize(rows(10, 4, seed=1), dim=1)
    cosine_NM = unit_NH @ centroids_MH.T
    labels_N, own_N = assign_with_room(cosine_NM.clone(), capacity)
    assert int(labels_N.bincount(minlength=10).max()) <= capacity
    torch.testing.assert_close(own_N, cosine_NM.gather(1, labels_N[:, None]).squeeze(1), rtol=0, atol=0)
    for n in range(100):
        for m in (cosine_NM[n] > own_N[n]).nonzero().squeeze(1):  # a nearer cluster is full of nearer rows
            members = labels_N == m
            assert int(members.sum()) == capacity
            assert bool((own_N[members] >= cosine_NM[n, m]).all())
    if capacity == 100:
        assert torch.equal(labels_N, assign(unit_NH, centroids_MH)[0])


def test_capped_clusters_are_no_larger_and_none_is_empty() -> None:
    found = spherical_kmeans(rows(97, 5), 10, capacity=10).labels_N
    sizes = found.bincount(minlength=10)
    assert int(sizes.max()) <= 10
    assert int(sizes.min()) >= 1


def test_copies_and_zero_rows_leave_no_cluster_empty() -> None:
    points_NH = torch.cat([rows(1, 4).expand(10, -1), torch.zeros(5, 4)])
    for seed in range(5):
        assert int(spherical_kmeans(points_NH, 6, seed=seed).labels_N.bincount(minlength=6).min()) >= 1


def test_an_empty_cluster_gets_the_worst_row_that_can_be_spared() -> None:
    labels_N, cosine_N = torch.tensor([0, 0, 0, 2]), torch.tensor([0.9, 0.2, 0.8, 0.1])
    fill_empty(labels_N, cosine_N, 4)
    assert labels_N.tolist() == [0, 1, 3, 2]  # 1 leaves first, then 2; the last row is alone where it is


@pytest.mark.parametrize(
    ("count", "clusters", "capacity", "message"),
    [(5, 6, None, r"clusters must be in 1\.\.5"), (5, 0, None, "got 0"), (9, 3, 2, "hold fewer than 9")],
)
def test_impossible_clusterings_are_refused(count: int, clusters: int, capacity: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spherical_kmeans(rows(count, 3), clusters, capacity=capacity)


@pytest.mark.parametrize(
    "rule",
    [
        Contiguous(clusters=7),
        Contiguous(clusters=1, pinned=5),
        KMeans(clusters=7, pinned=4),
        KMeans(clusters=6, max_size=1.0),
        KMeans(clusters=58),
    ],
    ids=["contiguous", "one_group", "kmeans", "equal_sizes", "a_cluster_a_token"],
)
def test_rules_partition_the_vocabulary(rule: Contiguous | KMeans) -> None:
    counts_V = torch.arange(60).flip(0)
    made = rule.make(counts_V, WORDS, Drafter("", WORDS))
    cluster_of_V = made.tensors["cluster_of"]
    assert cluster_of_V.dtype == torch.int64
    sizes = cluster_of_V.bincount()
    assert len(sizes) == rule.clusters + 1
    assert bool((sizes[1:] > 0).all())
    # the stop tokens, and then the most frequent ones, which here are the lowest ids
    most_frequent = [i for i in range(60) if i not in WORDS.stop_ids][: rule.pinned]
    assert (cluster_of_V == 0).nonzero().squeeze(1).tolist() == sorted([*WORDS.stop_ids, *most_frequent])
    assert made.figures["largest"] == int(sizes[1:].max())
    if isinstance(rule, KMeans) and rule.max_size:
        assert made.figures["padded_over_mean"] == pytest.approx(6 * 10 / 58)  # sizes of at most ceil(58 / 6)


def test_contiguous_groups_are_runs_of_almost_equal_size() -> None:
    made = Contiguous(clusters=7).make(torch.ones(60, dtype=torch.int64), WORDS, Drafter("", WORDS))
    routed = made.tensors["cluster_of"][made.tensors["cluster_of"] > 0]
    assert bool((routed.diff() >= 0).all())
    assert set(routed.bincount()[1:].tolist()) == {8, 9}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Contiguous(clusters=59), r"rule.clusters must be in 1\.\.58"),
        (KMeans(clusters=4, pinned=57), r"rule.pinned must be in 0\.\.56"),
        (KMeans(clusters=20, pinned=40), r"rule.clusters must be in 1\.\.18"),
    ],
)
def test_rules_refuse_more_than_the_vocabulary_has(rule: Contiguous | KMeans, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule.check(WORDS)


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "dynaspec", "clusters": 7, "first": 3, "later": 2, "router_width": 5},
        {"kind": "coral", "clusters": 7, "top": 3},
    ],
    ids=lambda spec: spec["kind"],
)
def test_heads_take_the_clusters(spec: dict[str, object]) -> None:
    """A chosen part of the vocabulary scores as the full head does, and always holds the stop tokens."""
    made = KMeans(clusters=7, pinned=2).make(torch.arange(60), WORDS, Drafter("", WORDS))
    head = head_from_target(parse_head(spec), Drafter.head_VH, made.tensors)
    head.check(WORDS.stop_ids)
    hidden_TH = rows(4, 8, seed=3)
    logits_TV = head.target_logits(hidden_TH, 0, head.route(rows(4, 8, seed=4), rows(4, 8, seed=5), 0))
    full_TV = hidden_TH @ Drafter.head_VH.T
    is_scored_TV = logits_TV > NO_TOKEN
    torch.testing.assert_close(logits_TV[is_scored_TV], full_TV[is_scored_TV])
    assert bool(is_scored_TV[:, list(WORDS.stop_ids)].all())
    assert not bool(is_scored_TV.all())
