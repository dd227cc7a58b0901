"""Draft workers of drafters that draft from one vector a request, without an engine, and CUDA graphs of their drafting
that Python plays, as a CPU has none."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_specformer
import torch
from head_cases import SPECS, H
from test_last_hidden import EMBED_VH, PATHS, make_drafter
from test_tree_slim import make_tree
from torch import Tensor, nn

from sglang_ext.adapter import swap
from sglang_ext.adapter.longest_draft import LongestDraft
from sglang_ext.adapter.models import sharded_head
from sglang_ext.adapter.workers import captured, last_hidden, propose_graphs
from sglang_ext.adapter.workers.context import ContextDraftWorker
from sglang_ext.adapter.workers.last_hidden import CarriedDrafting, LastHiddenDraftWorker
from sglang_ext.drafters.checkpoint import origins, read_tensors
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.trees.static import StaticTree

SIZES = [1, 2, 4]  # of the batches that graphs are captured for
NODES = len(PATHS) + 1


class Played:
    """SGLang's backend: a capture runs the pass, a replay runs it again and writes where the capture wrote, and into
    what else lies in the memory that graphs share."""

    errors: list[Exception] = []  # noqa: RUF012  (of the captures to come)
    captures = 0

    def __init__(self, runner: Any, **options: Any) -> None:
        self.passes: dict[int, tuple[Callable[[], Any], Any]] = {}
        self.replayed: list[int] = []
        self.capture_session = nullcontext

    def capture_one(self, key: Any, forward: Callable[[], Any]) -> None:
        if Played.errors:
            raise Played.errors.pop()
        for _ in range(2):  # to warm up
            forward()
        self.passes[key.size] = forward, forward()
        Played.captures += 1

    def replay(self, key: Any, batch: None) -> Any:
        self.replayed.append(key.size)
        for _, output in self.passes.values():
            for place in written(output):
                place.fill_(-7)
        forward, output = self.passes[key.size]
        for place, value in zip(written(output), written(forward()), strict=True):
            place.copy_(value)
        return output

    def cleanup(self) -> None:
        self.passes.clear()


def written(output: Any) -> list[Tensor]:
    """By the pass. Links of a static tree are views of its own."""
    tokens_BN, links, num_nodes_B = output
    return [tokens_BN] if num_nodes_B is None else [tokens_BN, *links, num_nodes_B]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's settings, with graphs that Python plays."""
    spec = SimpleNamespace(
        speculative_use_rejection_sampling=False,
        graph=SimpleNamespace(disable_cuda_graph_padding=False),
        features=SimpleNamespace(enable_memory_saver=False),
        free_gb=iter(range(100, 0, -1)),
    )
    monkeypatch.setattr(Played, "errors", [])
    monkeypatch.setattr(Played, "captures", 0)
    monkeypatch.setattr(last_hidden, "get_spec", lambda: spec)
    monkeypatch.setattr(last_hidden, "has_graphs", lambda: True)
    monkeypatch.setattr(propose_graphs, "FullCudaGraphBackend", Played)
    monkeypatch.setattr(propose_graphs, "_on_capture_stream", lambda: nullcontext())
    monkeypatch.setattr(propose_graphs, "get_batch_sizes_to_capture", lambda runner: (SIZES, []))
    monkeypatch.setattr(propose_graphs, "get_exec", lambda: spec)
    monkeypatch.setattr(propose_graphs, "get_available_gpu_memory", lambda *device: next(spec.free_gb))
    for name in ("draft_pp_context", "speculative_moe_backend_context", "speculative_moe_a2a_backend_context"):
        monkeypatch.setattr(captured, name, nullcontext)
    return spec


def worker_of(kind: type[CarriedDrafting], steps: int, topk: int, nodes: int) -> Any:
    worker: Any = object.__new__(kind)
    embedding = nn.Embedding.from_pretrained(EMBED_VH)
    runner = SimpleNamespace(device="cpu", dtype=torch.float32, gpu_id=0)
    runner.model = SimpleNamespace(get_input_embeddings=lambda: embedding)
    runner.attn_backend = SimpleNamespace(verify_mask=None, max_context_len=64)
    worker.target_worker, worker.device, worker.topk = SimpleNamespace(model_runner=runner), "cpu", topk
    worker.speculative_num_steps, worker.speculative_num_draft_tokens = steps, nodes
    worker.longest = LongestDraft(steps, topk, nodes)
    worker.parallel_layout, worker._specialized_graph_memory_usage = SimpleNamespace(tp_group=None), {}
    return worker


def made(name: str, head: str | None = None) -> Any:
    """A worker with a drafter, before its graphs are captured. `head`: of SPECS; None for the one of the name."""
    worker: Any
    if name == "specformer":
        worker = worker_of(ContextDraftWorker, 3, 1, 4)
        worker._draft_with(SimpleNamespace(path=name), test_specformer.make())
        return worker
    family, _, rest = name.partition("-")
    drafter = make_drafter(family, SPECS[head or ("dynaspec_union" if rest == "shared" else "slimspec")])
    drafter.draft_tree = make_tree(hypotheses=4) if rest == "slim" else StaticTree(PATHS)
    topk, nodes = (1, 4) if rest == "chain" else (4, NODES)
    worker = worker_of(ContextDraftWorker if family == "hydra++" else LastHiddenDraftWorker, 3, topk, nodes)
    worker._draft_with(SimpleNamespace(path=name), drafter)
    return worker


def batch_of(B: int, width: int = H, *, is_all_greedy: bool = True) -> Any:
    generator = torch.Generator().manual_seed(B)
    spec_info = SimpleNamespace(
        hidden_states=torch.randn(B, width, generator=generator),
        bonus_tokens=torch.randint(width, (B,), generator=generator, dtype=torch.int32),
    )
    lengths_B = torch.arange(B) + 3
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        sampling_info=Sampling(B, is_all_greedy),
        spec_info=spec_info,
        seq_lens=lengths_B,
        seq_lens_sum=int(lengths_B.sum()),
    )


class Sampling:
    """SGLang's, of requests at temperature 1."""

    def __init__(self, B: int, is_all_greedy: bool) -> None:
        self.is_all_greedy, self.temperatures = is_all_greedy, torch.ones(B, 1)

    def __len__(self) -> int:
        return len(self.temperatures)


def replayed(worker: Any) -> list[int]:
    (graphs,) = worker.graphs.values()
    return graphs._backend.replayed


def draft_of(worker: Any, batch: Any) -> list[Tensor]:
    found = worker.draft(batch)
    links = (found.retrieve_next_token, found.retrieve_next_sibling, found.positions, found.custom_mask)
    return [found.draft_token, *links]


def eager_draft_of(worker: Any, batch: Any) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "graphs", {})
        return draft_of(worker, batch)


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def serves(asked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker asks of SGLang when it hosts another drafter."""
    monkeypatch.setattr(TargetInfo, "check_served_with", lambda *served: None)
    monkeypatch.setattr(last_hidden, "served_target", lambda taps: None)
    monkeypatch.setattr(last_hidden, "served_stop_ids", tuple)
    monkeypatch.setattr(sharded_head, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    monkeypatch.setattr(swap, "metrics", lambda: None)


def serving(folder: Path) -> Any:
    """A worker with the drafter of a folder."""
    worker = worker_of(LastHiddenDraftWorker, 3, 4, NODES)
    info = read_info(folder)
    worker._host(info, read_tensors(info), origins(info))
    worker._capture_cuda_graphs()
    return worker
