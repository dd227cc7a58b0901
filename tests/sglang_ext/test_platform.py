"""What the CPU platform refuses, at start and not at the first request that needs it."""

import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixture_models import TARGET

from sglang_ext.adapter.activation import has_accelerator
from sglang_ext.adapter.cpu.fused_ops import cap_logits, clamped_swiglu, rotary_forward

pytestmark = pytest.mark.skipif(has_accelerator(), reason="the CPU platform is not used here")


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """SGLang writes resolved arguments into environment variables, which later engines would inherit."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"enable_deterministic_inference": True}, "a request's sampling_seed is honoured without it"),
        ({"speculative_accept_threshold_single": 0.5}, r"--speculative-accept-threshold-single below 1 .*got 0\.5"),
        ({"speculative_accept_threshold_acc": 0.5}, "--speculative-accept-threshold-acc below 1"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle is not offered"),
    ],
    ids=["deterministic", "threshold_single", "threshold_acc", "multi_layer"],
)
def test_refusals(option: dict[str, Any], message: str) -> None:
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(ValueError, match=message):
        ServerArgs(model_path=str(TARGET), **option).resolve_once()


def test_logits_are_capped_in_place() -> None:
    logits = torch.tensor([[-100.0, 0.0, 1.0, 100.0]])
    assert cap_logits(logits, 2.0) is logits
    torch.testing.assert_close(logits, torch.tensor([[-2.0, 0.0, 0.92423431, 2.0]]))


def test_the_activation_of_gpt_oss_is_that_of_its_definition() -> None:
    """transformers' GptOssExperts, value by value; 9 and -9 lie beyond the clamp of 7."""
    x = torch.tensor([[9.0, 9.0, -9.0, -9.0, 1.0, 2.0]])

    def one(gate: float, up: float) -> float:
        return (up + 1) * gate / (1 + math.exp(-1.702 * gate))

    expected = torch.tensor([[one(7.0, 7.0), one(-9.0, -7.0), one(1.0, 2.0)]])
    torch.testing.assert_close(clamped_swiglu(x, 1.702, 7.0), expected)


def test_a_pass_without_rows_is_rotated() -> None:
    A, K, D = 4, 2, 8
    rotary = SimpleNamespace(is_neox_style=True, rotary_dim=D, head_size=D, cos_sin_cache=torch.ones(3, D))
    query, key = rotary_forward(rotary, torch.zeros(0, dtype=torch.int64), torch.zeros(0, A * D), torch.zeros(0, K * D))
    assert (query.shape, key.shape) == ((0, A * D), (0, K * D))
