"""DynaSpec and CORAL: a router picks clusters of tokens."""

from typing import Any

import pytest
import torch
from head_cases import (
    CORAL,
    DYNASPEC,
    SPECS,
    STEPS,
    STOPS,
    TARGET_HEAD_VH,
    H,
    Rows,
    V,
    cluster_map,
    cross_entropy,
    ids_of,
    make_head,
    seeded,
    some_distribution,
)
from torch import Tensor

from rayspec_kernels.router_topk.reference import Router, router_scores_reference
from sglang_ext.heads import DraftHead, build_head, head_from_target, parse_head
from sglang_ext.heads.base import NO_TOKEN
from sglang_ext.heads.dynaspec import _EPS, DynaSpecConfig

T = 7
UNION = {"dynaspec": SPECS["dynaspec_union"], "coral": SPECS["coral_union"]}
OWN = {"dynaspec": DYNASPEC, "coral": CORAL}
ALL = {"dynaspec": SPECS["dynaspec_all"], "coral": {**CORAL, "top": 5}}


@pytest.fixture(params=OWN)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@torch.no_grad()
def full_logits(drawn: Rows) -> Tensor:
    return make_head(SPECS["full"]).double().target_logits(drawn.hidden_TH)


def router_scores(head: DraftHead, drawn: Rows) -> Tensor:
    """[T, M], written out."""
    if head.kind == "coral":
        return drawn.hidden_TH @ head.router.T
    units = [x / x.square().mean(dim=-1, keepdim=True).sqrt() for x in (drawn.embed_TH, drawn.feature_TH)]
    inner = torch.cat(units, dim=-1) @ head.router_in.T + head.router_in_bias
    return inner.clamp(min=0) @ head.router_out.T + head.router_out_bias


def chosen_ids(head: DraftHead, drawn: Rows, step: int) -> list[set[int]]:
    """What each row is to score: the pinned tokens and those of its best clusters."""
    best_TM = router_scores(head, drawn).argsort(dim=-1, descending=True)
    clusters = [{0, *(best_M[: head.config.budget(step)] + 1).tolist()} for best_M in best_TM]
    return [{v for v in range(V) if int(head.cluster_of[v]) in row} for row in clusters]


def untie(head: DraftHead) -> DraftHead:
    """Biases away from zero, so that none can be forgotten."""
    with torch.no_grad():
        for seed, name in enumerate(("router_in_bias", "router_out_bias")):
            if hasattr(head, name):
                getattr(head, name).copy_(seeded(len(getattr(head, name)), seed=20 + seed))
    return head.double()


@torch.no_grad()
def test_tiny_inputs_of_a_router_are_normed_as_in_its_kernel() -> None:
    """The mean square is 8 times what is added to it, which torch would choose by type."""
    head, drawn = untie(make_head(OWN["dynaspec"])), Rows.draw(T).to(torch.float64)
    router = Router(head.router_in, head.router_in_bias, head.router_out, head.router_out_bias)
    tiny = (drawn.embed_TH * 1e-3, drawn.feature_TH * 1e-3)
    torch.testing.assert_close(head.route(*tiny, 0), router_scores_reference(*tiny, router, _EPS))


def test_clusters_partition_the_vocabulary(kind: str) -> None:
    head = make_head(OWN[kind])
    rows = [head._pinned_P.tolist(), *(members[members >= 0].tolist() for members in head._members_MC)]
    assert sorted(v for row in rows for v in row) == list(range(V))
    for cluster, row in enumerate(rows):
        assert row == sorted(row)
        assert {int(head.cluster_of[v]) for v in row} == {cluster}


@pytest.mark.parametrize("step", STEPS)
def test_all_clusters_are_the_full_head_bit_for_bit(kind: str, step: int) -> None:
    head, drawn = make_head(ALL[kind]).double(), Rows.draw(T)
    assert torch.equal(head.target_logits(drawn.hidden_TH, step, drawn.routed(head, step)), full_logits(drawn))


