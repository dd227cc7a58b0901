"""What holds for every kind of draft head; the algebra of one kind is in test_head_<kind>.py."""

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import SPECS, STEPS, STOPS, H, Rows, V, ids_of, make_head, seeded, some_distribution
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.heads import HEADS, DraftHead, HeadConfig, build_head, parse_head
from sglang_ext.heads.base import NO_TOKEN
from sglang_ext.heads.clustered import ClusteredHead

T = 7
NO_OWN_LOSS = {"dynaspec": ("weight",), "rdk_dynaspec": ("base.weight",)}  # only the router is trained


@pytest.fixture(params=SPECS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def spec(name: str) -> dict[str, Any]:
    return SPECS[name]


@pytest.fixture
def head(spec: dict[str, Any]) -> DraftHead:
    return make_head(spec).double()


def test_every_kind_is_covered() -> None:
    assert {spec["kind"] for spec in SPECS.values()} == set(HEADS)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rows", [1, T])
def test_no_shape_and_no_branch_depends_on_values(head: DraftHead, rows: int, step: int) -> None:
    """So that a CUDA graph captures it: tensors without values, with which reading one (a wait for the device) or a
    shape that follows from values raises."""
    drawn = Rows.draw(rows)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        hidden_TH, embed_TH, feature_TH = (mode.from_tensor(x) for x in drawn)
        routed = head.route(embed_TH, feature_TH, step)
        head.best(hidden_TH, step, routed)
        head.propose(hidden_TH, step, 4, routed)
        head.target_logits(hidden_TH, step, routed)
        head.target_distribution(hidden_TH, step, routed, torch.ones(rows, 1))
        with pytest.raises(DataDependentOutputException):
            hidden_TH.max().item()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rows", [1, 2, T], ids=["one_row", "two_rows", "rows"])
def test_every_view_of_a_head_is_the_same_distribution(head: DraftHead, rows: int, step: int) -> None:
    drawn = Rows.draw(rows)
    routed = drawn.routed(head, step)
    distribution_TV = drawn.distribution(head, step)
    torch.testing.assert_close(distribution_TV.sum(dim=-1), torch.ones(rows))
    logits_TV = head.target_logits(drawn.hidden_TH, step, routed)
    assert logits_TV.dtype == torch.float32
    torch.testing.assert_close(logits_TV.softmax(dim=-1), distribution_TV)
    torch.testing.assert_close(head.target_distribution(drawn.hidden_TH, step, routed), distribution_TV)
    best = distribution_TV.topk(4)
    proposal = head.propose(drawn.hidden_TH, step, 4, routed)
    assert proposal.token_ids_Tk.dtype == torch.int64
    assert torch.equal(proposal.token_ids_Tk, best.indices)
    torch.testing.assert_close(proposal.probabilities_Tk, best.values)
    single = head.propose(drawn.hidden_TH, step, 1, routed)
    assert torch.equal(single.token_ids_Tk, best.indices[:, :1])
    assert torch.equal(single.scores_Tk, proposal.scores_Tk[:, :1])
    assert torch.equal(single.log_norm_T, proposal.log_norm_T)
    assert torch.equal(logits_TV.argmax(dim=-1), best.indices[:, 0])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec["kind"] != "rdk"])  # see test_head_rdk
def test_distribution_at_each_rows_temperature(head: DraftHead, step: int) -> None:
    drawn, temperature_T1 = Rows.draw(T), torch.linspace(0.3, 2.0, T)[:, None]
    routed = drawn.routed(head, step)
    distribution_TV = head.target_distribution(drawn.hidden_TH, step, routed, temperature_T1)
    expected_TV = (head.target_logits(drawn.hidden_TH, step, routed) / temperature_T1).softmax(dim=-1)
    torch.testing.assert_close(distribution_TV, expected_TV)
    assert torch.equal(distribution_TV > 0, drawn.distribution(head, step) > 0)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rows", [1, 2, T], ids=["one_row", "two_rows", "rows"])
