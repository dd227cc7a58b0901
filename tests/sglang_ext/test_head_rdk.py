"""RDK: q'' = q M over any base head."""

from typing import Any

import pytest
import torch
from head_cases import (
    DYNASPEC,
    RDK,
    SPECS,
    STEPS,
    STOPS,
    TARGET_HEAD_VH,
    TRUNCATED,
    H,
    Rows,
    V,
    make_head,
    ranked_ids,
    some_distribution,
)
from torch import Tensor

from sglang_ext.heads import DraftHead, build_head, head_from_target, parse_head
from sglang_ext.heads.affinity import AFFINITY_TEMPERATURE, nearest_tokens
from sglang_ext.heads.rdk import sums_of

T = 7
BASES = {name.removeprefix("rdk_"): spec for name, spec in SPECS.items() if spec["kind"] == "rdk"}


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest) -> str:
    return request.param


def matrix(head: DraftHead) -> Tensor:
    """M [V, V], written out."""
    own, J = head.config.self_weight, head.config.neighbours
    rows = own * torch.eye(V, dtype=torch.float64)
    for v in range(V):
        weights = head.neighbour_weights[v].double() / head.neighbour_weights[v].double().sum()
        for j in range(J):
            rows[v, head.neighbour_ids[v, j]] += (1 - own) * weights[j]
    return rows


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [None, 0.7, 1.6])
@pytest.mark.parametrize("step", STEPS)
def test_distribution_is_the_bases_times_the_matrix(
    base: str, step: int, temperature: float | None, stored: torch.dtype
) -> None:
    """At every temperature: the base's distribution is tempered, and its mass then handed on."""
    head, drawn = make_head(BASES[base]).to(stored).double(), Rows.draw(T)
    expected_TV = drawn.distribution(head.base, step, temperature).double() @ matrix(head)
    torch.testing.assert_close(drawn.distribution(head, step, temperature).double(), expected_TV, rtol=1e-4, atol=1e-6)


def test_rows_of_the_matrix_sum_to_one_also_once_they_are_rounded(base: str) -> None:
    for head in (make_head(BASES[base]), make_head(BASES[base]).bfloat16()):
        head.check(STOPS)
        torch.testing.assert_close(matrix(head).sum(dim=1), torch.ones(V, dtype=torch.float64))


@pytest.mark.parametrize("step", STEPS)
def test_a_token_that_keeps_everything_is_plain_truncation(base: str, step: int) -> None:
    head, drawn = make_head({**BASES[base], "self_weight": 1.0}).double(), Rows.draw(T)
    plain_TV = drawn.distribution(head.base, step)
    distribution_TV = drawn.distribution(head, step)
    torch.testing.assert_close(distribution_TV, plain_TV)
    assert torch.equal(distribution_TV > 0, plain_TV > 0)


def test_support_is_the_bases_and_its_neighbours() -> None:
    head, drawn = make_head(RDK).double(), Rows.draw(T)
    kept = ranked_ids()[:19].tolist()
    expected = {*kept, *head.neighbour_ids[kept].flatten().tolist()}
    assert len(expected) > 25  # it reaches beyond the base
    for distribution_V in drawn.distribution(head):
        assert set(distribution_V.nonzero().flatten().tolist()) == expected


def test_sums_are_the_same_to_the_bit_in_any_order() -> None:
    """As CUDA adds them, on which tensor-parallel ranks must agree."""
    generator = torch.Generator().manual_seed(0)
    values_Tn = torch.rand(4, 3000, generator=generator).pow(8)
    values_Tn /= values_Tn.sum(dim=1, keepdim=True)
    columns_Tn = torch.randint(5, (4, 3000), generator=generator)
    order_n = torch.randperm(3000, generator=generator)
    sums_T5 = sums_of([(values_Tn, columns_Tn)], 5)
    halves = [(values_Tn[:, n], columns_Tn[:, n]) for n in order_n.split(1500)]
    again_T5 = sums_of(halves, 5)
    assert torch.equal(sums_T5, again_T5)
    exact_T5 = torch.zeros(4, 5, dtype=torch.float64).scatter_add_(1, columns_Tn, values_Tn.double())
    assert torch.equal(sums_T5, exact_T5.float())
    floats_T5, other_T5 = (
        torch.zeros(4, 5).scatter_add_(1, columns_Tn[:, o], values_Tn[:, o]) for o in (slice(None), order_n)
    )
    assert not torch.equal(floats_T5, other_T5), "the order would not matter in floating point: this shows nothing"