@pytest.mark.parametrize("rows", [1, T], ids=["gathered", "all"])
@pytest.mark.parametrize("step", STEPS)
def test_each_row_scores_its_clusters_and_the_pinned_tokens(kind: str, rows: int, step: int) -> None:
    head, drawn = untie(make_head(OWN[kind])), Rows.draw(rows)
    got, expected = ids_of(drawn.candidates(head, step)), chosen_ids(head, drawn, step)
    assert [set(ids) for ids in got] == expected
    assert len({tuple(sorted(ids)) for ids in expected}) > (rows > 1)  # rows differ
    logits_TV = head.target_logits(drawn.hidden_TH, step, drawn.routed(head, step))
    for t, ids in enumerate(got):
        torch.testing.assert_close(logits_TV[t, ids], full_logits(drawn)[t, ids])


@pytest.mark.parametrize("spec", [OWN, UNION], ids=["own", "union"])
@pytest.mark.parametrize("step", STEPS)
def test_argmax_is_that_of_the_full_logits_on_the_ids(kind: str, spec: dict[str, Any], step: int) -> None:
    head, drawn = untie(make_head(spec[kind])), Rows.draw(T)
    full_TV = full_logits(drawn)
    proposal = head.propose(drawn.hidden_TH, step, 1, drawn.routed(head, step))
    expected = [
        max(ids, key=lambda v, t=t: float(full_TV[t, v])) for t, ids in enumerate(ids_of(drawn.candidates(head, step)))
    ]
    assert proposal.token_ids_Tk[:, 0].tolist() == expected


@pytest.mark.parametrize("rows", [1, 2, 3, T])
@pytest.mark.parametrize("step", STEPS)
def test_union_is_the_set_union(kind: str, rows: int, step: int) -> None:
    head, drawn = untie(make_head(UNION[kind])), Rows.draw(rows)
    union = set().union(*chosen_ids(head, drawn, step))
    candidates = drawn.candidates(head, step)
    assert [set(ids) for ids in ids_of(candidates)] == [union] * rows
    restricted_TV = torch.full((rows, V), -torch.inf)
    restricted_TV[:, sorted(union)] = full_logits(drawn)[:, sorted(union)]
    torch.testing.assert_close(drawn.distribution(head, step), restricted_TV.softmax(dim=-1))


