"""A head over a fixed part of the vocabulary."""

from typing import Any

import pytest
import torch
from head_cases import (
    SPECS,
    STEPS,
    STOPS,
    TARGET_HEAD_VH,
    TRUNCATED,
    H,
    Rows,
    V,
    cross_entropy,
    ids_of,
    make_head,
    ranked_ids,
    some_distribution,
)
from torch import Tensor

from sglang_ext.heads import DraftHead, build_head, head_from_target, parse_head

T, SIZE = 7, 19
BY_STEP = SPECS["truncated_by_step"]


def full_logits(drawn: Rows) -> Tensor:
    return make_head(SPECS["full"]).double().target_logits(drawn.hidden_TH)


def test_all_ids_are_the_full_head_bit_for_bit() -> None:
    head, drawn = make_head(SPECS["truncated_to_all"]).double(), Rows.draw(T)
    assert torch.equal(head.ids, torch.arange(V))
    assert torch.equal(head.target_logits(drawn.hidden_TH), full_logits(drawn))


def test_the_most_useful_ids_are_kept_sorted_with_their_rows() -> None:
    head = make_head(TRUNCATED)
    assert head.ids.tolist() == sorted(ranked_ids()[:SIZE].tolist())
    assert torch.equal(head.weight, TARGET_HEAD_VH.float()[head.ids])


@pytest.mark.parametrize(("step", "size"), [(0, 19), (1, 11), (2, 5), (3, 5), (40, 5)])
def test_each_step_scores_its_first_ids(step: int, size: int) -> None:
    head, drawn = make_head(BY_STEP).double(), Rows.draw(T)
    expected = ranked_ids()[:size].tolist()  # in order of use, so that a prefix is the most useful part
    assert ids_of(drawn.candidates(head, step)) == [expected] * T
    torch.testing.assert_close(drawn.candidates(head, step).logits_TS.float(), full_logits(drawn)[:, expected])


@pytest.mark.parametrize("spec", [TRUNCATED, BY_STEP], ids=["one_size", "by_step"])
@pytest.mark.parametrize("step", STEPS)
def test_argmax_is_that_of_the_full_logits_on_the_ids(spec: dict[str, Any], step: int) -> None:
    head, drawn = make_head(spec).double(), Rows.draw(50)
    (ids, *_) = ids_of(drawn.candidates(head, step))
    restricted_TV = torch.full((50, V), -torch.inf)
    restricted_TV[:, ids] = full_logits(drawn)[:, ids]
    proposal = head.propose(drawn.hidden_TH, step, 1)
    assert torch.equal(proposal.token_ids_Tk[:, 0], restricted_TV.argmax(dim=-1))
    assert not torch.equal(proposal.token_ids_Tk[:, 0], full_logits(drawn).argmax(dim=-1))  # it was no empty promise


def test_equal_logits_resolve_to_the_lowest_id() -> None:
    weight_VH = torch.ones(V, H)
    proposal = make_head(TRUNCATED, weight_VH).propose(torch.ones(2, H), 0, 1)
    assert proposal.token_ids_Tk.tolist() == [[min(ranked_ids()[:SIZE].tolist())]] * 2


@pytest.mark.parametrize("spec", [TRUNCATED, BY_STEP], ids=["one_size", "by_step"])
@pytest.mark.parametrize("step", STEPS)
def test_loss_is_against_the_target_on_the_ids(spec: dict[str, Any], step: int) -> None:
    head, drawn, p_TV = make_head(spec).double(), Rows.draw(50), some_distribution(50).double()
    kept = ranked_ids()[:SIZE]
    expected = []
    for logits_V, p_V in zip(full_logits(drawn).double(), p_TV, strict=True):
        p_S = p_V[kept] / p_V[kept].sum()
        counts = int(p_V.argmax()) in kept.tolist()
        expected.append(cross_entropy(logits_V[kept], p_S) * counts)
    assert 10 < sum(float(loss.detach()) > 0 for loss in expected) < 40
    got_T = head.loss(drawn.hidden_TH, step, None, p_TV)
    torch.testing.assert_close(got_T.double(), torch.stack(expected), rtol=1e-4, atol=1e-4)  # float32 logits


