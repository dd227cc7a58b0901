"""Routing beside the layer gives what routing before it gives, bit for bit, also from a captured CUDA graph."""

import pytest
import torch
from torch import Tensor

from sglang_ext.adapter.side_stream import start_beside
from sglang_ext.heads import head_from_target, parse_head
from sglang_ext.heads.dynaspec import DynaSpecHead

H, V, M, ROWS = 256, 4096, 32, 48
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
on_cuda = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])


def dynaspec(device: str) -> DynaSpecHead:
    spec = {"kind": "dynaspec", "clusters": M, "first": 5, "later": 5, "rule": "fixed", "router_width": 2048}
    weight_VH = torch.randn(V, H, generator=torch.Generator().manual_seed(0))
    head = head_from_target(parse_head(spec), weight_VH, {"cluster_of": torch.arange(V) % (M + 1)})
    assert isinstance(head, DynaSpecHead)
    return head.requires_grad_(False).to(device)


class Step:
    """A draft step: a layer that overwrites its input as SGLang's does, beside or after the router."""

    def __init__(self, device: str) -> None:
        self.head = dynaspec(device)
        generator = torch.Generator().manual_seed(1)
        self.layer_HH = (torch.randn(H, H, generator=generator) / H**0.5).to(device)
        self.embed_TH, self.feature_TH = (torch.randn(ROWS, H, generator=generator).to(device) for _ in range(2))

    def layer(self, embed_TH: Tensor, feature_TH: Tensor) -> Tensor:
        hidden_TH = embed_TH
        for _ in range(4):  # memory comes and goes while the router reads
            hidden_TH = torch.tanh(hidden_TH @ self.layer_HH)
        return feature_TH.add_(hidden_TH)

    def __call__(self, is_beside: bool) -> tuple[Tensor, Tensor, Tensor]:
        embed_TH, feature_TH = self.embed_TH.clone(), self.feature_TH.clone()
        if is_beside:
            join = start_beside(lambda *inputs: self.head.route(*inputs, step=0), embed_TH, feature_TH)
            hidden_TH = self.layer(embed_TH, feature_TH)
            routed_TM = join()
        else:
            routed_TM = self.head.route(embed_TH, feature_TH, step=0)
            hidden_TH = self.layer(embed_TH, feature_TH)
        return routed_TM, *self.head.propose(hidden_TH, 0, 8, routed_TM)[:2]


@pytest.mark.parametrize("device", ["cpu", on_cuda])
@torch.no_grad()
def test_beside_is_before_bit_for_bit(device: str) -> None:
    step = Step(device)
    expected = step(is_beside=False)
    for _ in range(200 if device == "cuda" else 2):  # a race is not lost every time
        assert all(torch.equal(a, b) for a, b in zip(step(is_beside=True), expected, strict=True))


@pytest.mark.parametrize("device", [on_cuda])
@torch.no_grad()
def test_a_captured_graph_replays_it(device: str) -> None:
    step = Step(device)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(3):
            step(is_beside=True)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # two steps: the second fork follows the first join, as in a draft of several steps
        first, second = step(is_beside=True), step(is_beside=True)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        for static_TH in (step.embed_TH, step.feature_TH):
            static_TH.copy_(torch.randn(ROWS, H, generator=generator))
        graph.replay()
        expected = step(is_beside=False)
        for got in (first, second):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("device", [on_cuda])
def test_fork_and_join_never_wait_on_the_host(device: str) -> None:
    step = Step(device)
    step(is_beside=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            step(is_beside=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_on_a_cpu_the_work_is_done_at_once_on_the_inputs_themselves() -> None:
    seen: list[Tensor] = []

    def work(x: Tensor, y: Tensor) -> Tensor:
        seen.extend((x, y))
        return x + y

    x, y = torch.ones(2), torch.ones(2)
    join = start_beside(work, x, y)
    assert seen[0] is x
    assert seen[1] is y
    x.zero_()
    assert torch.equal(join(), torch.full((2,), 2.0))
