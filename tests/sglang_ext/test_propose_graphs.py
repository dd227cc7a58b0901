"""CUDA graphs of drafting from one carried vector, played by Python, as a CPU has none; and that what is captured could
be: with tensors of a GPU that have no values."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_specformer
import torch
from head_cases import SPECS, H
from test_last_hidden import EMBED_VH, PATHS, make_drafter, save
from test_swap import scheduler_of
from test_tree_slim import make_tree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayspec_kernels.common.draft_tree import DraftTree
from rayspec_kernels.slim_posterior.correlations import Correlations
from sglang_ext.adapter import engine as engine_calls
from sglang_ext.adapter import swap
from sglang_ext.adapter.requests import check_tokenized
from sglang_ext.adapter.workers import captured, last_hidden, propose_graphs
from sglang_ext.adapter.workers.context import ContextDraftWorker
from sglang_ext.adapter.workers.last_hidden import CarriedDrafting, LastHiddenDraftWorker
from sglang_ext.adapter.workers.propose_graphs import ProposeGraphs
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.trees import Proposer
from sglang_ext.trees.slim import SlimProposer
from sglang_ext.trees.static import StaticProposer, StaticTree

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
    worker.speculative_num_steps = worker.most_steps = steps
    worker.speculative_num_draft_tokens = worker.most_nodes = nodes
    worker.parallel_layout, worker._specialized_graph_memory_usage = SimpleNamespace(tp_group=None), {}
    return worker


def made(name: str) -> Any:
    """A worker with a drafter, before its graphs are captured."""
    worker: Any
    if name == "specformer":
        worker = worker_of(ContextDraftWorker, 3, 1, 4)
        worker._draft_with(SimpleNamespace(path=name), test_specformer.make())
        return worker
    family, _, rest = name.partition("-")
    drafter = make_drafter(family, SPECS["dynaspec_union" if rest == "shared" else "slimspec"])
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
    for cuda, disabled, expected in ((True, False, True), (True, True, False), (False, False, False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(propose_graphs, "check_cuda_graph_backend", lambda *asked, off=disabled: off)
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


@pytest.fixture
def serves(asked: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker asks of SGLang when it hosts another drafter."""
    monkeypatch.setattr(TargetInfo, "check_served_with", lambda *served: None)
    monkeypatch.setattr(last_hidden, "served_target", lambda taps: None)
    monkeypatch.setattr(last_hidden, "served_stop_ids", tuple)
    monkeypatch.setattr(swap, "metrics", lambda: None)


def serving(folder: Path) -> Any:
    worker = worker_of(LastHiddenDraftWorker, 3, 4, NODES)
    worker._host(swap.read_info(folder), swap.read_tensors(swap.read_info(folder)))
    worker._capture_cuda_graphs()
    return worker


@pytest.mark.usefixtures("serves")
def test_a_swap_captures_anew(tmp_path: Path) -> None:
    save(tmp_path / "one", "medusa", SPECS["full"])
    save(tmp_path / "other", "hydra", SPECS["slimspec"])
    worker = serving(tmp_path / "one")
    old, before = worker.graphs[3], eager_draft_of(worker, batch_of(2))
    swap.swap_drafter(scheduler_of(worker), str(tmp_path / "other"))
    assert old._backend.passes == {}, "the old graphs hold memory that the new ones may need"
    assert Played.captures == 2 * len(SIZES)
    found = draft_of(worker, batch_of(2))
    assert replayed(worker) == [2]
    assert equal(found, eager_draft_of(worker, batch_of(2)))
    assert not equal(found, before), "the two drafters differ"
    assert worker._specialized_graph_memory_usage == {"draft_decode": 1}, "that of the old ones is free again"


@pytest.mark.usefixtures("serves")
def test_after_a_failed_capture_every_request_is_refused_until_a_swap_succeeds(tmp_path: Path) -> None:
    save(tmp_path / "one", "medusa", SPECS["full"])
    save(tmp_path / "other", "medusa", SPECS["slimspec"])
    worker = serving(tmp_path / "one")
    scheduler = scheduler_of(worker)

    def collective_rpc(method: str, path: str, resident: int) -> None:
        try:
            swap.swap_drafter(scheduler, path, resident)
        except Exception as error:
            raise AssertionError(str(error)) from None  # all that SGLang's carries of it

    engine = SimpleNamespace(collective_rpc=collective_rpc, tokenizer_manager=SimpleNamespace())
    sent: list[str] = []

    def ask(request: str) -> None:
        check_tokenized(lambda manager, request: sent.append(request), engine.tokenizer_manager, request)

    ask("before")
    Played.errors = [torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.raises(ValueError, match=r"the draft passes of .*other could not be captured in CUDA graphs"):
        engine_calls.swap_drafter(engine, str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"could not be captured .* swap in another drafter, or start anew"):
        ask("while none is left")
    with pytest.raises(RuntimeError, match="could not be captured in CUDA graphs"):  # one that was under way
        worker._draft_extend_for_prefill(SimpleNamespace(), None, None)
    engine_calls.swap_drafter(engine, str(tmp_path / "other"))
    ask("after")
    assert sent == ["before", "after"]
    draft_of(worker, batch_of(2))
    assert replayed(worker) == [2]


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
        assert (tokens_BN.shape, tokens_BN.device.type) == ((size, worker.most_nodes), "cuda")
        assert (num_nodes_B is not None) == (name == "medusa-slim")
    assert list(graphs._backend.passes) == [4, 2, 1]


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