def test_support_is_the_declared_ids_each_once(head: DraftHead, rows: int, step: int) -> None:
    drawn = Rows.draw(rows)
    candidates = drawn.candidates(head, step)
    distribution_TV = drawn.distribution(head, step)
    for ids, distribution_V in zip(ids_of(candidates), distribution_TV, strict=True):
        assert len(ids) == len(set(ids))
        assert set(ids) == set(distribution_V.nonzero().flatten().tolist())
    padding = candidates.logits_TS < NO_TOKEN / 2
    q_TS, _ = head.distribution(drawn.hidden_TH, step, drawn.routed(head, step))
    assert not bool(q_TS[padding].any())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rows", [1, 2, T], ids=["one_row", "two_rows", "rows"])
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec["kind"] != "rdk"])
def test_scored_is_the_size_of_each_rows_support(head: DraftHead, rows: int, step: int) -> None:
    drawn = Rows.draw(rows)
    scored_T = head.scored(drawn.hidden_TH, step, drawn.routed(head, step))
    assert scored_T.tolist() == (drawn.distribution(head, step) > 0).sum(dim=-1).tolist()
    known = head.shortlist_size(step)
    assert known is None or set(scored_T.tolist()) == {known}


@pytest.mark.parametrize("step", STEPS)
def test_what_is_handed_on_is_not_scored(step: int) -> None:
    drawn, head = Rows.draw(T), make_head(SPECS["rdk_dynaspec"]).double()
    routed = drawn.routed(head, step)
    assert torch.equal(head.scored(drawn.hidden_TH, step, routed), head.base.scored(drawn.hidden_TH, step, routed))
    assert head.shortlist_size(step) is None, "its base's router decides it"
    truncated = make_head({**SPECS["rdk_truncated"], "base": SPECS["truncated_by_step"]})
    assert truncated.shortlist_size(step) == truncated.base.size_at(step)


@pytest.mark.parametrize("step", STEPS)
def test_a_head_that_is_one_matrix_is_it_at_every_step(name: str, head: DraftHead, step: int) -> None:
    matrix = head.as_matrix()
    assert (matrix is not None) == (name in ("full", "slimspec", "truncated", "truncated_to_all"))
    if matrix is None:
        return
    weight_SH, ids = matrix
    drawn = Rows.draw(T)
    logits_TV = head.target_logits(drawn.hidden_TH, step)
    expected_TS = (drawn.hidden_TH @ weight_SH.double().T).float()
    # a slim head's product is made in float32
    torch.testing.assert_close(logits_TV if ids is None else logits_TV[:, ids], expected_TS, rtol=1e-4, atol=1e-4)
    assert bool((logits_TV > NO_TOKEN).sum() == expected_TS.numel())


@pytest.mark.parametrize("step", STEPS)
def test_acceptance_is_at_most_the_targets_mass_on_the_support(head: DraftHead, step: int) -> None:
    drawn, p_TV = Rows.draw(T), some_distribution(T)
    accepted_T = torch.minimum(p_TV, drawn.distribution(head, step)).sum(dim=-1).detach()
    for accepted, p_V, ids in zip(accepted_T, p_TV, ids_of(drawn.candidates(head, step)), strict=True):
        assert 0 < float(accepted) <= float(p_V[ids].sum()) + 1e-6


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", [name for name in SPECS if name != "specvocab"])  # leaves no token out for good
def test_stop_ids_are_in_reach(head: DraftHead, step: int) -> None:
    head.check(STOPS)
    for ids in ids_of(Rows.draw(T).candidates(head, step)):
        assert set(STOPS) <= set(ids)


@pytest.mark.parametrize("step", STEPS)
def test_a_row_does_not_depend_on_the_others(spec: dict[str, Any], head: DraftHead, step: int) -> None:
    drawn = Rows.draw(T)
    distribution_TV = drawn.distribution(head, step)
    for t in range(T):
        alone_V = drawn.pick(slice(t, t + 1)).distribution(head, step)[0]
        if spec.get("union") is True:  # it shares what the others chose, and scores that as it scores its own
            distribution_V = torch.where(alone_V > 0, distribution_TV[t], 0)
            torch.testing.assert_close(distribution_V / distribution_V.sum(), alone_V)
        else:
            torch.testing.assert_close(distribution_TV[t], alone_V)


