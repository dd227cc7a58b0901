"""SLiM's hypotheses and their tree against brute force, and kernel and host against the reference, bit for bit."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rayspec_kernels.common.draft_tree import DraftTree
from rayspec_kernels.slim_posterior import _slim_posterior, slim_posterior
from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.slim_posterior.host import fits_host, slim_posterior_host
from rayspec_kernels.slim_posterior.kernel import slim_posterior_kernel
from rayspec_kernels.slim_posterior.reference import (
    Sizes,
    SlimPosterior,
    best_hypotheses_reference,
    hypothesis_tree_reference,
    slim_posterior_reference,
)

INF, NAN = float("inf"), float("nan")
Ranks = tuple[int, ...]
Inputs = tuple[Tensor, Tensor, Tensor, Correlations]


def scores(B: int, D: int, k: int, seed: int = 0, step: float = 2**-10) -> tuple[Tensor, Tensor]:
    """(own, pair); pairs of both signs, so that a long path may outrank its beginning. Multiples of `step`, whose sums
    are exact; a large one makes many of them equal."""
    generator = torch.Generator().manual_seed(seed)
    own_BDk = torch.randn(B, D, k, generator=generator).log_softmax(dim=-1)
    pair_BDkk = 2 * torch.randn(B, D, k, k, generator=generator)
    pair_BDkk[:, 0] = pair_BDkk[:, 0, :, :1]
    return tuple(torch.round(x / step) * step + 0.0 for x in (own_BDk, pair_BDkk))  # type: ignore[return-value]


def enumerate_all(own_Dk: Tensor, pair_Dkk: Tensor) -> dict[Ranks, float]:
    (D, k), own, pair = own_Dk.shape, own_Dk.tolist(), pair_Dkk.tolist()
    found: dict[Ranks, float] = {(): 0.0}
    for d in range(D):
        for path in itertools.product(range(k), repeat=d + 1):
            found[path] = found[path[:-1]] + pair[d][path[-1]][path[-2] if d else 0] + own[d][path[-1]]
    return found


def best_first(everything: dict[Ranks, float]) -> list[Ranks]:
    """All hypotheses that are possible, equal scores by the rule."""

    def before(path: Ranks) -> tuple[Any, ...]:
        return (path[-1], -everything[path], before(path[:-1])) if path else ()

    possible = [path for path, score in everything.items() if path and score > -INF]
    return sorted(possible, key=lambda path: (-everything[path], len(path), path[-1], before(path[:-1])))


def as_path(number: int, k: int) -> Ranks:
    return (*as_path((number - 1) // k, k), (number - 1) % k) if number else ()


def as_number(path: Ranks, k: int) -> int:
    return as_number(path[:-1], k) * k + path[-1] + 1 if path else 0


def found_paths(own_BDk: Tensor, pair_BDkk: Tensor, count: int) -> list[list[Ranks]]:
    """Of each request, best first, without the impossible ones."""
    number_BK = best_hypotheses_reference(own_BDk, pair_BDkk, count).number_BK
    return [[as_path(n, own_BDk.shape[2]) for n in numbers if n] for numbers in number_BK.tolist()]


@pytest.mark.parametrize(
    ("B", "D", "k", "count"), [(1, 1, 4, 2), (3, 3, 3, 7), (2, 4, 2, 30), (2, 2, 5, 100)],
    ids=["one_position", "some", "all_but_none", "more_than_there_are"],
)  # fmt: skip
@pytest.mark.parametrize("step", [2**-10, 1.0, 100.0], ids=["hardly_any_ties", "many_ties", "only_ties"])
def test_the_best_are_those_of_brute_force(B: int, D: int, k: int, count: int, step: float) -> None:
    own_BDk, pair_BDkk = scores(B, D, k, step=step)
    found = best_hypotheses_reference(own_BDk, pair_BDkk, count)
    for b, paths in enumerate(found_paths(own_BDk, pair_BDkk, count)):
        everything = enumerate_all(own_BDk[b], pair_BDkk[b])
        assert paths == best_first(everything)[:count]
        assert found.scores_BK[b].tolist() == [everything[path] for path in paths]


def test_a_plain_beam_would_not_do() -> None:
    """The best whole path begins with the worst candidate."""
    own = torch.tensor([[[0.0, -1.0, -9.0], [-5.0, -5.0, -5.0]]])
    pair = torch.zeros(1, 2, 3, 3)
    pair[0, 1, 1, 2] = 20.0
    assert found_paths(own, pair, 1) == [[(2, 1)]]


@pytest.mark.parametrize("fault", [-INF, NAN, INF])
def test_impossible_paths_are_no_hypotheses(fault: float) -> None:
    own, pair = scores(2, 3, 2)
    pair[:, 0], pair[:, 1:] = 0.0, fault
    own[0, 0], own[1, 0] = torch.tensor([-1.0, -0.5]), torch.tensor([fault, -1.0])
    assert found_paths(own, pair, 6) == [[(1,), (0,)], [(1,)]]


def test_with_r_of_one_the_best_are_closed() -> None:
    """Products of probabilities never grow: every beginning of a kept path is kept by its own score."""
    own, pair = scores(4, 3, 4, seed=2)
    for kept in found_paths(own, torch.zeros_like(pair), 20):
        assert all(path[:-1] in kept for path in kept if len(path) > 1)


def literal_tree(hypotheses: Sequence[Ranks], num_nodes: int) -> list[Ranks]:
    """Sorted, the root first."""
    nodes: set[Ranks] = {()}
    for path in hypotheses:
        added = nodes | {path[: i + 1] for i in range(len(path))}
        if len(added) > num_nodes:
            break
        nodes = added
    return sorted(nodes, key=lambda path: (len(path), path))


def test_more_hypotheses_are_a_larger_tree() -> None:
    own, pair = scores(3, 3, 4, seed=3)
    nodes = [set(literal_tree(found_paths(own, pair, count)[0], 1000)) for count in (1, 5, 20, 84)]
    assert nodes[0] < nodes[1] < nodes[2] < nodes[3]
    assert len(nodes[3]) == 1 + 4 + 16 + 64


def assert_is_tree(found: SlimPosterior, b: int, nodes: list[Ranks], root: int, ids_Dk: list[list[int]]) -> None:
    """Every element of what was found for a request, the padding too."""
    N, padding = found.tokens_BN.shape[1], found.tokens_BN.shape[1] - len(nodes)
    assert int(found.num_nodes_B[b]) == len(nodes)
    tokens = [ids_Dk[len(path) - 1][path[-1]] if path else root for path in nodes]
    assert found.tokens_BN[b].tolist() == tokens + [root] * padding
    mask_NN, depth_N, first_N, next_N = (x[b].tolist() for x in found.links)
    assert depth_N == [len(path) for path in nodes] + [1] * padding
    place = {path: n for n, path in enumerate(nodes)}
    seen = [{place[path[:i]] for i in range(len(path) + 1)} for path in nodes]
    seen += [{0, n} for n in range(len(nodes), N)]
    assert [{m for m in range(N) if row[m]} for row in mask_NN] == seen
    children: list[list[int]] = [[] for _ in range(N)]
    for path in nodes[1:]:
        children[place[path[:-1]]].append(place[path])
    assert first_N == [own[0] if own else -1 for own in children]
    following = {n: after for own in children for n, after in itertools.pairwise(own)}
    assert next_N == [following.get(n, -1) for n in range(N)]


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 9, 64], ids=["the_root", "one_node", "few", "some", "all"])
@pytest.mark.parametrize(("D", "k"), [(1, 3), (3, 3), (4, 2), (5, 1)])
def test_the_tree_is_that_of_the_hypotheses_and_their_beginnings(D: int, k: int, num_nodes: int) -> None:
    paths = found_paths(*scores(5, D, k, seed=1), 11)
    most = max(len(found) for found in paths)
    number_BK = torch.tensor([[as_number(p, k) for p in found] + [0] * (most - len(found)) for found in paths])
    root_B, ids_BDk = torch.arange(5) + 900, torch.arange(5 * D * k).view(5, D, k)
    tree = hypothesis_tree_reference(number_BK, root_B, ids_BDk, num_nodes)
    for b in range(5):
        assert_is_tree(tree, b, literal_tree(paths[b], num_nodes), int(root_B[b]), ids_BDk[b].tolist())


def test_by_hand() -> None:
    """Two hypotheses, the second of which shares the first token with the first and is longer than the tree allows."""
    number_BK = torch.tensor([[as_number(path, 3) for path in ((1,), (1, 0, 2), (0,))]])
    root_B, ids_BDk = torch.tensor([7]), torch.tensor([[[10, 11, 12], [20, 21, 22], [30, 31, 32]]])
    tree = hypothesis_tree_reference(number_BK, root_B, ids_BDk, 8)
    assert tree.num_nodes_B.tolist() == [5]
    assert tree.tokens_BN.tolist() == [[7, 10, 11, 20, 32, 7, 7, 7]]
    assert tree.links.first_child_BN.tolist() == [[1, -1, 3, 4, -1, -1, -1, -1]]
    assert tree.links.next_sibling_BN.tolist() == [[-1, 2, -1, -1, -1, -1, -1, -1]]
    # the second does not fit, and so the third is not taken either
    smaller = hypothesis_tree_reference(number_BK, root_B, ids_BDk, 3)
    assert (smaller.num_nodes_B.tolist(), smaller.tokens_BN.tolist()) == ([2], [[7, 11, 7]])


def inputs(B: int, D: int, k: int, V: int, device: torch.device, *, seed: int = 0, step: float = 1.0) -> Inputs:
    """With impossible candidates, repeated ids, and about half of the pairs counted, some of them impossible."""
    generator = torch.Generator().manual_seed(seed + 100 * D + k)
    root_B, ids_BDk = (torch.randint(V, shape, generator=generator) for shape in ((B,), (B, D, k)))
    own_BDk, _ = scores(B, D, k, seed, step)
    own_BDk[torch.rand(B, D, k, generator=generator) < 0.1] = -INF
    key_P = torch.arange(V * V)[torch.rand(V * V, generator=generator) < 0.5]
    log_r_P = torch.round(2 * torch.randn(len(key_P), generator=generator) / step) * step
    log_r_P[torch.rand(len(key_P), generator=generator) < 0.1] = -INF
    first_V, second_V = (torch.round(torch.randn(V, generator=generator) / step) * step for _ in range(2))
    correlations = Correlations(key_P, log_r_P, first_V, second_V)
    return root_B.to(device), ids_BDk.to(device), own_BDk.to(device), correlations.to(device)


def on_host(*arguments: Any) -> SlimPosterior:
    """Wherever the inputs are."""
    root_B, ids_BDk, log_p_BDk, correlations, *rest = arguments
    found = slim_posterior_host(
        root_B.cpu(), ids_BDk.cpu(), log_p_BDk.cpu(), correlations.to(torch.device("cpu")), *rest
    )
    tokens_BN, *links, num_nodes_B = (x.to(root_B.device) for x in (found.tokens_BN, *found.links, found.num_nodes_B))
    return SlimPosterior(tokens_BN, DraftTree(*links), num_nodes_B)


OPS: dict[str, Callable[..., SlimPosterior]] = {
    "reference": slim_posterior_reference,
    "kernel": slim_posterior_kernel,
    "host": on_host,
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("op", ["reference", "kernel", "host"])
@pytest.mark.parametrize(
    ("B", "D", "k", "count", "num_nodes"),
    [(1, 1, 1, 1, 2), (1, 3, 3, 5, 9), (2, 4, 2, 30, 40), (3, 2, 5, 17, 33)],
    ids=["one_of_everything", "cut", "more_than_there_are", "odd"],
)
@pytest.mark.parametrize("step", [2**-10, 1.0], ids=["hardly_any_ties", "many_ties"])
def test_from_candidates_to_the_tree(
    op: str, B: int, D: int, k: int, count: int, num_nodes: int, step: float, device: torch.device
) -> None:
    root_B, ids_BDk, log_p_BDk, correlations = inputs(B, D, k, 7, device, step=step)
    counted = dict(zip(correlations.key_P.tolist(), correlations.log_r_P.tolist(), strict=True))
    first, second = correlations.first_V.tolist(), correlations.second_V.tolist()
    found = OPS[op](root_B, ids_BDk, log_p_BDk, correlations, 0.25, count, num_nodes)
    for b in range(B):
        root, ids_Dk = int(root_B[b]), ids_BDk[b].tolist()
        before_Dk = [[root] * k, *ids_Dk]
        pair_Dkk = [
            [[counted.get(x * 7 + y, first[x] + second[y]) for x in before_k] for y in own_k]
            for before_k, own_k in zip(before_Dk, ids_Dk, strict=False)
        ]
        paths = best_first(enumerate_all(log_p_BDk[b].cpu() + 0.25, torch.tensor(pair_Dkk)))[:count]
        assert_is_tree(found, b, literal_tree(paths, num_nodes), root, ids_Dk)


def assert_equal(out: SlimPosterior, expected: SlimPosterior) -> None:
    for ours, theirs in zip((*out[::2], *out.links), (*expected[::2], *expected.links), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("step", [2**-24, 1.0, 100.0], ids=["rounded_sums", "many_ties", "only_ties"])
@pytest.mark.parametrize(
    ("B", "D", "k", "count", "num_nodes"),
    [(1, 8, 2, 9, 17), (2, 4, 8, 20, 64), (1, 3, 16, 64, 256), (3, 3, 5, 33, 7), (1, 8, 16, 3, 25)],
    ids=["deep", "usual", "wide", "cut", "codes_of_32_bits"],
)
def test_all_are_the_reference(
    B: int, D: int, k: int, count: int, num_nodes: int, step: float, device: torch.device
) -> None:
    case = inputs(B, D, k, 50, device, step=step)
    expected = slim_posterior_reference(*case, 0.1, count, num_nodes)
    assert_equal(slim_posterior_kernel(*case, 0.1, count, num_nodes), expected)
    if fits_host(Sizes(D, k, count, num_nodes)):
        assert_equal(on_host(*case, 0.1, count, num_nodes), expected)


@pytest.mark.parametrize("pairs", [0, 1, 2, 3, 8, 9])
def test_every_counted_pair_is_found(pairs: int, device: torch.device) -> None:
    """Any pair is the likeliest when its turn comes, the first and the last key as well."""
    V = 3
    key_P, zeros_V = torch.randperm(V * V)[:pairs].sort().values.to(device), torch.zeros(V, device=device)
    ids_BDk = torch.arange(V, device=device).expand(V, 1, V).contiguous()
    correlations = Correlations(key_P, torch.full((pairs,), 5.0, device=device), zeros_V, zeros_V - INF)
    root_B = torch.arange(V, device=device)
    out = slim_posterior_kernel(root_B, ids_BDk, torch.zeros(V, 1, V, device=device), correlations, 0.0, V, V + 1)
    for root in range(V):
        followers = [key - root * V for key in key_P.tolist() if key // V == root]
        assert out.tokens_BN[root].tolist() == [root, *followers] + [root] * (V - len(followers))


@pytest.mark.parametrize("fault", [NAN, INF, -INF])
def test_faulty_inputs_make_their_hypotheses_impossible(fault: float, device: torch.device) -> None:
    root_B, ids_BDk, log_p_BDk, correlations = inputs(3, 3, 3, 9, device)
    ids_BDk[0, 0, 1], log_p_BDk[0, 0, 1] = -1, -INF  # what a head leaves that has fewer than k candidates
    log_p_BDk[0, 1, 0], log_p_BDk[2] = fault, fault
    correlations.log_r_P[::3] = fault
    correlations.first_V[:3] = fault
    out = slim_posterior_kernel(root_B, ids_BDk, log_p_BDk, correlations, 0.0, 20, 30)
    assert_equal(out, slim_posterior_reference(root_B, ids_BDk, log_p_BDk, correlations, 0.0, 20, 30))
    assert_equal(out, on_host(root_B, ids_BDk, log_p_BDk, correlations, 0.0, 20, 30))
    assert int(out.num_nodes_B[0]) > 1
    assert out.num_nodes_B[2] == 1, "nothing is possible"


def test_what_is_refused(device: torch.device) -> None:
    root_B, ids_BDk, log_p_BDk, correlations = inputs(2, 3, 4, 9, device)

    def call(root: Tensor = root_B, ids: Tensor = ids_BDk, log_p: Tensor = log_p_BDk, K: int = 5, N: int = 9) -> None:
        slim_posterior_kernel(root, ids, log_p, correlations, 0.0, K, N)

    with pytest.raises(ValueError, match=r"log_p must be \(2, 3, 4\) of torch.float32 and contiguous, got .* with str"):
        call(log_p=log_p_BDk.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match=r"log_p must be .* got \(2, 3, 4\) of torch.bfloat16"):
        call(log_p=log_p_BDk.bfloat16())
    with pytest.raises(ValueError, match=r"root must be \(2,\)"):
        call(root=root_B[:1])
    with pytest.raises(ValueError, match=r"ids must be .* of torch\.int64"):
        call(ids=ids_BDk.int())
    with pytest.raises(ValueError, match=r"takes 1\.\.64 hypotheses, got 65"):
        call(K=65)
    with pytest.raises(ValueError, match=r"takes 1\.\.256 nodes, got 257"):
        call(N=257)


def test_operator_and_dispatch(device: torch.device) -> None:
    root_B, ids_BDk, log_p_BDk, correlations = inputs(2, 3, 4, 9, device)
    torch.library.opcheck(_slim_posterior, (root_B, ids_BDk, log_p_BDk, *correlations, 0.1, 6, 14))
    for count in (6, 65):  # the second is more than the kernel takes
        out = slim_posterior(root_B, ids_BDk, log_p_BDk, correlations, 0.1, count, 14)
        assert_equal(out, slim_posterior_reference(root_B, ids_BDk, log_p_BDk, correlations, 0.1, count, 14))


def test_inputs_may_lie_apart(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As columns of what a graph wrote; the kernel is asked also where there is no GPU."""
    monkeypatch.setattr("rayspec_kernels.slim_posterior.uses_kernel", lambda *tensors: True)
    *tensors, correlations = inputs(2, 3, 4, 9, device)
    apart = (t.repeat_interleave(2, dim=-1)[..., ::2] for t in tensors)
    expected = slim_posterior_reference(*tensors, correlations, 0.1, 6, 14)
    assert_equal(slim_posterior(*apart, correlations, 0.1, 6, 14), expected)
