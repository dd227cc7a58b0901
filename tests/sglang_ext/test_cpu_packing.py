"""What the CPU platform keeps of a model in oneDNN's layout."""

import pytest
import torch

from sglang_ext.adapter.activation import has_accelerator

pytestmark = pytest.mark.skipif(has_accelerator(), reason="the CPU platform is not used here")


def test_a_head_that_was_given_another_weight_is_packed_anew() -> None:
    """SGLang gives a stock EAGLE drafter its target's head after loading."""
    from sglang_ext.adapter.cpu.packing import compute_lm_head, pack_model

    torch.manual_seed(0)
    model = torch.nn.Module()
    model.lm_head = torch.nn.Linear(16, 40, bias=False)
    pack_model(model)
    hidden_TH, theirs = torch.randn(3, 16), torch.nn.Parameter(torch.randn(40, 16))
    del model.lm_head.weight
    model.lm_head.weight = theirs
    logits_TV = compute_lm_head(lambda *_, **__: pytest.fail("the packed head answers"), None, hidden_TH, model.lm_head)
    torch.testing.assert_close(logits_TV, hidden_TH @ theirs.T)
