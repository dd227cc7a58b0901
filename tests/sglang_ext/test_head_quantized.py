"""Heads whose matrices are stored in fewer bits: any kind, in the checkpoint, packed, and trained through."""

from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import toy_body, toy_target
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rayspec_kernels.common.quantized import FORMATS
from sglang_ext.drafters.checkpoint import check_files, load_drafter, save_drafter
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.heads import build_head, head_from_target, parse_head
from sglang_ext.heads.quantized import QuantizedMatrix, round_through

V, H, T = 200, 64, 5
CLUSTERS = {"cluster_of": torch.arange(V) % 10}
IDS = {"ids": torch.randperm(V, generator=torch.Generator().manual_seed(0))}
SPECS: list[dict[str, Any]] = [
    {"kind": "full"},
    {"kind": "slimspec", "rank": 32},
    {"kind": "truncated", "size": 77},
    {"kind": "truncated", "size": 77, "step_sizes": [77, 30]},
    {"kind": "specvocab", "rank": 32, "size": 40},
    {"kind": "dynaspec", "clusters": 9, "first": 3, "later": 2, "router_width": 32},
    {"kind": "dynaspec", "clusters": 9, "first": 3, "later": 2, "router_width": 32, "union": True},
    {"kind": "coral", "clusters": 9, "top": 4},
]
NAMES = [f"{s['kind']}{len(s)}" for s in SPECS]


@pytest.fixture
def weight_VH() -> Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def hidden_TH() -> Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_any_head_in_fewer_bits(spec: dict, weight_format: str, weight_VH: Tensor, hidden_TH: Tensor) -> None:
    fewer = spec | {"weight_format": weight_format, "group_size": 32}
    head = head_from_target(parse_head(fewer), weight_VH, CLUSTERS | IDS).eval()
    with torch.no_grad():
        through = head.target_logits(hidden_TH, 1, head.route(hidden_TH, hidden_TH, 1))  # as training sees it
        head.quantize()
        routed = head.route(hidden_TH, hidden_TH, 1)
        stored = head.target_logits(hidden_TH, 1, routed)
        assert all(isinstance(getattr(head, name), QuantizedMatrix) for name in head.projections)
        if not head.gathered:  # rows that are gathered are rounded only when stored
            torch.testing.assert_close(stored, through, rtol=1e-4, atol=1e-3)
        head.pack()
        packed = head.target_logits(hidden_TH, 1, routed)
        both = (stored > -1e4) & (packed > -1e4)
        assert float(both.sum()) >= 0.95 * float((stored > -1e4).sum())  # a router on bfloat16 may choose otherwise
        assert float((packed - stored)[both].abs().max()) < 0.03 * float(stored[both].abs().max())
    assert fewer.items() <= head.spec().items()
    rebuilt = build_head(parse_head(fewer), hidden_size=H, vocab_size=V)
    rebuilt.load_state_dict(head.state_dict())
    assert torch.equal(rebuilt.target_logits(hidden_TH, 1, routed), stored)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_checkpoint_stores_the_bits_as_they_are(weight_format: str, weight_VH: Tensor, tmp_path: Path) -> None:
    body = toy_body(H, V)
    target = toy_target(H, V)
    head = head_from_target(parse_head({"kind": "full", "weight_format": weight_format}), weight_VH)
    head.quantize()
    save_drafter(tmp_path / "d", Eagle3Drafter(body, head), target)
    check_files(read_info(tmp_path / "d"))
    loaded, info = load_drafter(tmp_path / "d")
    assert info.head.spec() == {"kind": "full", "weight_format": weight_format, "group_size": 64}
    for name, tensor in head.state_dict().items():
        assert loaded.lm_head.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(loaded.lm_head.state_dict()[name].float(), tensor.float())


def test_int4_costs_a_quarter_of_bfloat16(weight_VH: Tensor) -> None:
    plain = head_from_target(parse_head({"kind": "full"}), weight_VH).bfloat16()
    four = head_from_target(parse_head({"kind": "full", "weight_format": "int4"}), weight_VH)
    four.quantize()
    assert four.cost(1).flops == plain.cost(1).flops
    assert four.cost(1).bytes / plain.cost(1).bytes == pytest.approx(0.25 + 4 / (2 * 64), abs=0.02)  # scale and zero


def test_gradients_pass_the_rounding() -> None:
    weight = torch.randn(8, 32, requires_grad=True)
    x = torch.randn(3, 32)
    (x @ round_through(weight, "int4", 32).T).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(8, -1))


def test_unloaded_is_loud() -> None:
    head = build_head(parse_head({"kind": "full", "weight_format": "int8"}), hidden_size=H, vocab_size=V)
    assert head.target_logits(torch.ones(1, H)).isnan().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_format": "int3"}, "draft_head.weight_format must be one of int8, fp8, int4"),
        ({"weight_format": "int4", "group_size": 48}, "draft_head.group_size must be one of"),
        ({"kind": "rdk", "base": {"kind": "full"}, "weight_format": "int4"}, "belongs into draft_head.base"),
    ],
)
def test_bad_formats(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_head(parse_head({"kind": "full"} | options), hidden_size=H, vocab_size=V)


@pytest.mark.parametrize("kind", [{"kind": "full"}, {"kind": "slimspec", "rank": 32}], ids=["full", "slimspec"])
def test_fp8_is_refused_by_a_gpu_that_does_not_know_it(kind: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call there would make numbers of the whole matrix. Training on such a GPU does not ask."""

    def check(weight_format: str, device: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        with FakeTensorMode(), torch.device(device):
            build_head(parse_head(kind | {"weight_format": weight_format}), hidden_size=H, vocab_size=V).check()

    for fits in (("fp8", "cuda", (8, 9)), ("int8", "cuda", (8, 0)), ("int4", "cuda", (8, 0)), ("fp8", "cpu", (8, 0))):
        check(*fits)
    message = r"weight_format fp8 needs a GPU of compute capability 8\.9 or more, and this one has 8\.0; .* int8, int4"
    with pytest.raises(ValueError, match=message):
        check("fp8", "cuda", (8, 0))
