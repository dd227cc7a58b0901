"""Counts of an independent drafter against PyTorch's own counter and by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_models import TARGET as FIXTURE
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rayspec.costs import cost_metrics, drafter_cost, mbsu, step_flops, target_cost
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.counting import StepShape
from sglang_ext.drafters.independent import IndependentConfig, IndependentDrafter
from sglang_ext.drafters.independent.cost import IndependentCost
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.heads import head_from_target, parse_head

V, H, LAYERS = 80, 16, 3
TARGET = TargetInfo(name="toy", hidden_size=32, vocab_size=V, tokenizer_sha256="", tap_layers=())
HEADS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "slimspec": {"kind": "slimspec", "rank": 4},
    "truncated": {"kind": "truncated", "size": 11},
}


def make(folder: Path, head: str) -> str:
    config = IndependentConfig(vocab_size=V, hidden_size=H, num_layers=LAYERS, head_dim=6, intermediate_size=20)
    lm_head = head_from_target(parse_head(HEADS[head]), torch.randn(V, H), {"ids": torch.arange(V)})
    save_drafter(folder / head, IndependentDrafter(config, lm_head), TARGET)
    return str(folder / head)


def counted_flops(run: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("rows", [1, 5])
def test_flops_are_those_that_pytorch_counts(head: str, rows: int, tmp_path: Path) -> None:
    path = make(tmp_path, head)
    cost = drafter_cost(path)
    assert isinstance(cost, IndependentCost)
    drafter, _ = load_drafter(path)
    assert isinstance(drafter, IndependentDrafter)
    assert counted_flops(lambda: drafter(torch.arange(rows)[None])) == cost.layers.flops(rows, rows)
    assert counted_flops(lambda: drafter.lm_head.best(torch.randn(rows, H), 0)) == cost.head.cost(rows).flops


def test_params_hold_embedding_and_head(tmp_path: Path) -> None:
    layer = 4 * (2 * 6 * H) + 3 * 20 * H + 2 * H  # 2 heads of 6
    body = V * H + LAYERS * layer + H
    found = {head: drafter_cost(make(tmp_path, head)).params for head in HEADS}
    assert found == {"full": body + V * H, "slimspec": body + 4 * (V + H), "truncated": body + 11 * H}


def test_metrics_count_its_own_embedding_and_every_draft_forward(tmp_path: Path, make_request: Any) -> None:
    request = make_request("a", (0, 0, 8), 0.1)
    target, drafter = target_cost(str(FIXTURE)), drafter_cost(make(tmp_path, "truncated"))
    assert isinstance(drafter, IndependentCost)
    shape = StepShape(draft_steps=3, topk=2, num_draft_tokens=6)
    found = cost_metrics({"tau": 3.0}, [request], shape, target, drafter)
    head = drafter.head.cost(1).bytes + 2 * drafter.head.cost(2).bytes  # two candidates a position
    body = 2 * (drafter.params - 11 * H)
    assert found["mbsu"] == pytest.approx(mbsu(3.0, 3 * body + head, 2 * target.params))
    assert target.decoder is not None
    keys = request.prompt_tokens + request.output_tokens / 2
    drafted = drafter.layers.flops(6 + 4, keys) + 5 * drafter.head.cost(1).flops
    assert step_flops(target.decoder, drafter, shape, keys) == target.decoder.flops(6, keys) + drafted
    assert found["gflops_per_token"] == pytest.approx((target.decoder.flops(6, keys) + drafted) / 3 / 1e9)
