"""A draft worker without an engine: a model that hosts a head, and CUDA graphs that Python plays, as a CPU has none."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from head_cases import SPECS, H, make_head
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner
from torch import Tensor

from sglang_ext.adapter.models.hosted_head import HeadLogits, HeadRequest, HostsHead
from sglang_ext.adapter.workers import captured
from sglang_ext.adapter.workers import eagle as draft_worker
from sglang_ext.adapter.workers.eagle import HeadDraftWorker

SIZES = [4, 2, 1]  # of the batches that graphs are captured for
WIDTH = 2  # rows of a request
NOTHING = (torch.zeros(0), torch.zeros(0))


class Model(HostsHead):
    """The parts of a hosted model that a worker touches."""

    algorithm = "EAGLE3"

    def __init__(self) -> None:
        super().__init__()
        self.head = self.lm_head = make_head(SPECS["slimspec"]).float()
        self.info: Any = SimpleNamespace(path="running")
        self.logits_processor: Any = SimpleNamespace(request=None)
        self.logits_processor.answering = lambda request: HeadLogits.answering(self.logits_processor, request)
        self.swapped: list[Any] = []

    def draft_step(self, batch: Any, request: HeadRequest) -> None: ...

    def layer_inputs(self, batch: Any, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        return NOTHING

    def swap(self, info: Any, tensors: Any, origins: Any) -> bool:
        self.swapped.append(info)
        return False


class Stock(torch.nn.Module):
    """SGLang's class behind `HostsHead`: a pass is its last MLP."""

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        return self._of_rows_read(self.mlp, forward_batch.hidden_TH)


class WithBody(Model, Stock):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def mlp(self, hidden_TH: Tensor) -> Tensor:
        self.rows.append(len(hidden_TH))
        return 2 * hidden_TH


class Graphs:
    """SGLang's graphs of the extend, whose only layer is the head: a capture runs the pass, a replay runs it again on
    what the static buffers hold then, and writes where the capture wrote."""

    def init(self, worker: Any) -> None:
        self.eagle_worker, self.replays, self.capture_bs = worker, {}, sorted(SIZES)
        rows = max(SIZES) * WIDTH
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(rows, dtype=torch.int64),
            hidden_states=torch.zeros(rows, H),
            select_index=torch.zeros(max(SIZES), dtype=torch.int64),
        )
        for size in SIZES:
            self.capture_one_shape(size, None)

    def capture_one_shape(self, size: int, forward: Any) -> None:
        model = self.eagle_worker.draft_runner.model
        request, head = model.logits_processor.request, model.head

        def answer(request: HeadRequest) -> None:
            hidden_BH = self.buffers.hidden_states[self.buffers.select_index[:size]]
            request.answer_with(head, hidden_BH, head.route(hidden_BH, hidden_BH, 0))

        for _ in range(3):  # two warm-ups
            answer(request)
        captured = [*request.best, *request.asked[1:]]

        def replay() -> None:
            fresh = HeadRequest(request.step, request.k)
            answer(fresh)
            for place, value in zip(captured, [*fresh.best, *fresh.asked[1:]], strict=True):
                if place is not None:  # a head that does not route
                    place.copy_(value)

        self.replays[size] = replay

    def execute(self, forward_batch: Any, select_index: Tensor) -> None:
        self.raw_bs = len(select_index)
        self.bs = min(size for size in SIZES if size >= self.raw_bs)
        self.buffers.hidden_states[: len(forward_batch.hidden_TH)] = forward_batch.hidden_TH
        self.buffers.select_index[: self.raw_bs] = select_index
        self.replays[self.bs]()


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(
        speculative_use_rejection_sampling=False, speculative_adaptive=False, speculative_adaptive_config=None
    )
    monkeypatch.setattr(draft_worker, "get_spec", lambda: found)
    monkeypatch.setattr(draft_worker, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    return found


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, spec: SimpleNamespace) -> Any:
    monkeypatch.setattr(EAGLEDraftExtendCudaGraphRunner, "__init__", Graphs.init)
    monkeypatch.setattr(EAGLEDraftExtendCudaGraphRunner, "capture_one_shape", Graphs.capture_one_shape)
    monkeypatch.setattr(EAGLEDraftExtendCudaGraphRunner, "execute", Graphs.execute)
    for name in ("draft_pp_context", "speculative_moe_backend_context", "speculative_moe_a2a_backend_context"):
        monkeypatch.setattr(captured, name, nullcontext)
    made: Any = object.__new__(HeadDraftWorker)
    made.draft_runner = SimpleNamespace(model=Model(), prefill_cuda_graph_runner="as captured")
    made.topk, made.parallel_layout, made.speculative_num_draft_tokens = 3, SimpleNamespace(tp_group=None), 4
    made.cuda_graph_runner = made.cuda_graph_runner_for_draft_extend = None
    made.draft_attn_backend = made.draft_extend_attn_backend = None
    return made