def test_a_target_without_mass_on_the_ids_teaches_nothing() -> None:
    head = make_head(TRUNCATED)
    p_TV = torch.zeros(2, V)
    p_TV[0, next(v for v in range(V) if v not in head.ids)] = 1.0
    p_TV[1, head.ids[3]] = 1.0
    hidden_TH = Rows.draw(2).hidden_TH.float().requires_grad_()
    loss_T = head.loss(hidden_TH, 0, None, p_TV)
    loss_T.sum().backward()
    assert hidden_TH.grad is not None
    assert float(loss_T[0]) == 0 < float(loss_T[1])
    assert not bool(hidden_TH.grad[0].any())
    assert bool(hidden_TH.grad.isfinite().all())


def test_each_size_is_packed_once() -> None:
    head = make_head({**BY_STEP, "step_sizes": [19, 19, 11, 5]})
    head.pack()
    assert sorted(head._packed) == [("weight", 5), ("weight", 11), ("weight", 19)]


def test_cost_is_of_the_ids_of_the_first_step() -> None:
    for spec, size in ((TRUNCATED, 19), ({**TRUNCATED, "step_sizes": [11, 5]}, 11)):
        assert make_head(spec).cost(3) == (4 * (size * H + 3 * (H + size)) + 8 * size, 2 * 3 * H * size)


def from_ids(ids: Any, spec: dict[str, Any] = TRUNCATED) -> DraftHead:
    return head_from_target(parse_head(spec), TARGET_HEAD_VH, {} if ids is None else {"ids": torch.tensor(ids)})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, r"a truncated head of size 19 needs as many ids, got 0; choose them with rayspec calibrate"),
        (list(range(18)), "of size 19 needs as many ids, got 18"),
        ([*range(18), 5], r"must be distinct and in 0\.\.52, got 5, which is there 2 times; calibrate it again"),
        ([*range(18), V], r"distinct and in 0\.\.52"),
        ([*range(18), -1], r"distinct and in 0\.\.52"),
    ],
    ids=["none", "too_few", "twice", "beyond", "negative"],
)
def test_bad_ids(ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_ids(ids)


def test_ids_of_a_larger_vocabulary_are_refused_when_checked() -> None:
    head = build_head(parse_head(TRUNCATED), hidden_size=H, vocab_size=V - 1)
    head.load_state_dict(from_ids(range(34, V)).state_dict())
    with pytest.raises(ValueError, match=r"distinct and in 0\.\.51"):
        head.check()


def test_stop_tokens_must_be_among_the_ids_of_every_step() -> None:
    make_head(TRUNCATED).check(STOPS)
    with pytest.raises(ValueError, match=r"truncated head of 19 ids lacks the stop tokens \[38, 60\], so its drafts"):
        from_ids(range(SIZE)).check((38, 0, 60))
    ids = ranked_ids()[:SIZE].roll(6).tolist()  # the stop ids are kept, but not among the first
    from_ids(ids).check(STOPS)
    with pytest.raises(ValueError, match=r"truncated head of 5 ids lacks the stop tokens \[0, 38\]"):
        from_ids(ids, BY_STEP).check(STOPS)


BAD_OPTIONS = {
    "size_zero": ({"size": 0}, r"draft_head\.size must be at least 1, got 0"),
    "size_above_v": ({"size": V + 1}, "got 54"),
    "step_above_size": ({"size": 9, "step_sizes": [9, 10]}, r"step_sizes must be a list of sizes in 1\.\.9 \(size\)"),
    "step_zero": ({"size": 9, "step_sizes": [9, 0]}, r"step_sizes\[1\] must be at least 1, got 0"),
    "no_steps": ({"size": 9, "step_sizes": []}, r"got \[\]"),
    "number": ({"size": 9, "step_sizes": 9}, r"step_sizes must be a list, \[a, b\], got 9"),
    "fractions": ({"size": 9, "step_sizes": [4.5]}, r"step_sizes\[0\] must be a whole number, got 4\.5"),
}


@pytest.mark.parametrize("fault", BAD_OPTIONS)
def test_bad_options(fault: str) -> None:
    options, message = BAD_OPTIONS[fault]
    with pytest.raises(ValueError, match=message):
        build_head(parse_head({"kind": "truncated", **options}), hidden_size=H, vocab_size=V)


def test_all_ids_kept_needs_no_sizes() -> None:
    head = build_head(parse_head({"kind": "truncated", "size": 9}), hidden_size=H, vocab_size=V)
    assert head.spec() == {"kind": "truncated", "size": 9, "step_sizes": None}