def test_a_distribution_does_not_depend_on_the_order_of_candidates() -> None:
    """The same candidates in another order hand on the same mass in another order."""
    head, drawn = make_head(RDK).double(), Rows.draw(T)
    distribution_TV = drawn.distribution(head)
    order = torch.randperm(len(head.base.ids), generator=torch.Generator().manual_seed(1))
    q_TS, ids_S = head.base.distribution(drawn.hidden_TH)
    head.base.distribution = lambda *_: (q_TS[:, order], ids_S[order])
    assert torch.equal(drawn.distribution(head), distribution_TV)


def test_neighbours_are_the_nearest_other_tokens_by_cosine_less_what_all_rows_share() -> None:
    weight_VH = TARGET_HEAD_VH + 30.0  # no softmax sees it
    ids_VJ, weights_VJ = nearest_tokens(weight_VH, 3)
    rows_VH = TARGET_HEAD_VH - TARGET_HEAD_VH.mean(dim=0)
    for v in range(V):
        cosine = [float(torch.cosine_similarity(rows_VH[v], rows_VH[w], dim=0)) for w in range(V)]
        best = sorted((w for w in range(V) if w != v), key=lambda w: -cosine[w])[:3]
        assert ids_VJ[v].tolist() == best
        expected = torch.tensor([cosine[w] / AFFINITY_TEMPERATURE for w in best]).softmax(dim=0)
        torch.testing.assert_close(weights_VJ[v], expected, rtol=1e-4, atol=1e-5)


def test_neighbours_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nearest_tokens(TARGET_HEAD_VH, 4)
    monkeypatch.setattr("sglang_ext.heads.affinity._CHUNK", 10)
    for got, expected in zip(nearest_tokens(TARGET_HEAD_VH, 4), whole, strict=True):
        torch.testing.assert_close(got, expected)


def test_it_accepts_more_where_the_target_likes_the_neighbours_of_pruned_tokens() -> None:
    """Every kept token has a twin that was pruned; the target shares each token's mass with its twin."""
    kept = torch.arange(0, 20, 2)
    weight_VH = TARGET_HEAD_VH[:20].clone()
    weight_VH[1::2] = weight_VH[::2] + 0.05 * TARGET_HEAD_VH[20:30]
    spec = {"kind": "rdk", "base": {"kind": "truncated", "size": 10}, "neighbours": 1, "self_weight": 0.7}
    head = head_from_target(parse_head(spec), weight_VH, {"ids": kept}).double()
    assert head.neighbour_ids[kept, 0].tolist() == (kept + 1).tolist()
    drawn = Rows.draw(40)
    p_TV = (drawn.hidden_TH @ weight_VH.T).softmax(dim=-1).float()

    @torch.no_grad()
    def acceptance(one: DraftHead) -> Tensor:
        return torch.minimum(p_TV, one.target_logits(drawn.hidden_TH).softmax(dim=-1)).sum(dim=-1)

    truncated_T, redistributed_T = acceptance(head.base), acceptance(head)
    assert bool((redistributed_T >= truncated_T - 1e-6).all())
    assert float((redistributed_T - truncated_T).mean()) > 0.1
    assert bool((truncated_T <= p_TV[:, kept].sum(dim=-1) + 1e-6).all())
    assert bool((redistributed_T > p_TV[:, kept].sum(dim=-1)).any())  # more than any distribution on the kept tokens


def test_it_trains_its_base() -> None:
    head, p_TV = make_head(RDK).double(), some_distribution(T)
    drawn = Rows.draw(T)
    assert torch.equal(head.loss(drawn.hidden_TH, 0, None, p_TV), head.base.loss(drawn.hidden_TH, 0, None, p_TV))
    assert {name for name, _ in head.named_parameters()} == {"base.weight"}


def test_it_routes_where_its_base_does() -> None:
    assert not make_head(RDK).routes
    head, drawn = make_head({**RDK, "base": DYNASPEC}).double(), Rows.draw(T)
    assert head.routes
    assert torch.equal(drawn.routed(head, 1), drawn.routed(head.base, 1))


def test_a_base_that_was_not_loaded_is_loud(base: str) -> None:
    head = make_head(BASES[base])
    with torch.no_grad():
        head.base.weight.fill_(torch.nan)
    assert bool(Rows.draw(T).to(torch.float32).distribution(head).isnan().any(dim=-1).all())


def test_cost_is_the_bases_and_a_distribution_over_the_vocabulary() -> None:
    head = make_head(RDK)
    bytes_, flops = head.base.cost(3)
    assert head.cost(3) == (bytes_ + 3 * V * 4, flops)


