"""Heads answer through fused kernels as they do without: compiled on a GPU, in Triton's interpreter elsewhere."""

from typing import Any

import pytest
import torch
from head_cases import SPECS, STEPS, Rows, make_head
from torch._subclasses.fake_tensor import FakeTensorMode
from volume import volume

import rayspec_kernels.gather_dot
import rayspec_kernels.head_topk
import rayspec_kernels.indexed_head
import rayspec_kernels.router_topk
import rayspec_kernels.slim_head
from rayspec_kernels.common.quantized import Quantized
from sglang_ext.heads import DraftHead, base, dynaspec
from sglang_ext.heads.base import NO_TOKEN

OPERATIONS = (rayspec_kernels.head_topk, rayspec_kernels.slim_head, rayspec_kernels.indexed_head,
              rayspec_kernels.gather_dot, rayspec_kernels.router_topk)  # fmt: skip
FUSED = {name: spec for name, spec in SPECS.items() if spec["kind"] != "rdk"}  # rdk works on the whole distribution
FEWER_BITS = {"full": "int8", "slimspec": "int8", "specvocab": "int8", "dynaspec": "fp8", "dynaspec_union": "int8",
              "coral_union": "fp8"}  # fmt: skip
FUSED |= {f"{name}_{form}": {**SPECS[name], "weight_format": form} for name, form in FEWER_BITS.items()}
NOT_FUSED = {"specvocab", "specvocab_int8", "full_biased"}  # rows with candidates of their own, or a bias
ROUTED = ["dynaspec", "dynaspec_request", "dynaspec_fp8", "coral", "coral_request"]  # groups of rows choose
ROWS = (1, 5)
# what fewer bits change is the same at each step
CASES = [(name, step) for name in FUSED for step in STEPS[:: volume(1, 3 if name in SPECS else len(STEPS))]]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def kernels(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the same kernels all the same."""
    if not torch.cuda.is_available():
        for module in (*OPERATIONS, base):
            monkeypatch.setattr(module, "uses_kernel", without_gradient)


def without_gradient(*tensors: torch.Tensor) -> bool:
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def served(spec: dict[str, Any], device: torch.device) -> DraftHead:
    head = make_head(spec).float()
    head.quantize()
    return head.to(device)


@torch.no_grad()
@pytest.mark.parametrize(("name", "step"), CASES)
def test_fused_answers_are_the_same(name: str, step: int, device: torch.device, request: pytest.FixtureRequest) -> None:
    head = served(FUSED[name], device)
    for T in ROWS:
        rows = Rows.draw(T).to(torch.float32).to(device)
        routed = rows.routed(head, step)
        with pytest.MonkeyPatch.context() as plain:
            plain.setattr(base, "MAX_FUSED_ROWS", 0)
            expected = head.propose(rows.hidden_TH, step, 4, routed)
        request.getfixturevalue("kernels")
        torch.testing.assert_close(rows.routed(head, step), routed, atol=1e-4, rtol=1e-4)
        fused = head.fused(rows.hidden_TH, step, 4, routed)
        assert (fused is None) == (name in NOT_FUSED)
        found = head.propose(rows.hidden_TH, step, 4, routed)
        assert torch.equal(found.token_ids_Tk, expected.token_ids_Tk)
        torch.testing.assert_close(found.scores_Tk, expected.scores_Tk, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.log_norm_T, expected.log_norm_T, atol=1e-4, rtol=1e-4)
        assert torch.equal(head.best(rows.hidden_TH, step, routed), expected.token_ids_Tk[:, :1])


@torch.no_grad()
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", [name for name in SPECS if name.startswith(("dynaspec", "coral"))])
def test_what_is_noted_is_what_is_scored(name: str, device: torch.device) -> None:
    """One row of each request at the root, three later."""
    head = served(SPECS[name], device)
    head.expect_rows((1, 3))
    head.noted = torch.zeros(2, 5, 3, dtype=torch.int32, device=device)
    for step, T in ((0, 1), (0, 5), (1, 3), (1, 6)):
        rows = Rows.draw(T).to(torch.float32).to(device)
        routed = rows.routed(head, step)
        head.noted.zero_()
        assert head.fused(rows.hidden_TH, step, 1, routed) is not None
        noted_BR = head.noted[step, : T // (1, 3)[step], : (1, 3)[step]]
        scored_T = head.scored(rows.hidden_TH, step, routed)
        assert noted_BR.flatten().tolist() == scored_T.tolist()


@torch.no_grad()
@pytest.mark.parametrize("step", [1, 6])
@pytest.mark.parametrize("name", ROUTED)
def test_the_beams_of_several_requests(
    name: str, step: int, device: torch.device, request: pytest.FixtureRequest
) -> None:
    """Two requests of three rows, which choose for their request or for themselves: each row's best tokens and their
    log-probabilities are those of what was scored and then searched."""
    head = served(FUSED[name], device)
    head.expect_rows((1, 3))
    rows = Rows.draw(6).to(torch.float32).to(device)
    routed = rows.routed(head, step)
    logits_TV = head.target_logits(rows.hidden_TH, step, routed)
    supports = {tuple((logits_V > NO_TOKEN / 2).tolist()) for logits_V in logits_TV}
    assert len(supports) > 1, "rows must differ for this to show anything"
    expected_Tk, ids_Tk = logits_TV.log_softmax(dim=-1).topk(4)
    request.getfixturevalue("kernels")
    assert head.fused(rows.hidden_TH, step, 4, routed) is not None
    found = head.propose(rows.hidden_TH, step, 4, routed)
    assert torch.equal(found.token_ids_Tk, ids_Tk)
    torch.testing.assert_close(found.scores_Tk - found.log_norm_T[:, None], expected_Tk, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", sorted(set(FUSED) - NOT_FUSED))
def test_no_shape_and_no_branch_depends_on_values(name: str) -> None:
    head, rows = served(FUSED[name], torch.device("cpu")), Rows.draw(5).to(torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        hidden_TH, embed_TH, feature_TH = (mode.from_tensor(x) for x in rows)
        for step in STEPS:
            proposal = head.propose(hidden_TH, step, 4, head.route(embed_TH, feature_TH, step))
            assert proposal.token_ids_Tk.shape == (5, 4)


@torch.no_grad()
@pytest.mark.usefixtures("kernels")
def test_kernels_read_matrices_as_they_are_stored(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a matrix in fewer bits are not made numbers of first, and a router's neither."""
    seen = []

    def watched(module: Any, name: str) -> None:
        operation = getattr(module, name)

        def call(*arguments: Any) -> Any:
            seen.append(arguments)
            return operation(*arguments)

        monkeypatch.setattr(module, name, call)

    watched(base, "gather_dot")
    watched(dynaspec, "router_scores")
    for name in ("specvocab", "dynaspec"):
        rows = Rows.draw(3).to(torch.float32).to(device)
        head = served({**SPECS[name], "weight_format": "int8"}, device)
        head.propose(rows.hidden_TH, 1, 4, rows.routed(head, 1))
    (_, weight, _), (_, _, router, _), *_ = seen
    assert isinstance(weight, Quantized)
    assert isinstance(router.in_R2H, Quantized)
    assert isinstance(router.out_MR, Quantized)


@pytest.mark.usefixtures("kernels")
def test_a_router_in_training_is_rounded_and_not_fused(device: torch.device) -> None:
    spec, rows = {**SPECS["dynaspec"], "weight_format": "int8"}, Rows.draw(3).to(torch.float32).to(device)
    routed_TM = rows.routed(make_head(spec).float().to(device), 0)
    assert routed_TM is not None
    assert routed_TM.requires_grad
    torch.testing.assert_close(routed_TM.detach(), rows.routed(served(spec, device), 0), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("kernels")
def test_training_and_large_batches_are_not_fused(device: torch.device) -> None:
    hidden_TH = Rows.draw(base.MAX_FUSED_ROWS + 1).to(torch.float32).to(device).hidden_TH
    with torch.no_grad():
        assert base.may_fuse(hidden_TH[:-1], k=4)
        assert not base.may_fuse(hidden_TH, k=4)
        assert not base.may_fuse(hidden_TH[:1], k=base.MAX_K + 1)
    assert torch.is_grad_enabled()
    assert not base.may_fuse(hidden_TH[:1].requires_grad_())
