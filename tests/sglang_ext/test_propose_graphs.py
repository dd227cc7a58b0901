"""CUDA graphs of drafting from one carried vector; and that what is captured could be: with tensors of a GPU that have
no values."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from carried_workers import NODES, Played, batch_of, draft_of, eager_draft_of, equal, made, replayed
from head_cases import H
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase
from test_last_hidden import EMBED_VH
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayspec_kernels.common.draft_tree import DraftTree
from rayspec_kernels.slim_posterior.correlations import Correlations
from sglang_ext.adapter.shortlists import Shortlists
from sglang_ext.adapter.workers import last_hidden, propose_graphs
from sglang_ext.adapter.workers.propose_graphs import ProposeGraphs
from sglang_ext.heads import DraftHead
from sglang_ext.trees import Proposer
from sglang_ext.trees.slim import SlimProposer
from sglang_ext.trees.static import StaticProposer

NAMES = ["medusa", "medusa-chain", "medusa-slim", "hydra", "hydra-chain", "hydra++", "specformer"]
SHARED = "medusa-shared"  # whose rows share their candidates


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("name", NAMES)
def test_a_replay_drafts_what_the_eager_pass_does(name: str) -> None:
    """In whatever batch: padded to the next captured size, and eagerly beyond the last."""
    worker = made(name)
    worker._capture_cuda_graphs()
    width = worker.drafter.config.hidden_size
    batches = [batch_of(B, width) for B in (4, 1, 3, 2, 5)]
    drafts = [draft_of(worker, batch) for batch in batches]
    assert replayed(worker) == [4, 1, 4, 2]
    assert worker._specialized_graph_memory_usage == {"draft_decode": 1}
    for batch, found in zip(batches, drafts, strict=True):  # the first outlive the replays of the others
        assert equal(found, eager_draft_of(worker, batch))


@pytest.mark.usefixtures("asked")
def test_a_batch_does_not_depend_on_what_was_replayed_before_it() -> None:
    """Where rows share their candidates, those that only fill up are seen, too: they are zeros."""
    worker = made(SHARED)
    worker._capture_cuda_graphs()
    draft_of(worker, batch_of(4))
    batch = batch_of(3)
    found_BN = worker.draft(batch).draft_token.view(3, NODES)
    filled, spec_info = batch_of(4), batch.spec_info
    filled.spec_info.hidden_states = torch.cat([spec_info.hidden_states, torch.zeros(1, H)])
    filled.spec_info.bonus_tokens = torch.cat([spec_info.bonus_tokens, torch.zeros(1, dtype=torch.int32)])
    assert torch.equal(found_BN, eager_draft_of(worker, filled)[0].view(4, NODES)[:3])


def test_without_padding_only_the_captured_sizes_are_replayed(asked: SimpleNamespace) -> None:
    asked.graph.disable_cuda_graph_padding = True
    worker = made("hydra")
    worker._capture_cuda_graphs()
    for B in (3, 2):
        draft_of(worker, batch_of(B))
    assert replayed(worker) == [2]


@pytest.mark.usefixtures("asked")
def test_where_graphs_are_off_none_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, disabled, expected in (("cuda", False, True), ("cuda", True, False), ("cpu", False, False)):
        monkeypatch.setattr(propose_graphs, "get_device", lambda own=device: SimpleNamespace(device=own))
        off = {(Phase.DECODE, Backend.DISABLED): disabled}
        monkeypatch.setattr(propose_graphs, "check_cuda_graph_backend", lambda *asked, off=off: off[asked])
        assert propose_graphs.has_graphs() == expected
    monkeypatch.setattr(last_hidden, "has_graphs", lambda: False)
    worker = made("medusa")
    worker._capture_cuda_graphs()
    assert worker.graphs == {}
    assert Played.captures == 0


def test_drawn_batches_go_eagerly(asked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_hidden, "draw_drafts", lambda q_TV, *drawn: (q_TV, q_TV.argmax(-1, keepdim=True), None))
    asked.speculative_use_rejection_sampling = True
    worker = made("hydra-chain")
    worker._capture_cuda_graphs()
    assert worker.draft(batch_of(2, is_all_greedy=False)).draft_probs.shape == (2, 3, len(EMBED_VH))
    assert replayed(worker) == []
    assert worker.draft(batch_of(2)).draft_probs is None
    assert replayed(worker) == [2]


@pytest.mark.usefixtures("asked")
def test_every_draft_length_of_a_policy_has_graphs_of_its_own() -> None:
    """SGLang asks for them with the worker at that length; at none there is no draft."""
    worker = made("medusa-chain")
    for steps in (3, 0, 1):
        worker.speculative_num_steps, worker.speculative_num_draft_tokens = steps, steps + 1
        worker._capture_cuda_graphs()
    assert list(worker.graphs) == [3, 1]
    assert worker._specialized_graph_memory_usage == {"draft_decode": 2}
    for steps in (3, 1):
        worker.speculative_num_steps, worker.speculative_num_draft_tokens = steps, steps + 1
        found = draft_of(worker, batch_of(2))
        assert worker.graphs[steps]._backend.replayed == [2]
        assert found[0].shape == (2 * (steps + 1),)
        assert equal(found, eager_draft_of(worker, batch_of(2)))


@pytest.mark.usefixtures("asked")
def test_a_server_that_cannot_capture_says_what_to_do() -> None:
    worker = made("medusa")
    Played.errors = [torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.raises(RuntimeError, match=r"(?s)capturing the drafting failed: CUDA out.*--mem-fraction-static"):
        worker._capture_cuda_graphs()


class OnTheDevice(TorchDispatchMode):
    """Refuses what a stream that is captured refuses: copies between host and device. (Reading a value, and a shape
    that follows from values, the mode below refuses.)"""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, output)):
            # a number is handed to a kernel by value
            if isinstance(tensor, Tensor) and tensor.device.type != "cuda" and tensor.dim():
                raise AssertionError(f"{function} of a tensor on {tensor.device}")
        return output


def on_device(x: Tensor) -> Tensor:
    """Without values."""
    return torch.empty_like(x, device="cuda")


def module_on_device(module: nn.Module) -> None:
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(on_device(parameter), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = on_device(buffer)


def proposer_on_device(proposer: Proposer) -> None:
    if isinstance(proposer, SlimProposer):
        proposer.correlations = Correlations(*map(on_device, proposer.correlations))
        return
    assert isinstance(proposer, StaticProposer)
    proposer.links = DraftTree(*map(on_device, proposer.links))
    proposer.levels = [
        replace(
            level,
            path_Pd=on_device(level.path_Pd),
            place_n=on_device(level.place_n),
            rank_n=on_device(level.rank_n),
        )
        for level in proposer.levels
    ]


class Watched(Played):
    """Captures as CUDA does: what it may not, is refused."""

    def capture_one(self, key: Any, forward: Callable[[], Any]) -> None:
        with OnTheDevice():
            self.passes[key.size] = forward, forward()


@pytest.fixture
def without_values(asked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of a GPU without values, with which reading one (a wait for the device) or a shape that follows from
    values raises. Operations have their kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(propose_graphs, "FullCudaGraphBackend", Watched)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def moved(worker: Any) -> Any:
    runner = worker.target_worker.model_runner
    runner.device = "cuda"
    for module in (worker.drafter, runner.model.get_input_embeddings()):
        module_on_device(module)
    for proposer in worker.proposers.values():
        proposer_on_device(proposer)
    return worker


@pytest.mark.parametrize("name", [*NAMES, SHARED])
def test_what_is_captured_reads_no_values_and_stays_on_the_device(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("asked")
    worker = made(name)
    request.getfixturevalue("without_values")
    moved(worker)._capture_cuda_graphs()
    (graphs,) = worker.graphs.values()
    for size, (_, (tokens_BN, _, num_nodes_B)) in graphs._backend.passes.items():
        assert (tokens_BN.shape, tokens_BN.device.type) == ((size, worker.longest.nodes), "cuda")
        assert (num_nodes_B is not None) == (name == "medusa-slim")
    assert list(graphs._backend.passes) == [4, 2, 1]


@pytest.mark.parametrize("head", ["dynaspec", "dynaspec_request", "dynaspec_union", "coral", "rdk_dynaspec"])
def test_what_heads_score_is_counted_without_a_wait(head: str, request: pytest.FixtureRequest) -> None:
    """Noted in what is captured, and added up behind it."""
    request.getfixturevalue("asked")
    worker = made("hydra", head)
    request.getfixturevalue("without_values")
    shortlists, noted = Shortlists(3, NODES, "cuda"), []
    for part in worker.drafter.modules():
        if isinstance(part, DraftHead):
            part.noted = shortlists.noted_PBR
            part.note = lambda *scored, part=part: noted.append(DraftHead.note(part, *scored))  # type: ignore[method-assign]
    moved(worker)._capture_cuda_graphs()
    assert len(noted) == 3 * 3, "each graph at each position"
    with OnTheDevice():
        shortlists.clear()
        shortlists.add(3)


@pytest.mark.usefixtures("without_values")
@pytest.mark.parametrize(
    ("read", "seen"),
    [
        (lambda root_B: root_B.max().item(), "_local_scalar_dense"),
        (lambda root_B: root_B[root_B > 0], "aten.nonzero"),
        (lambda root_B: torch.tensor([1, 2], device="cuda"), "tensor on cpu"),
        (lambda root_B: root_B.cpu(), "tensor on cpu"),
    ],
    ids=["a_value", "a_shape", "to_the_device", "to_the_host"],
)
def test_what_must_not_be_captured_is_seen(read: Callable[[Tensor], Any], seen: str) -> None:
    runner: Any = SimpleNamespace(device="cuda", dtype=torch.float32, gpu_id=0)
    with pytest.raises((RuntimeError, AssertionError), match=seen):
        ProposeGraphs(runner, H, lambda hidden_BH, root_B: read(root_B))
