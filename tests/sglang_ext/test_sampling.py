"""Sampling parts against SGLang's own functions, without an engine."""

import importlib.util
import runpy
from typing import Any

import pytest
import torch
from chi_square import p_value
from torch import Tensor

from rayspec_kernels.cpu.murmur_hash import murmur_hash32_reference
from rayspec_kernels.cpu.sampling_distribution import sampling_distribution_reference
from sglang_ext.adapter.cpu.seeds import merge_with_seeds
from sglang_ext.adapter.workers.sampling import draw_drafts, requested_distribution, sample_min_p

T, V = 200, 37
ALL = 1 << 30
FILTERS = {
    "top_k": (5, 1.0, 0.0),
    "top_p": (ALL, 0.7, 0.0),
    "min_p": (ALL, 1.0, 0.1),
    "joint_top_p_binds": (8, 0.5, 0.0),
    "joint_top_k_binds": (2, 0.95, 0.0),
    "all": (8, 0.8, 0.15),
    "greedy": (1, 1.0, 0.0),
    "only_the_best_passes": (ALL, 1e-6, 0.0),
    "off": (ALL, 1.0, 0.0),
}


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


def rows(seed: int, count: int = T) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(3 * torch.randn(count, V, generator=generator), dim=-1)


def columns(names: list[str], count: int = T) -> list[Tensor]:
    return [torch.tensor([FILTERS[names[t % len(names)]][i] for t in range(count)]) for i in range(3)]


def batch_info(names: list[str], count: int, seeds: Tensor | None = None) -> Any:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    top_k, top_p, min_p = columns(names, count)
    return SamplingBatchInfo(
        temperatures=torch.ones(count, 1),
        top_ps=top_p,
        top_ks=top_k.int(),
        min_ps=min_p,
        is_all_greedy=bool((top_k == 1).all()),
        is_any_greedy=bool((top_k == 1).any()),
        need_top_p_sampling=bool((top_p != 1).any()),
        need_top_k_sampling=bool((top_k != ALL).any()),
        need_min_p_sampling=bool((min_p > 0).any()),
        max_top_k=None if bool((top_k == ALL).any()) else int(top_k.max()),
        vocab_size=V,
        sampling_seed=seeds,
        device="cpu",
    )