def test_damaged_affinities_are_refused() -> None:
    for name, value, message in (
        ("neighbour_ids", V, r"neighbour_ids must be in 0\.\.52, got 53; make the head again"),
        ("neighbour_ids", -1, "neighbour_ids must be in"),
        ("neighbour_weights", 0.9, "must be non-negative rows that sum to 1"),
        ("neighbour_weights", torch.nan, "rows that sum to 1"),
    ):
        head = make_head(RDK)
        getattr(head, name)[4] = value
        with pytest.raises(ValueError, match=message):
            head.check()
    head = make_head(RDK)
    head.neighbour_weights[4] = torch.tensor([1.5, -0.25, -0.25])  # whose sum is right
    with pytest.raises(ValueError, match="non-negative"):
        head.check()


def test_its_base_is_checked_too() -> None:
    head = head_from_target(parse_head(RDK), TARGET_HEAD_VH, {"ids": ranked_ids()[2:]})  # without the stop ids
    with pytest.raises(ValueError, match=r"lacks the stop tokens \[0, 38\]"):
        head.check(STOPS)


COUNTED = {"kind": "rdk", "base": TRUNCATED, "affinity": "counted", "neighbours": 3}


def counted_head(spec: dict[str, Any], states_NH: Tensor) -> DraftHead:
    return head_from_target(parse_head(spec), TARGET_HEAD_VH, {"ids": ranked_ids(), "states": states_NH})


