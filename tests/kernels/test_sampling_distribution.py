"""The distribution of a request, against a filter that goes through the tokens one by one."""

import pytest
import torch

from rayspec_kernels.cpu.sampling_distribution import sampling_distribution_reference

T, V = 60, 37
ALL = 1 << 30


def rows(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(3 * torch.randn(T, V, generator=generator), dim=-1)


def one_by_one(p_V: torch.Tensor, top_k: int, top_p: float, min_p: float, in_turn: bool = False) -> torch.Tensor:
    V = len(p_V)
    order = sorted(range(V), key=lambda v: (-float(p_V[v]), v))
    left = sum(float(p_V[v]) for v in order[:top_k])
    distribution, before = torch.zeros(V), 0.0
    for rank, v in enumerate(order):
        p = float(p_V[v])
        if rank < top_k and before <= top_p * (left if in_turn else 1.0) and p >= min_p * float(p_V[order[0]]):
            distribution[v] = p
        before += p
    return distribution / distribution.sum()


FILTERS = {
    "top_k": (5, 1.0, 0.0),
    "top_p": (ALL, 0.7, 0.0),
    "min_p": (ALL, 1.0, 0.1),
    "top_p_binds": (8, 0.5, 0.0),
    "top_k_binds": (2, 0.95, 0.0),
    "all": (8, 0.8, 0.15),
    "greedy": (1, 1.0, 0.0),
    "only_the_best_passes": (ALL, 1e-6, 0.0),
    "off": (ALL, 2.0, 0.0),
}


def columns(names: list[str]) -> list[torch.Tensor]:
    return [torch.tensor([FILTERS[names[t % len(names)]][i] for t in range(T)]) for i in range(3)]


@pytest.mark.parametrize("names", [[name] for name in FILTERS] + [list(FILTERS)], ids=[*FILTERS, "mixed_rows"])
@pytest.mark.parametrize("in_turn", [False, True], ids=["joint", "in_turn"])
def test_keeps_the_tokens_that_pass(names: list[str], in_turn: bool) -> None:
    p_TV, flags = rows(0), torch.full((T,), in_turn)
    distribution = sampling_distribution_reference(p_TV, *columns(names), top_p_after_top_k_T=flags)
    for t in range(T):
        expected = one_by_one(p_TV[t], *FILTERS[names[t % len(names)]], in_turn)
        torch.testing.assert_close(distribution[t], expected, rtol=1e-5, atol=1e-7)  # float32 sums in another order


def test_filters_that_are_not_given_do_nothing() -> None:
    p_TV, off = rows(2), columns(["off"])
    torch.testing.assert_close(sampling_distribution_reference(p_TV), p_TV)
    for i, value in enumerate((torch.full((T,), 4), torch.full((T,), 0.6), torch.full((T,), 0.2))):
        alone: list[torch.Tensor | None] = [None, None, None]
        alone[i] = value
        among = [*off]
        among[i] = value
        torch.testing.assert_close(
            sampling_distribution_reference(p_TV, *alone), sampling_distribution_reference(p_TV, *among)
        )


def test_a_bound_on_top_k_changes_nothing() -> None:
    p_TV, top_k, top_p = rows(3), torch.arange(T) % 9 + 1, torch.full((T,), 0.9)
    bounded = sampling_distribution_reference(p_TV, top_k, top_p, max_top_k=9)
    torch.testing.assert_close(bounded, sampling_distribution_reference(p_TV, top_k, top_p))


@pytest.mark.parametrize("peak", [6.0, 2.0, 0.1], ids=["few_columns", "more_columns", "all_columns"])
def test_wide_vocabulary(peak: float) -> None:
    """Rows are as wide as the mass demands; the last two have no filter, or one that keeps half of the vocabulary."""
    width, filters = 5000, [(ALL, 0.9, 0.0), (40, 0.9, 0.0), (1, 1.0, 0.0), (ALL, 1.0, 0.01), (ALL, 1.0, 0.0)]
    for some in (filters[:3], filters, [*filters, (2500, 1.0, 0.0)]):
        p_TV = torch.softmax(peak * torch.randn(len(some), width, generator=torch.Generator().manual_seed(4)), dim=-1)
        distribution = sampling_distribution_reference(p_TV, *(torch.tensor(x) for x in zip(*some, strict=True)))
        for t, filter_ in enumerate(some):
            torch.testing.assert_close(distribution[t], one_by_one(p_TV[t], *filter_), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("max_top_k", [None, 2], ids=["sort", "topk"])
def test_greedy_rows_are_one_hot_at_the_lowest_of_equal_ids(max_top_k: int | None) -> None:
    p_TV = torch.full((3, V), 0.5 / (V - 2))
    p_TV[:, [30, 11]] = 0.25
    distribution = sampling_distribution_reference(p_TV, torch.tensor([1, 1, 2]), max_top_k=max_top_k)
    assert distribution[0].nonzero().tolist() == [[11]]
    assert float(distribution[0, 11]) == 1.0
    assert distribution[2].nonzero().tolist() == [[11], [30]]