def plain_distribution(p_TV: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """What SGLang's plain sampler draws from, read off its own filtered weights."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    _, weights, order, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        p_TV.clone(), top_k, top_p, min_p, bool((min_p > 0).any()), None, torch.zeros(T), return_filtered_probs=True
    )
    distribution = torch.zeros_like(p_TV).scatter_(1, order.long(), weights)
    return distribution / distribution.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("names", [[name] for name in FILTERS] + [list(FILTERS)], ids=[*FILTERS, "mixed_rows"])
def test_distribution_is_that_of_the_plain_sampler(names: list[str]) -> None:
    p_TV = rows(0)
    torch.testing.assert_close(
        sampling_distribution_reference(p_TV, *columns(names)), plain_distribution(p_TV, *columns(names))
    )


@pytest.mark.parametrize("names", [["all"], ["all", "top_p", "greedy"]], ids=["bounded_top_k", "mixed_rows"])
def test_every_node_of_a_request_has_the_distribution_of_the_request(names: list[str]) -> None:
    nodes, requests = 4, T // 4
    p_TV = rows(1)
    expected = sampling_distribution_reference(p_TV, *(x.repeat_interleave(nodes) for x in columns(names, requests)))
    torch.testing.assert_close(requested_distribution(p_TV, batch_info(names, requests)), expected)


@pytest.mark.parametrize("seeded", [False, True])
def test_drafts_follow_the_distribution_that_is_returned(seeded: bool) -> None:
    count, names = 60_000, ["all", "off", "greedy"]
    torch.manual_seed(0)
    q_TV = rows(2, 3).repeat(count // 3, 1)
    info = batch_info(names, count, seeds=torch.arange(count) if seeded else None)
    distribution_TV, ids_T1, probability_T1 = draw_drafts(q_TV, info, torch.full((count,), 9), 2)
    assert (ids_T1.dtype, ids_T1.shape, probability_T1.shape) == (torch.int64, (count, 1), (count, 1))
    torch.testing.assert_close(probability_T1, distribution_TV.gather(1, ids_T1))
    torch.testing.assert_close(
        distribution_TV[:2], sampling_distribution_reference(q_TV[:2], *(x[:2] for x in columns(names)))
    )
    assert torch.equal(distribution_TV[2], torch.eye(V)[q_TV[2].argmax()])
    for row in range(3):
        drawn = torch.bincount(ids_T1[row::3, 0], minlength=V)
        assert p_value((drawn, distribution_TV[row])) > 1e-3


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("k", [2, 3])
def test_siblings_are_drawn_one_after_the_other_without_replacement(k: int, seeded: bool) -> None:
    count, names = 60_000, ["top_k", "off", "greedy"]
    torch.manual_seed(0)
    q_TV = rows(2, 3).repeat(count // 3, 1)
    info = batch_info(names, count, seeds=torch.arange(count) if seeded else None)
    distribution_TV, ids_Tk, probability_Tk = draw_drafts(q_TV, info, torch.full((count,), 9), 2, k)
    torch.testing.assert_close(probability_Tk, distribution_TV.gather(1, ids_Tk))
    base_k = V ** torch.arange(k - 1, -1, -1)
    for row in range(2):
        drawn = torch.bincount((ids_Tk[row::3] * base_k).sum(dim=1), minlength=V**k)
        assert p_value((drawn, chances_of_draws(distribution_TV[row], k))) > 1e-3, names[row]
    assert torch.equal(ids_Tk[2::3], q_TV[2].topk(k).indices.expand(count // 3, k))


def chances_of_draws(q_V: Tensor, k: int) -> Tensor:
    """Of all ordered draws of k tokens without replacement, [V ** k]; q has more than k tokens."""
    chance_X, left_XV = torch.ones(1, dtype=torch.float64), q_V.double()[None]
    for _ in range(k):
        chance_XV = chance_X[:, None] * left_XV / left_XV.sum(dim=1, keepdim=True)
        taken_XVV = torch.eye(V, dtype=torch.bool).expand(len(left_XV), V, V)
        left_XV = left_XV[:, None].expand_as(taken_XVV).masked_fill(taken_XVV, 0).flatten(0, 1)
        chance_X = chance_XV.flatten()
    return chance_X


def test_seeded_drafts_do_not_see_their_batch() -> None:
    q_TV, positions, seeds = rows(3), torch.arange(T) + 4, torch.arange(T) * 7 - 100
    info = batch_info(["all", "off"], T, seeds)
    _, ids, _ = draw_drafts(q_TV, info, positions, 1)
    order = torch.randperm(T // 2, generator=torch.Generator().manual_seed(0)) * 2 + 1  # the rows without a filter
    _, again, _ = draw_drafts(q_TV[order], batch_info(["off"], T // 2, seeds[order]), positions[order], 1)
    assert torch.equal(again, ids[order])
    _, other_step, _ = draw_drafts(q_TV, info, positions, 2)
    _, other_position, _ = draw_drafts(q_TV, info, positions + 1, 1)
    assert not torch.equal(other_step, ids)
    assert not torch.equal(other_position, ids)


def test_seeded_sampling_with_a_min_p() -> None:
    from sglang.srt.layers import sampler

    plain = sampler.top_k_top_p_min_p_sampling_from_probs_torch
    assert plain.__wrapped__.__module__ == sampler.__name__, "our hook is in place"
    count = 30_000
    flat_1V = torch.softmax(rows(5, 1).log() / 3, dim=-1)
    p_TV, seeds, positions = flat_1V.repeat(count, 1), torch.arange(count), torch.full((count,), 3)
    filters = columns(["all"], count)
    with pytest.raises(AssertionError):
        plain.__wrapped__(p_TV.clone(), *filters, True, seeds, positions)
    for options in ({}, {"max_top_k": 8}):
        drawn = sample_min_p(plain.__wrapped__, p_TV.clone(), *filters, True, seeds, positions, **options)
        distribution_V = sampling_distribution_reference(p_TV[:1], *(x[:1] for x in filters))[0]
        assert p_value((torch.bincount(drawn.long(), minlength=V), distribution_V)) > 1e-3


def test_merging_seeded_and_unseeded_batches() -> None:
    torch.manual_seed(0)
    for seeded_first in (True, False):
        sides = [batch_info(["off"], 3, seeds=torch.tensor([5, 6, 7])), batch_info(["off"], 2)]
        mine, other = sides if seeded_first else sides[::-1]
        merge_with_seeds(
            lambda a, b: setattr(a, "sampling_seed", torch.cat([a.sampling_seed, b.sampling_seed])), mine, other
        )
        kept = mine.sampling_seed[:3] if seeded_first else mine.sampling_seed[2:]
        assert kept.tolist() == [5, 6, 7]
        assert len(set(mine.sampling_seed.tolist())) == 5


SEEDS = [0, 1, 42, 2**31 + 5, 2**40 + 3, -1, -(2**63), 2**63 - 1]
POSITIONS = [0, 1, 7, 2**31 + 1, 2**32 - 1, 5, 3, 3]
COLUMNS = [0, 1, 2, 31, 32767, 2**31, 2**32 - 1]


def test_hash_equals_the_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file alone, without SGLang around it, and interpreted."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    (folder,) = package.submodule_search_locations or ()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel = runpy.run_path(f"{folder}/kernels/ops/sampling/murmur_hash.py")["murmur_hash32_kernel"]
    seeds, positions, columns = (torch.tensor(x) for x in (SEEDS, POSITIONS, COLUMNS))
    found = torch.empty(len(seeds), len(columns), dtype=torch.int64)
    kernel[(len(seeds), 1)](seeds, positions, columns, found, len(seeds), len(columns), BLOCK_SIZE=8)
    assert torch.equal(found % 2**32, murmur_hash32_reference(seeds, positions, columns))
