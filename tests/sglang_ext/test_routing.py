"""When a routed head chooses: beside the layer, or behind the layers where SGLang replays these without our code."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from head_cases import DYNASPEC, Rows, make_head
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor, nn

from sglang_ext.adapter.models import hosted_head
from sglang_ext.adapter.models.hosted_head import HeadLogits, HeadRequest

LENGTHS = [3, 2]  # of the prompts
LAST = torch.tensor([2, 4])  # row of each


@pytest.fixture
def drawn() -> Rows:
    return Rows.draw(sum(LENGTHS)).to(torch.float32)


@pytest.fixture
def logits(drawn: Rows) -> HeadLogits:
    def layer_inputs(batch: Any, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        chosen = slice(None) if rows is None else rows
        return drawn.embed_TH[chosen], drawn.feature_TH[chosen]

    made = object.__new__(HeadLogits)
    nn.Module.__init__(made)
    made.request, made.routing, made._layer_inputs = None, None, layer_inputs
    return made


def batch(mode: ForwardMode) -> Any:
    return SimpleNamespace(forward_mode=mode, extend_seq_lens=torch.tensor(LENGTHS))


def test_a_prefill_routes_behind_the_layers_for_the_rows_that_are_read(logits: HeadLogits, drawn: Rows) -> None:
    """A replayed prefill runs no hook before the layer: `start_routing` may never have been called."""
    head, of = make_head(DYNASPEC), batch(ForwardMode.EXTEND)
    expected = head.route(drawn.embed_TH[LAST], drawn.feature_TH[LAST], 0)
    assert expected is not None
    for is_hooked in (False, True):
        if is_hooked:
            logits.start_routing(head, drawn.embed_TH, drawn.feature_TH, of)
        assert logits.routing is None
        routed = logits._routed(head, of)
        assert routed is not None
        assert torch.equal(routed, expected)


@pytest.mark.parametrize("is_broken_graph", [False, True])
def test_a_draft_step_routes_for_every_row(
    is_broken_graph: bool, logits: HeadLogits, drawn: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted_head, "is_in_breakable_cuda_graph", lambda: is_broken_graph)
    head, of = make_head(DYNASPEC), batch(ForwardMode.DECODE)
    logits.start_routing(head, drawn.embed_TH, drawn.feature_TH, of)
    assert (logits.routing is None) == is_broken_graph
    routed = logits._routed(head, of)
    assert routed is not None
    assert torch.equal(routed, drawn.routed(head, 0))
    assert logits.routing is None, "what was begun is of one pass"


@pytest.mark.parametrize("is_hooked", [False, True], ids=["behind_the_layer", "beside_it"])
def test_a_captured_extend_routes_for_the_rows_that_are_read(is_hooked: bool, logits: HeadLogits, drawn: Rows) -> None:
    """SGLang's graph of it gives the head the last accepted row of each request's alone."""
    head, of = make_head(DYNASPEC), batch(ForwardMode.DRAFT_EXTEND_V2)
    of.spec_info = SimpleNamespace(select_index=torch.tensor([1, 4]), num_accept_tokens=torch.tensor([2, 2]))
    if is_hooked:
        logits.start_routing(head, drawn.embed_TH, drawn.feature_TH, of)
        assert logits.routing is not None
    request = HeadRequest(step=0, k=2)
    logits.answer(request, head, drawn.hidden_TH[LAST], of)
    expected = head.propose(
        drawn.hidden_TH[LAST], 0, 2, head.route(drawn.embed_TH[[1, 4]], drawn.feature_TH[[1, 4]], 0)
    )
    assert request.best is not None
    assert torch.equal(request.best.token_ids_Tk, expected.token_ids_Tk)


def test_a_head_that_does_not_route_is_told_nothing(logits: HeadLogits, drawn: Rows) -> None:
    assert logits._routed(make_head({"kind": "full"}), batch(ForwardMode.EXTEND)) is None