@pytest.mark.parametrize("step", STEPS)
def test_no_rows_are_no_rows(head: DraftHead, step: int) -> None:
    none = Rows.draw(0)
    assert none.distribution(head, step).shape == (0, V)
    assert head.target_logits(none.hidden_TH, step, none.routed(head, step)).shape == (0, V)
    assert head.propose(none.hidden_TH, step, 1, none.routed(head, step)).token_ids_Tk.shape == (0, 1)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("rows", [1, 2, T], ids=["one_row", "two_rows", "rows"])
def test_shapes_never_depend_on_data(head: DraftHead, rows: int, step: int) -> None:
    """CUDA graphs: on the meta device every look at a value and every shape made of values is an error."""
    real, drawn = copy.deepcopy(head), Rows.draw(rows).to("meta")
    head.to("meta")
    routed = drawn.routed(head, step)
    proposal = head.propose(drawn.hidden_TH, step, 4, routed)
    assert proposal.token_ids_Tk.device.type == "meta"
    assert head.target_logits(drawn.hidden_TH, step, routed).shape == (rows, V)
    assert head.target_distribution(drawn.hidden_TH, step, routed, torch.ones(rows, 1, device="meta")).shape == (
        rows,
        V,
    )
    assert drawn.candidates(head, step).logits_TS.shape == Rows.draw(rows).candidates(real, step).logits_TS.shape


def test_options_survive_json(spec: dict[str, Any]) -> None:
    options = {"kind": spec["kind"], **head_options(spec)}
    assert options == spec
    stored = json.loads(json.dumps(options))
    assert stored == spec
    assert head_options(stored) == head_options(spec)


def head_options(spec: dict[str, Any]) -> dict[str, Any]:
    return build_head(parse_head(spec), hidden_size=H, vocab_size=V).spec()