@torch.no_grad()
@pytest.mark.parametrize("neighbours", [1, 3, V - 1], ids=["one", "few", "all"])
def test_counted_affinity_is_the_mean_over_the_states(neighbours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out token by token; what is not among the largest is in the fallback, to the last bit of mass."""
    monkeypatch.setattr("sglang_ext.heads.affinity._CHUNK", 44)
    monkeypatch.setattr("sglang_ext.heads.affinity.MAX_PAIRS", V)
    states_NH = Rows.draw(60).hidden_TH
    head = counted_head({**COUNTED, "neighbours": neighbours}, states_NH)
    full_NV = (states_NH @ TARGET_HEAD_VH.T).softmax(dim=-1)
    kept = head.base.ids.tolist()
    cut = [u for u in range(V) if u not in kept]
    q_NV = torch.zeros_like(full_NV)
    q_NV[:, kept] = full_NV[:, kept] / full_NV[:, kept].sum(dim=-1, keepdim=True)
    left_V = full_NV.sum(dim=0) * torch.tensor([float(u in cut) for u in range(V)])
    for v in kept:
        pair_V = torch.tensor([float(q_NV[:, v] @ full_NV[:, u]) if u in cut else 0.0 for u in range(V)]).double()
        share = float(pair_V.sum() / q_NV[:, v].sum())
        assert float(head.kept_share[v]) == pytest.approx(1 - share, abs=1e-5)
        best = pair_V.topk(min(neighbours, len(cut)))
        assert head.neighbour_ids[v].tolist()[: len(best.indices)] == best.indices.tolist()
        torch.testing.assert_close(
            head.neighbour_weights[v, : len(best.values)].double(), best.values / pair_V.sum(), rtol=1e-4, atol=1e-6
        )
        left_V[best.indices] -= best.values
    assert bool((head.kept_share[cut] == 1).all())
    if neighbours < len(cut):
        torch.testing.assert_close(head.fallback.double(), left_V / left_V.sum(), rtol=1e-3, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_counted_distribution_hands_on_the_whole_share(stored: torch.dtype, share: float) -> None:
    """Over the states that it was counted on, the cut tokens get in the mean what the full head gives them, or the
    share of it that was asked for."""
    states_NH = Rows.draw(80).hidden_TH
    head = counted_head({**COUNTED, "share": share}, states_NH).to(stored).double()
    head.check(STOPS)
    distribution_NV = head.target_distribution(states_NH, 0)
    torch.testing.assert_close(distribution_NV.sum(dim=-1), torch.ones(80))
    full_NV = (states_NH @ TARGET_HEAD_VH.T).softmax(dim=-1).float()
    cut = [u for u in range(V) if u not in head.base.ids.tolist()]
    tolerance = 1e-4 if stored == torch.float32 else 1e-2
    torch.testing.assert_close(
        distribution_NV[:, cut].mean(dim=0), share * full_NV[:, cut].mean(dim=0), rtol=0, atol=tolerance
    )


@torch.no_grad()
def test_counted_affinity_accepts_more_than_truncation_where_states_look_alike() -> None:
    """Of a target that the full head is: each of its states comes near one of a few."""
    centres_CH = Rows.draw(5, seed=7).hidden_TH
    drawn_NH = centres_CH.repeat(60, 1) + 0.3 * Rows.draw(300, seed=8).hidden_TH
    head = counted_head({**COUNTED, "neighbours": 6}, drawn_NH[:200]).double()
    p_NV = (drawn_NH[200:] @ TARGET_HEAD_VH.T).softmax(dim=-1).float()

    def acceptance(one: DraftHead) -> float:
        return float(torch.minimum(p_NV, one.target_distribution(drawn_NH[200:], 0)).sum(dim=-1).mean())

    assert acceptance(head) > acceptance(head.base) + 0.05


def test_counted_affinity_needs_states_of_a_trained_drafter() -> None:
    with pytest.raises(ValueError, match="along a trained drafter with a full head, on the target's"):
        head_from_target(parse_head(COUNTED), TARGET_HEAD_VH, {"ids": ranked_ids()})


def test_damaged_counts_are_refused() -> None:
    for name, value, message in (
        ("kept_share", 1.5, r"kept_share must be in 0\.\.1"),
        ("kept_share", torch.nan, "kept_share must be in"),
        ("fallback", 0.9, "fallback a distribution over the vocabulary"),
        ("neighbour_weights", 0.9, "rows that sum to at most 1, got sums of"),
    ):
        head = counted_head(COUNTED, Rows.draw(20).hidden_TH)
        getattr(head, name)[4] = value
        with pytest.raises(ValueError, match=message):
            head.check(STOPS)


def test_each_affinity_spells_out_its_own_options() -> None:
    """A head from before there was another affinity is recognised."""
    cosine = build_head(parse_head(RDK), hidden_size=H, vocab_size=V).spec()
    assert set(cosine) == {"kind", "base", "neighbours", "self_weight"}
    counted = build_head(parse_head(COUNTED), hidden_size=H, vocab_size=V).spec()
    assert set(counted) == {"kind", "base", "neighbours", "affinity", "share"}
    assert counted["share"] == 0.5


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "itself": ({"base": RDK}, r"draft_head\.base cannot be another rdk head"),
    "string_base": (
        {"base": "truncated"},
        r"draft_head\.base must be a mapping, \{kind: .*\}, got 'truncated'",
    ),
    "no_base": ({}, "draft_head.base has no value"),
    "no_kind": ({"base": {"size": 3}}, r"draft_head\.base\.kind must be one of .*, got None"),
    "base_option": ({"base": {"kind": "truncated", "size": V + 1}}, r"draft_head\.base\.size must be in"),
    "neighbours_zero": ({"base": TRUNCATED, "neighbours": 0}, r"draft_head\.neighbours must be at least 1, got 0"),
    "neighbours_v": ({"base": TRUNCATED, "neighbours": V}, r"draft_head\.neighbours must be in 1\.\.52, got 53"),
    "self_zero": ({"base": TRUNCATED, "self_weight": 0.0}, r"draft_head\.self_weight must be in \(0, 1\], got 0\.0"),
    "self_above": ({"base": TRUNCATED, "self_weight": 1.01}, r"self_weight must be in \(0, 1\], got 1\.01"),
    "self_nan": ({"base": TRUNCATED, "self_weight": torch.nan}, r"self_weight must be a finite number, got nan"),
    "affinity": (
        {"base": TRUNCATED, "affinity": "guessed"},
        r"draft_head\.affinity must be one of cosine, counted, got 'guessed'",
    ),
    "self_of_counted": (
        {"base": TRUNCATED, "affinity": "counted", "self_weight": 0.9},
        r"draft_head\.self_weight is 0\.9, but with affinity counted .* leave it out",
    ),
    "share_above": (
        {"base": TRUNCATED, "affinity": "counted", "share": 1.1},
        r"draft_head\.share must be in 0\.\.1, got",
    ),
    "share_of_cosine": ({"base": TRUNCATED, "share": 0.5}, r"draft_head\.share is of affinity counted, got 0\.5"),
    "counted_on_routes": (
        {"base": DYNASPEC, "affinity": "counted"},
        "affinity counted needs a base that looks at the hidden state alone, but dynaspec routes",
    ),
    "self_string": ({"base": TRUNCATED, "self_weight": "1"}, r"self_weight must be a number, got '1'"),
}


@pytest.mark.parametrize("fault", BAD_OPTIONS)
def test_bad_options(fault: str) -> None:
    options, message = BAD_OPTIONS[fault]
    with pytest.raises(ValueError, match=message):
        build_head(parse_head({"kind": "rdk", **options}), hidden_size=H, vocab_size=V)


def test_options_of_the_base_are_spelled_out() -> None:
    """So that a checkpoint says all of it, and a rerun with the same words finds it."""
    head = build_head(
        parse_head({"kind": "rdk", "base": {"kind": "truncated", "size": 9}}), hidden_size=H, vocab_size=V
    )
    assert head.spec()["base"] == {"kind": "truncated", "size": 9, "step_sizes": None}
