"""SpecVocab: shortlist, then exact scores."""

from typing import Any

import pytest
import torch
from head_cases import SPECS, SPECVOCAB, TARGET_HEAD_VH, H, Rows, V, cross_entropy, ids_of, make_head, some_distribution

from sglang_ext.heads import build_head, parse_head

T = 7


def test_a_shortlist_of_everything_is_the_full_head_bit_for_bit() -> None:
    head, full, drawn = make_head(SPECS["specvocab_all"]).double(), make_head(SPECS["full"]).double(), Rows.draw(T)
    got, expected = drawn.candidates(head), drawn.candidates(full)
    assert torch.equal(got.logits_TS, expected.logits_TS)
    assert got.ids is None


@pytest.mark.parametrize("size", [1, 13, V - 1])
def test_shortlist_is_the_routers_best_and_its_scores_are_the_full_heads(size: int) -> None:
    head, drawn = make_head({**SPECVOCAB, "size": size}).double(), Rows.draw(T)
    router_TV = (drawn.hidden_TH @ (head.up @ head.down).T).detach()
    full_TV = drawn.hidden_TH @ head.weight.T
    logits_TS, _ = drawn.candidates(head)
    for t, ids in enumerate(ids_of(drawn.candidates(head))):
        best = sorted(range(V), key=lambda v, t=t: -float(router_TV[t, v]))[:size]
        assert ids == sorted(best)
        torch.testing.assert_close(logits_TS[t], full_TV[t, ids])


@pytest.mark.parametrize("size", [1, 2, 13])
def test_a_router_of_full_rank_finds_the_best_token(size: int) -> None:
    """W_v W_dn = W: the shortlist is the full head's own top n."""
    head, drawn = make_head({**SPECVOCAB, "rank": H, "size": size}).double(), Rows.draw(200)
    full_TV = make_head(SPECS["full"]).double().target_logits(drawn.hidden_TH)
    proposal = head.propose(drawn.hidden_TH, 0, 1)
    assert torch.equal(proposal.token_ids_Tk[:, 0], full_TV.argmax(dim=-1))
    # the router of rank 5 does not, so rank is what makes it
    weak = make_head({**SPECVOCAB, "size": size}).double().propose(drawn.hidden_TH, 0, 1)
    assert not torch.equal(weak.token_ids_Tk[:, 0], full_TV.argmax(dim=-1))


def test_ties_at_the_last_place_are_resolved_the_same_way_each_time() -> None:
    head = make_head(SPECVOCAB).double()
    with torch.no_grad():
        head.down.round_()
        head.up[:] = torch.arange(V)[:, None] // 9  # whole numbers: no rounding breaks the ties of nine tokens
    drawn = Rows(*(x.round() for x in Rows.draw(T)))
    first = drawn.candidates(head).ids
    assert first is not None
    scores_Tn = head.router_logits(drawn.hidden_TH).sort(dim=-1, descending=True).values
    assert torch.equal(scores_Tn[:, 12], scores_Tn[:, 13])  # the last of 13 places is tied
    assert torch.equal(first, drawn.candidates(head).ids)
    alone = [drawn.pick(slice(t, t + 1)).candidates(head).ids for t in range(T)]
    assert torch.equal(first, torch.cat(alone))  # whatever the other rows are


def test_equal_logits_resolve_to_the_lowest_id_of_the_shortlist() -> None:
    head = make_head(SPECVOCAB).double()
    with torch.no_grad():
        head.weight[:] = 1.0
    drawn = Rows.draw(T)
    proposal = head.propose(drawn.hidden_TH, 0, 1)
    assert proposal.token_ids_Tk[:, 0].tolist() == [min(ids) for ids in ids_of(drawn.candidates(head))]


def test_every_token_can_be_shortlisted() -> None:
    head = make_head(SPECVOCAB).double()
    hidden_VH = head.up @ head.down  # the hidden state that the router knows as this token
    ids = ids_of(head.candidates(hidden_VH.detach()))
    assert all(v in ids[v] for v in range(V))


def test_loss_is_the_full_heads_and_a_tenth_of_the_routers() -> None:
    head, naive, drawn, p_TV = (
        make_head(SPECVOCAB).double(),
        make_head(SPECVOCAB).double(),
        Rows.draw(T),
        some_distribution(T).double(),
    )
    got_TH, expected_TH = (drawn.hidden_TH.clone().requires_grad_() for _ in range(2))
    got_T = head.loss(got_TH, 3, None, p_TV)
    expected_T = cross_entropy(expected_TH @ naive.weight.T, p_TV)
    expected_T = expected_T + 0.1 * cross_entropy(expected_TH @ naive.down.T @ naive.up.T, p_TV)
    torch.testing.assert_close(got_T.double(), expected_T, rtol=1e-5, atol=1e-5)
    got_T.sum().backward()
    expected_T.sum().backward()
    torch.testing.assert_close(got_TH.grad, expected_TH.grad)
    for (name, got), expected in zip(head.named_parameters(), naive.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, msg=name)


@pytest.mark.parametrize("trained", ["router", "head", "drafter"])
def test_where_the_router_alone_is_trained_the_loss_is_its_own(trained: str) -> None:
    head, drawn, p_TV = make_head(SPECVOCAB).double(), Rows.draw(T), some_distribution(T).double()
    head.weight.requires_grad_(trained == "head")
    hidden_TH = drawn.hidden_TH.requires_grad_(trained == "drafter")
    expected_T = cross_entropy(hidden_TH @ head.down.T @ head.up.T, p_TV)
    if trained != "router":
        expected_T = 0.1 * expected_T + cross_entropy(hidden_TH @ head.weight.T, p_TV)
    torch.testing.assert_close(head.loss(hidden_TH, 0, None, p_TV).double(), expected_T, rtol=1e-5, atol=1e-5)


def test_router_starts_as_the_best_approximation_of_its_rank() -> None:
    head, slim = make_head(SPECVOCAB), make_head({"kind": "slimspec", "rank": 5})
    assert torch.equal(head.up, slim.up)
    assert torch.equal(head.down, slim.down)
    assert torch.equal(head.weight, TARGET_HEAD_VH.float())


def test_cost_is_the_router_once_and_the_shortlist_of_each_row() -> None:
    r, n, rows = 5, 13, 3
    moved = r * (H + V) + rows * n * H + rows * (H + 2 * r + V + n)
    assert make_head(SPECVOCAB).cost(rows) == (4 * moved + 8 * rows * n, 2 * rows * (r * (H + V) + n * H))
    assert make_head(SPECS["specvocab_all"]).cost(rows) == make_head(SPECS["full"]).cost(rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0, "size": 3}, r"draft_head\.rank must be at least 1, got 0"),
        ({"rank": H + 1, "size": 3}, r"draft_head\.rank must be in 1\.\.24 \(the smaller of .*\), got 25"),
        ({"rank": 3, "size": 0}, r"draft_head\.size must be at least 1, got 0"),
        ({"rank": 3, "size": V + 1}, r"draft_head\.size must be in 1\.\.53 \(the vocabulary\), got 54"),
        ({"rank": 3}, "draft_head.size has no value"),
        ({"rank": 3, "size": "8"}, r"draft_head\.size must be a whole number, got '8'"),
    ],
    ids=["rank_zero", "rank_above_h", "size_zero", "size_above_v", "no_size", "string"],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_head(parse_head({"kind": "specvocab", **options}), hidden_size=H, vocab_size=V)