def same_candidates(got: DraftHead, expected: DraftHead, rows: Rows) -> None:
    for step in STEPS:
        for a, b in zip(rows.candidates(got, step), rows.candidates(expected, step), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_state_dict_round_trip(spec: dict[str, Any], head: DraftHead) -> None:
    loaded = build_head(parse_head(spec), hidden_size=H, vocab_size=V).double()
    loaded.load_state_dict(head.state_dict())
    same_candidates(loaded, head, Rows.draw(T))
    same_candidates(copy.deepcopy(loaded), head, Rows.draw(T))


def test_built_on_meta_and_loaded(spec: dict[str, Any], head: DraftHead) -> None:
    with torch.device("meta"):
        built = build_head(parse_head(spec), hidden_size=H, vocab_size=V)
    assert all(t.is_meta for t in built.state_dict().values())
    assert {n: t.shape for n, t in built.state_dict().items()} == {n: t.shape for n, t in head.state_dict().items()}
    built.to_empty(device="cpu").double().load_state_dict(head.state_dict())
    same_candidates(built, head, Rows.draw(T))


def test_checkpoint_round_trip(spec: dict[str, Any], tmp_path: Path) -> None:
    taps = (2, 4, 5)
    body = Eagle3Config(
        hidden_size=H,
        target_hidden_size=H,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        vocab_size=V,
        tap_layers=taps,
    )
    target = TargetInfo(name="toy", hidden_size=H, vocab_size=V, tokenizer_sha256="abc", tap_layers=taps)
    head = make_head(spec)
    save_drafter(tmp_path / "d", Eagle3Drafter(body, head), target)
    loaded, info = load_drafter(tmp_path / "d")
    assert info.head.spec() == spec
    loaded.lm_head.check(STOPS)
    same_candidates(loaded.lm_head, head.bfloat16().float(), Rows.draw(T).to(torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [2, T], ids=["two_rows", "rows"])
def test_every_float_serves(head: DraftHead, dtype: torch.dtype, rows: int) -> None:
    head.to(dtype)
    drawn = Rows.draw(rows).to(dtype)
    for step in STEPS:
        candidates = drawn.candidates(head, step)
        assert candidates.logits_TS.dtype == dtype
        assert bool(candidates.logits_TS.isfinite().all())
        assert all(len(ids) == len(set(ids)) >= 4 for ids in ids_of(candidates))
        distribution_TV = drawn.distribution(head, step)
        assert distribution_TV.dtype == torch.float32
        torch.testing.assert_close(distribution_TV.sum(dim=-1), torch.ones(rows))
        assert bool(head.target_logits(drawn.hidden_TH, step, drawn.routed(head, step)).isfinite().all())


def test_packed_weights_change_nothing(spec: dict[str, Any]) -> None:
    plain, packed = make_head(spec), make_head(spec)
    packed.pack()
    for rows in (1, T):
        drawn = Rows.draw(rows).to(torch.float32)
        for step in STEPS:
            # float32 sums in another order
            torch.testing.assert_close(
                drawn.distribution(packed, step), drawn.distribution(plain, step), rtol=1e-4, atol=1e-6
            )


@pytest.mark.parametrize(
    "name", ["full", "slimspec", "truncated", "truncated_by_step", "specvocab", "dynaspec", "coral", "rdk_truncated"]
)
def test_packed_weights_are_copies_until_packed_again(head: DraftHead) -> None:
    owner = getattr(head, "base", head).float()
    drawn = Rows.draw(T).to(torch.float32)
    before = drawn.distribution(head)
    head.pack()
    with torch.no_grad():
        getattr(owner, owner.projections[0]).mul_(-1)
    torch.testing.assert_close(drawn.distribution(head), before, rtol=1e-4, atol=1e-6)
    head.pack()
    assert float((drawn.distribution(head) - before).abs().max()) > 0.01


def test_nothing_is_proposed_before_loading(spec: dict[str, Any]) -> None:
    head = build_head(parse_head(spec), hidden_size=H, vocab_size=V)
    drawn = Rows.draw(T).to(torch.float32)
    try:
        distribution_TV = drawn.distribution(head)
    except (IndexError, RuntimeError):  # an id map that was not loaded points nowhere
        return
    assert bool(distribution_TV.isnan().any(dim=-1).all())


def test_loss_trains_every_parameter_of_the_kind(name: str, head: DraftHead) -> None:
    drawn = Rows.draw(T)
    hidden_TH = drawn.hidden_TH.clone().requires_grad_()
    for step in STEPS:
        loss_T = head.loss(hidden_TH, step, drawn.routed(head, step), some_distribution(T))
        assert loss_T.shape == (T,)
        assert loss_T.dtype == torch.float32
        assert bool(loss_T.isfinite().all())
        loss_T.sum().backward()
    untrained = next((names for kind, names in NO_OWN_LOSS.items() if name.startswith(kind)), ())
    for parameter_name, parameter in head.named_parameters():
        if parameter_name in untrained:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None, parameter_name
            assert float(parameter.grad.abs().max()) > 0, parameter_name
    assert (hidden_TH.grad is None) == bool(untrained)


def test_loss_under_autocast_is_near(head: DraftHead) -> None:
    head.float()
    drawn, p_TV = Rows.draw(T).to(torch.float32), some_distribution(T)
    expected = head.loss(drawn.hidden_TH, 0, drawn.routed(head, 0), p_TV)
    with torch.autocast("cpu", torch.bfloat16):
        got = head.loss(drawn.hidden_TH, 0, drawn.routed(head, 0), p_TV.bfloat16())
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.1)  # logits of size 10 have 8 bits


def test_training_targets_are_a_distribution(head: DraftHead) -> None:
    targets_TS, counts_T = head.training_targets(some_distribution(T))
    torch.testing.assert_close(targets_TS.sum(dim=-1), torch.ones(T))
    assert counts_T.dtype == torch.bool


def test_cost_is_once_for_the_weights_and_the_same_for_each_row(head: DraftHead) -> None:
    costs = [head.cost(rows) for rows in (1, 2, 3, 4)]
    for field in ("bytes", "flops"):
        numbers = [getattr(cost, field) for cost in costs]
        assert all(isinstance(n, int) for n in numbers)
        steps = [b - a for a, b in pairwise(numbers)]
        assert min(steps) > 0
        if not isinstance(getattr(head, "base", head), ClusteredHead):  # several of its rows read the matrix otherwise
            assert len(set(steps)) == 1
            assert numbers[0] > steps[0] if field == "bytes" else numbers[0] == steps[0]
    assert head.half().cost(1).flops == costs[0].flops
    assert head.cost(1).bytes < costs[0].bytes


@pytest.mark.parametrize("step", STEPS)
def test_k_outside_of_the_support(head: DraftHead, step: int) -> None:
    drawn = Rows.draw(2)
    routed = drawn.routed(head, step)
    columns = head.candidates(drawn.hidden_TH, step, routed).logits_TS.shape[1]
    for k in (0, columns + 1):
        with pytest.raises(ValueError, match=rf"k must be in 1\.\.{columns} \(the head's support\), got {k}"):
            head.propose(drawn.hidden_TH, step, k, routed)


BAD_SPECS = {
    "unknown_kind": (
        {"kind": "slimspek"},
        r"draft_head\.kind must be one of full, slimspec, .*, got 'slimspek'",
    ),
    "list_kind": ({"kind": ["full"]}, r"draft_head\.kind must be one of .*, got \['full'\]"),
    "no_kind": ({"rank": 4}, r"draft_head\.kind must be one of full, .*, got None"),
    "superfluous": (
        {"kind": "full", "rank": 4},
        r"unknown key 'draft_head\.rank'; known under draft_head: ",
    ),
    "missing": ({"kind": "dynaspec", "clusters": 3}, r"draft_head\.first has no value"),
    "string": ({"kind": "slimspec", "rank": "4"}, r"draft_head\.rank must be a whole number, got '4'"),
    "fraction": ({"kind": "slimspec", "rank": 4.0}, r"draft_head\.rank must be a whole number, got 4\.0"),
    "truth": ({"kind": "slimspec", "rank": True}, r"draft_head\.rank must be a whole number, got True"),
    "none": ({"kind": "slimspec", "rank": None}, r"draft_head\.rank must be a whole number, got None"),
    "list": ({"kind": "slimspec", "rank": [4]}, r"draft_head\.rank must be a whole number, got \[4\]"),
    "hidden_size": ({"kind": "full", "hidden_size": 3}, "unknown key 'draft_head.hidden_size'"),
}


@pytest.mark.parametrize("fault", BAD_SPECS)
def test_bad_specs_say_what_is_allowed(fault: str) -> None:
    bad, message = BAD_SPECS[fault]
    with pytest.raises(ValueError, match=message):
        build_head(parse_head(bad), hidden_size=H, vocab_size=V)


def test_sizes_of_the_drafter_are_checked() -> None:
    with pytest.raises(ValueError, match="vocab_size must be at least 1, got 0"):
        build_head(parse_head({"kind": "full"}), hidden_size=H, vocab_size=0)


@pytest.mark.parametrize("name", [name for name in SPECS if not name.startswith("truncated")])  # has rows for some
def test_weights_of_another_vocabulary_do_not_load(spec: dict[str, Any], head: DraftHead) -> None:
    other = build_head(parse_head(spec), hidden_size=H, vocab_size=V + 1)
    with pytest.raises((RuntimeError, ValueError), match=r"size mismatch|no partition"):
        other.load_state_dict(head.state_dict())


def test_a_kind_without_its_methods_cannot_be_made() -> None:
    class Unfinished(DraftHead):
        Config = HeadConfig

    with pytest.raises(TypeError, match="abstract"):
        Unfinished(HeadConfig(), H, V)  # type: ignore[abstract]


def test_fewest_candidates_is_the_least_that_any_row_scores(name: str) -> None:
    head = make_head(SPECS[name])
    embed, feature, hidden = (seeded(40, H, seed=seed).float() for seed in (21, 22, 23))
    scored = []
    for step in range(4):
        q, _ = head.distribution(hidden, step, head.route(embed, feature, step))
        scored.append(int((q > 0).sum(dim=-1).min()))
        assert head.fewest_candidates(step + 1) <= min(scored)
    if "dynaspec" not in name and "coral" not in name and "rdk" not in name:  # whose rows may all do better
        assert head.fewest_candidates(4) == min(scored)


def test_best_is_the_first_proposal(name: str) -> None:
    head = make_head(SPECS[name])
    embed, feature, hidden = (seeded(9, H, seed=seed).float() for seed in (21, 22, 23))
    for step in STEPS:
        routed = head.route(embed, feature, step)
        assert torch.equal(head.best(hidden, step, routed), head.propose(hidden, step, 1, routed).token_ids_Tk)