@pytest.mark.parametrize(
    ("spec", "rows", "width"),
    [
        (OWN["dynaspec"], 1, 3 + 3 * 6),
        (OWN["dynaspec"], 2, V),
        (UNION["dynaspec"], 1, 3 + 3 * 6),
        (UNION["dynaspec"], 2, V),
        (OWN["coral"], 1, V),
        ({**DYNASPEC, "first": 1}, 2, 3 + 6),
        ({**DYNASPEC, "first": 1}, 3, V),
        ({**UNION["dynaspec"], "first": 1}, 2, 3 + 2 * 6),
        ({**UNION["dynaspec"], "first": 1}, 3, 3 + 3 * 6),
        ({**UNION["dynaspec"], "first": 1}, 4, V),
    ],
)
def test_no_more_than_half_of_the_vocabulary_is_gathered(spec: dict[str, Any], rows: int, width: int) -> None:
    """Of 53 tokens, 3 are pinned; dynaspec's clusters are padded to the largest of 6, coral's to 17."""
    assert Rows.draw(rows).candidates(make_head(spec).double()).logits_TS.shape == (rows, width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("union", [False, "request", True])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_packed_head_reads_what_its_rows_have_chosen(
    kind: str, union: bool | str, rows: int, dtype: torch.dtype
) -> None:
    """On a CPU: no padding, each token once, and all of them only where many are chosen, however large a cluster may be
    that no row has chosen. Requests have two rows, if there are so many. What is in 16 bits has no packed copy."""
    spec = OWN[kind] | {"union": union} | ({"first": 1} if kind == "dynaspec" else {"top": 1})
    cluster_of = with_one_large_cluster(cluster_map(spec["clusters"]))
    head, packed = (head_from_target(parse_head(spec), TARGET_HEAD_VH, {"cluster_of": cluster_of}) for _ in range(2))
    for each in (head.to(dtype), packed.to(dtype)):
        each.expect_rows((1, 2))
    packed.pack()
    step = 1 if rows > 1 else 0  # where a request has two rows
    widths = set()
    for seed in range(1, 41):
        drawn = Rows.draw(rows, seed=seed).to(dtype)
        got, expected = drawn.candidates(packed, step), drawn.candidates(head, step)
        read = len({v for ids in ids_of(got) for v in ids})
        widths.add(got.logits_TS.shape[1])
        assert got.logits_TS.shape[1] == (read if read <= V * (1 / 3 if dtype == torch.float32 else 1 / 2) else V)
        assert [set(ids) for ids in ids_of(got)] == [set(ids) for ids in ids_of(expected)]
        routed = drawn.routed(head, step)
        logits = (each.target_logits(drawn.hidden_TH, step, routed) for each in (packed, head))
        torch.testing.assert_close(*logits, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)
    assert min(widths) < V / 3
    assert max(widths) == V, "both must have been seen"


@pytest.mark.parametrize("weight_format", ["int8", "fp8"])
def test_a_packed_head_in_fewer_bits_reads_the_rows_that_were_chosen(kind: str, weight_format: str) -> None:
    """Routed by itself: a packed router rounds to 16 bits, and may choose other clusters than one that is not."""
    spec = OWN[kind] | {"weight_format": weight_format} | ({"first": 1} if kind == "dynaspec" else {"top": 1})
    packed = head_from_target(parse_head(spec), TARGET_HEAD_VH, {"cluster_of": cluster_map(spec["clusters"])})
    packed.quantize()
    packed.pack()
    drawn = Rows.draw(2).to(torch.float32)
    got = drawn.candidates(packed)
    assert got.logits_TS.shape[1] < V, "all were read, which shows nothing of the rows"
    full_TV = drawn.hidden_TH @ packed.all_rows("weight").T
    for t, ids in enumerate(ids_of(got)):
        scored = got.logits_TS[t][got.logits_TS[t] > NO_TOKEN / 2]
        torch.testing.assert_close(scored, full_TV[t, sorted(ids)], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("union", [False, "request", True])
def test_a_packed_head_takes_no_rows(kind: str, union: bool | str) -> None:
    packed = make_head({**OWN[kind], "union": union})
    packed.pack()
    none = Rows.draw(0).to(torch.float32)
    assert packed.target_logits(none.hidden_TH, 0, none.routed(packed, 0)).shape == (0, V)


def with_one_large_cluster(cluster_of: Tensor) -> Tensor:
    """With 30 tokens more in cluster 1; the others keep at least one each."""
    sizes = torch.bincount(cluster_of)
    for v in [v for v in range(V) if int(cluster_of[v]) > 1][:30]:
        if sizes[cluster_of[v]] > 1:
            sizes[cluster_of[v]] -= 1
            cluster_of[v] = 1
    return cluster_of


@pytest.mark.parametrize("rows", [1, 2, T])
@pytest.mark.parametrize("step", STEPS)
def test_every_way_to_score_gives_the_same_distribution(kind: str, rows: int, step: int) -> None:
    drawn = Rows.draw(rows)
    for spec, gather in ((OWN, "_score_rows"), (UNION, "_score_union")):
        head = untie(make_head(spec[kind]))
        budget = head.config.budget(step)
        chosen_Tm = router_scores(head, drawn).topk(budget, dim=-1).indices
        groups = 1 if spec is UNION else rows
        distributions = []
        for candidates in (
            getattr(head, gather)(drawn.hidden_TH, chosen_Tm, *([groups] if spec is UNION else [])),
            head._score_all(drawn.hidden_TH, chosen_Tm, groups),
        ):
            q_TS, ids = candidates.logits_TS.softmax(dim=-1), candidates.ids
            ids_TS = (torch.arange(V) if ids is None else ids).expand_as(q_TS)
            distributions.append(torch.zeros(rows, V, dtype=q_TS.dtype).scatter_add_(1, ids_TS, q_TS))
        torch.testing.assert_close(*distributions)


@pytest.mark.parametrize("spec", [OWN, UNION], ids=["own", "union"])
def test_one_large_cluster_gives_the_others_no_more_tokens(kind: str, spec: dict[str, Any]) -> None:
    cluster_of = with_one_large_cluster(cluster_map(spec[kind]["clusters"]))
    head = untie(head_from_target(parse_head(spec[kind]), TARGET_HEAD_VH, {"cluster_of": cluster_of}))
    drawn = Rows.draw(T)
    expected = chosen_ids(head, drawn, 0)
    if spec is UNION:
        expected = [set().union(*expected)] * T
    candidates = drawn.candidates(head)
    assert candidates.logits_TS.shape[1] == V
    assert [set(ids) for ids in ids_of(candidates)] == expected


@pytest.mark.parametrize(("name", "requests", "rows"), [("union", 2, 3), ("one_request", 1, 3), ("chain", 3, 1)])
@pytest.mark.parametrize("step", [1, 2, 6])
def test_a_request_shares_what_its_own_rows_have_chosen(
    kind: str, name: str, requests: int, rows: int, step: int
) -> None:
    """And nothing of the requests beside it, whatever way it is scored."""
    del name
    head, drawn = untie(make_head({**OWN[kind], "union": "request"})), Rows.draw(requests * rows)
    head.expect_rows((1, rows))
    chosen = chosen_ids(head, drawn, step)
    unions = [set().union(*chosen[b * rows : (b + 1) * rows]) for b in range(requests)]
    if requests * rows > 3:
        assert unions[0] != unions[1], "the requests must differ for this to show anything"
    assert [set(ids) for ids in ids_of(drawn.candidates(head, step))] == [u for u in unions for _ in range(rows)]
    assert head.scored(drawn.hidden_TH, step, drawn.routed(head, step)).tolist() == [
        len(u) for u in unions for _ in range(rows)
    ]
    chosen_Tm = router_scores(head, drawn).topk(head.config.budget(step), dim=-1).indices
    full_TV = full_logits(drawn)
    for candidates in (
        head._score_all(drawn.hidden_TH, chosen_Tm, requests),
        head._score_union(drawn.hidden_TH, chosen_Tm, requests),
    ):
        for t, ids in enumerate(ids_of(candidates)):
            assert sorted(ids) == sorted(unions[t // rows])
            scored = candidates.logits_TS[t] > NO_TOKEN / 2
            torch.testing.assert_close(candidates.logits_TS[t, scored], full_TV[t, ids], check_dtype=False)


def test_position_0_has_one_row_a_request(kind: str) -> None:
    """The extends of the draft loop, whose later passes have a beam."""
    head, drawn = untie(make_head({**OWN[kind], "union": "request"})), Rows.draw(T)
    head.expect_rows((1, T))
    assert [set(ids) for ids in ids_of(drawn.candidates(head, 0))] == chosen_ids(head, drawn, 0)
    assert len({tuple(ids) for ids in map(sorted, ids_of(drawn.candidates(head, 1)))}) == 1


def test_budgets_by_hand() -> None:
    def budgets(rule: str, first: int = 9, later: int = 7) -> list[int]:
        config = DynaSpecConfig(clusters=11, first=first, later=later, rule=rule, router_width=3)
        return [config.budget(step) for step in range(9)]

    # t = 2: (7 + 2) // 4 = 2, 7 // 4 = 1; t = 3: 10 // 6 = 1
    assert budgets("rounded") == [9, 7, 2, 1, 1, 1, 1, 1, 1]
    assert budgets("floor") == [9, 7, 1, 1, 1, 1, 1, 1, 1]
    assert budgets("fixed") == [9, 7, 7, 7, 7, 7, 7, 7, 7]
    # t = 2: 13 // 4 and 11 // 4; t = 3: 14 // 6 and 11 // 6; both rules reach 0 and are held at 1
    assert budgets("rounded", 11, 11) == [11, 11, 3, 2, 1, 1, 1, 1, 1]
    assert budgets("floor", 11, 11) == [11, 11, 2, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("rule", ["fixed", "rounded", "floor"])
def test_budgets_are_at_least_one_never_grow_and_differ_by_at_most_one(rule: str) -> None:
    for later in range(1, 300, 7):
        config, floor = (
            DynaSpecConfig(clusters=300, first=300, later=later, rule=r, router_width=1) for r in (rule, "floor")
        )
        budgets = [config.budget(step) for step in range(50)]
        assert all(1 <= b <= a for a, b in zip([300, *budgets], budgets, strict=False))
        if rule == "rounded":
            assert all(0 <= b - floor.budget(step) <= 1 for step, b in enumerate(budgets))


@pytest.mark.parametrize("spec", [OWN, UNION], ids=["own", "union"])
@pytest.mark.parametrize("rows", [1, 2, T])
def test_a_router_cannot_make_a_stop_id_unreachable(kind: str, spec: dict[str, Any], rows: int) -> None:
    head = untie(make_head(spec[kind]))
    assert {int(head.cluster_of[v]) for v in STOPS} == {0}
    for seed in range(5):
        drawn = Rows.draw(rows, seed=seed)
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                if name.startswith("router"):
                    parameter.copy_(100 * seeded(*parameter.shape, seed=seed))
        for step in STEPS:
            assert bool((drawn.distribution(head, step)[:, STOPS] > 0).all())


def test_no_token_needs_to_be_pinned(kind: str) -> None:
    cluster_of = cluster_map(OWN[kind]["clusters"])
    cluster_of[cluster_of == 0] = 2
    head, drawn = (
        untie(head_from_target(parse_head(OWN[kind]), TARGET_HEAD_VH, {"cluster_of": cluster_of})),
        Rows.draw(T),
    )
    assert [set(ids) for ids in ids_of(drawn.candidates(head))] == chosen_ids(head, drawn, 0)


def test_router_of_dynaspec_sees_what_enters_the_layer_at_unit_size() -> None:
    head, drawn = untie(make_head(DYNASPEC)), Rows.draw(T)
    scores_TM = drawn.routed(head, 0)
    assert scores_TM is not None
    torch.testing.assert_close(scores_TM, router_scores(head, drawn))
    scaled = Rows(drawn.hidden_TH, 3 * drawn.embed_TH, 300 * drawn.feature_TH)
    torch.testing.assert_close(scaled.routed(head, 0), scores_TM, rtol=1e-6, atol=1e-6)
    other = Rows(-drawn.hidden_TH, drawn.embed_TH, drawn.feature_TH)
    assert torch.equal(other.routed(head, 0), scores_TM)  # known before the layer has run


def test_dynaspec_needs_its_route() -> None:
    with pytest.raises(AssertionError, match="calls `route` first"):
        make_head(DYNASPEC).double().candidates(Rows.draw(2).hidden_TH, 0, None)


def test_router_layers_of_dynaspec_start_apart() -> None:
    head = make_head(DYNASPEC)
    width = min(head.router_in.shape[1], head.router_out.shape[1])
    first, second = head.router_in[0, :width], head.router_out[0, :width]
    assert not torch.allclose(first / first[0], second / second[0])
    assert torch.equal(head.router_in, make_head(DYNASPEC).router_in)  # and the same in every run


def test_router_of_coral_starts_as_the_mean_row_of_each_group() -> None:
    head = make_head(CORAL)
    for group in range(5):
        expected = TARGET_HEAD_VH[head.cluster_of == group + 1].mean(dim=0)
        torch.testing.assert_close(head.router[group].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("options", "labels"), [({}, 10), ({"label_tokens": 2}, 2)], ids=["default", "two"])
def test_labels_of_dynaspec_are_the_clusters_of_the_full_heads_best_tokens(
    options: dict[str, int], labels: int
) -> None:
    head, drawn = untie(make_head({**DYNASPEC, **options})), Rows.draw(T)
    assert ("label_tokens" in head.spec()) == bool(options)  # heads from before there was a choice are known
    scores_TM, full_TV = router_scores(head, drawn), full_logits(drawn)
    expected = []
    for t in range(T):
        best = sorted(range(V), key=lambda v, t=t: -float(full_TV[t, v]))[:labels]
        wanted = {int(head.cluster_of[v]) for v in best}
        probabilities = scores_TM[t].sigmoid()
        terms = [p.log() if m in wanted else (1 - p).log() for m, p in enumerate(probabilities, start=1)]
        expected.append(-sum(terms))
    got_T = head.loss(drawn.hidden_TH, 1, drawn.routed(head, 1), some_distribution(T))
    torch.testing.assert_close(got_T.double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", ["router", "head", "drafter"])
def test_loss_of_coral_is_the_targets_mass_on_each_group(trained: str) -> None:
    head, drawn, p_TV = untie(make_head(CORAL)), Rows.draw(T), some_distribution(T).double()
    head.weight.requires_grad_(trained == "head")
    hidden_TH = drawn.hidden_TH.requires_grad_(trained == "drafter")
    p_TV[0] = 0
    p_TV[0, STOPS] = torch.tensor([0.25, 0.75], dtype=torch.float64)  # all on pinned tokens
    log_q_TM = router_scores(head, drawn).log_softmax(dim=-1)
    expected = []
    for t in range(T):
        masses = [p_TV[t, head.cluster_of == m].sum() for m in range(1, 6)]
        expected.append(-sum(mass * log_q for mass, log_q in zip(masses, log_q_TM[t], strict=True)))
    expected_T = torch.stack(expected)
    assert float(expected_T[0].detach()) == 0
    if trained != "router":
        expected_T = expected_T + cross_entropy(hidden_TH @ head.weight.T, p_TV)
    got_T = head.loss(hidden_TH, 0, None, p_TV)
    torch.testing.assert_close(got_T.double(), expected_T, rtol=1e-5, atol=1e-5)


def test_coral_router_learns_where_the_mass_is() -> None:
    head, drawn, p_TV = make_head(CORAL), Rows.draw(40).to(torch.float32), some_distribution(40)
    head.weight.requires_grad_(False)
    optimizer = torch.optim.Adam([head.router], lr=0.05)

    def mass_reached() -> float:
        return float((p_TV * (drawn.distribution(head) > 0)).sum(dim=-1).mean())

    before = mass_reached()
    for _ in range(60):
        optimizer.zero_grad()
        head.loss(drawn.hidden_TH, 0, None, p_TV).sum().backward()
        optimizer.step()
    assert mass_reached() > before + 0.1


@pytest.mark.parametrize("step", STEPS)
def test_acceptance_bound_of_dynaspec(step: int) -> None:
    """A = sum min(p, q) >= p(S) - TV(p(.|S), q(.|S)) for the distribution on S, and (1 - beta) of it for a distribution
    that leaves beta outside of S."""
    head, drawn, p_TV = untie(make_head(DYNASPEC)), Rows.draw(T), some_distribution(T)
    full_TV, q_TV = full_logits(drawn).softmax(dim=-1), drawn.distribution(head, step)
    for t, ids in enumerate(ids_of(drawn.candidates(head, step))):
        p_S = p_TV[t, ids]
        distance = (p_S / p_S.sum() - q_TV[t, ids]).abs().sum() / 2
        bound = float(p_S.sum() - distance)
        assert float(torch.minimum(p_TV[t], q_TV[t]).sum()) >= bound - 1e-6
        beta = float(1 - full_TV[t, ids].sum())
        kept_V = torch.zeros(V)
        kept_V[ids] = full_TV[t, ids]
        assert float(torch.minimum(p_TV[t], kept_V).sum()) >= (1 - beta) * bound - 1e-6


@pytest.mark.parametrize(
    ("union", "rows", "way"),
    [
        (False, 1, "_score_rows"),
        (False, 3, "_score_all"),  # 3 x (3 pinned + 3 x 6) rows are more than half of 53
        (False, 7, "_score_all"),
        ("request", 1, "_score_rows"),
        ("request", 2, "_score_all"),
        (True, 3, "_score_all"),
    ],
)
def test_cost_is_the_router_once_and_the_least_that_the_rows_of_the_matrix_take(
    union: bool | str, rows: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, drawn, ways = make_head({**DYNASPEC, "union": union}), Rows.draw(rows), list[str]()
    for name in ("_score_rows", "_score_union", "_score_all"):
        monkeypatch.setattr(head, name, lambda *_, name=name: ways.append(name))
    head.expect_rows([rows])
    drawn.candidates(head)
    assert ways == [way]
    clusters = min(11, 3 * rows) if union else 3  # at most, all of mean size
    scored = 3 + clusters * (V - 3) // 11
    moved, scoring = 10 * 2 * H + 11 * 10 + rows * (2 * H + 2 * 10 + 11), 0
    if rows == 1 or (not union and rows == 3):  # 3 x 16 tokens of mean clusters are less than 53
        moved, scoring, ids = moved + rows * scored * (H + 1), rows * scored * H, rows * scored
    elif union:  # on a GPU its tiles are read where they lie
        moved, scoring, ids = moved + scored * H + rows * (scored + H), rows * scored * H, 0
    else:
        moved, scoring, ids = moved + V * H + rows * (V + H), rows * V * H, 0
    router = rows * (10 * 2 * H + 11 * 10)
    assert head.cost(rows) == (4 * moved + 8 * ids, 2 * (router + scoring))
    known = make_head({**DYNASPEC, "union": union}).cost(rows, scored=scored)
    assert known == head.cost(rows), "the measured mean takes the estimate's place"
    assert make_head(ALL["coral"]).cost(rows) == make_head(SPECS["full"]).cost(rows)


def test_clusters_of_a_few_rows_are_gathered_row_by_row() -> None:
    head = make_head(DYNASPEC)  # 2 x (3 + 3 x 4) of 53
    one, two = head.cost(1), head.cost(2)
    router = 10 * 2 * H + 11 * 10
    assert two.bytes - 4 * router == 2 * (one.bytes - 4 * router)
    assert two.flops == 2 * one.flops


def test_a_cluster_map_is_needed(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"kind '{kind}' needs a cluster map; make one with rayspec calibrate"):
        head_from_target(parse_head(OWN[kind]), TARGET_HEAD_VH, {})
    with pytest.raises(ValueError, match=r"must have one entry a token, \[53\], got \[54\]"):
        head_from_target(parse_head(OWN[kind]), TARGET_HEAD_VH, {"cluster_of": torch.zeros(V + 1)})


def without_cluster_3(cluster_of: Tensor) -> Tensor:
    return torch.where(cluster_of == 3, 1, cluster_of)


def with_negative(cluster_of: Tensor) -> Tensor:
    return cluster_of.index_fill(0, torch.tensor([7]), -1)


def with_one_too_many(cluster_of: Tensor) -> Tensor:
    return cluster_of.index_fill(0, torch.tensor([7]), int(cluster_of.max()) + 1)


@pytest.mark.parametrize("damage", [without_cluster_3, with_negative, with_one_too_many])
def test_a_cluster_map_must_be_a_partition(kind: str, damage: Any) -> None:
    clusters = OWN[kind]["clusters"]
    damaged = damage(cluster_map(clusters))
    with pytest.raises(
        ValueError,
        match=f"no partition of the vocabulary into {clusters} clusters and the pinned one|beside the pinned one",
    ):
        head_from_target(parse_head(OWN[kind]), TARGET_HEAD_VH, {"cluster_of": damaged})
    head = build_head(parse_head(OWN[kind]), hidden_size=H, vocab_size=V)
    with pytest.raises(ValueError, match="no partition"):
        head.load_state_dict({**make_head(OWN[kind]).state_dict(), "cluster_of": damaged})


def test_a_map_loaded_later_replaces_the_first(kind: str) -> None:
    head, drawn = untie(make_head(OWN[kind])), Rows.draw(T)
    before = ids_of(drawn.candidates(head))
    shifted = head.cluster_of.where(head.cluster_of == 0, head.cluster_of % OWN[kind]["clusters"] + 1)
    head.load_state_dict({**head.state_dict(), "cluster_of": shifted})
    assert [set(ids) for ids in ids_of(drawn.candidates(head))] == chosen_ids(head, drawn, 0)
    assert ids_of(drawn.candidates(head)) != before


def test_stop_tokens_must_be_pinned(kind: str) -> None:
    head = make_head(OWN[kind])
    loose = [v for v in range(V) if int(head.cluster_of[v])][:2]
    with pytest.raises(
        ValueError, match=rf"stop tokens \[{loose[0]}, {loose[1]}, 60\] are not in the pinned cluster 0"
    ):
        head.check([STOPS[0], 60, *reversed(loose)])


BAD_OPTIONS = {
    "clusters_zero": ({**CORAL, "clusters": 0}, r"draft_head\.clusters must be at least 1, got 0"),
    "clusters_above_v": (
        {**CORAL, "clusters": V + 1},
        r"draft_head\.clusters must be in 1\.\.53 \(the vocabulary\), got 54",
    ),
    "top_zero": ({**CORAL, "top": 0}, r"draft_head\.top must be at least 1, got 0"),
    "top_above": ({**CORAL, "top": 6}, r"draft_head\.top must be in 1\.\.5 \(clusters\), got 6"),
    "union": ({**CORAL, "union": "yes"}, r"draft_head\.union must be one of true, false, request, got 'yes'"),
    "union_number": ({**CORAL, "union": 1}, r"draft_head\.union must be true or false, got 1"),
    "first_zero": ({**DYNASPEC, "first": 0}, r"draft_head\.first must be at least 1, got 0"),
    "first_above": ({**DYNASPEC, "first": 12}, r"draft_head\.first must be in 1\.\.11 \(clusters\), got 12"),
    "later_zero": ({**DYNASPEC, "later": 0}, r"draft_head\.later must be at least 1, got 0"),
    "rule": ({**DYNASPEC, "rule": "ceil"}, r"draft_head\.rule must be one of fixed, rounded, floor, got 'ceil'"),
    "rule_list": ({**DYNASPEC, "rule": ["fixed"]}, r"draft_head\.rule must be text, got \['fixed'\]"),
    "labels": ({**DYNASPEC, "label_tokens": 0}, r"draft_head\.label_tokens must be at least 1, got 0"),
    "width": ({**DYNASPEC, "router_width": 0}, r"draft_head\.router_width must be at least 1, got 0"),
    "none": ({**DYNASPEC, "first": None}, r"draft_head\.first must be a whole number, got None"),
}


@pytest.mark.parametrize("fault", BAD_OPTIONS)
def test_bad_options(fault: str) -> None:
    spec, message = BAD_OPTIONS[fault]
    with pytest.raises(ValueError, match=message):
        build_head(parse_head(spec), hidden_size=H, vocab_size=V)
