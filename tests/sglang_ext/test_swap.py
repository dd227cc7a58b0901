"""Live swaps around CUDA graphs: what is captured again, what is read, who stays, and what ranks tell each other."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_workers import Model
from fixture_models import DRAFTERS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch import Tensor

from sglang_ext.adapter import engine as engine_calls
from sglang_ext.adapter import ranks, swap
from sglang_ext.adapter.longest_draft import LongestDraft
from sglang_ext.adapter.models import hosted_head, sharded_head
from sglang_ext.adapter.models.hosted_head import HostsHead
from sglang_ext.adapter.ranks import RanksDiffer, on_all_ranks
from sglang_ext.adapter.requests import check_tokenized
from sglang_ext.adapter.workers import eagle as draft_worker
from sglang_ext.drafters import checkpoint
from sglang_ext.drafters.checkpoint import load_drafter, origins
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.folder_kinds import WEIGHTS
from sglang_ext.heads import DraftHead
from sglang_ext.trees.slim import SlimOptions, SlimTree


class Captured:
    """A graph runner of SGLang's, whose backend can be emptied."""

    def __init__(self) -> None:
        self.is_empty = False
        self.backend = SimpleNamespace(cleanup=lambda: setattr(self, "is_empty", True))


def test_a_swap_captures_what_holds_the_head_and_nothing_else(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = worker.cuda_graph_runner, worker.cuda_graph_runner_for_draft_extend = Captured(), Captured()
    emptied: list[bool] = []

    def capture(worker: Any) -> None:
        emptied.extend(graphs.is_empty for graphs in old)

    monkeypatch.setattr(EagleDraftWorker, "_capture_cuda_graphs", capture)
    monkeypatch.setattr(EagleDraftWorker, "init_cuda_graphs", lambda worker: pytest.fail("captured the prefills too"))
    worker.host(SimpleNamespace(path="other"), {}, {})
    worker.capture()
    assert emptied == [True, True], "the old graphs hold memory that the new ones may need"
    assert worker.draft_runner.prefill_cuda_graph_runner == "as captured"
    assert worker.refusal is None


class Asked:
    """An engine whose scheduler runs in this process; `sent`: the requests that came through to it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.tokenizer_manager, self.sent = scheduler, SimpleNamespace(), list[str]()

    def collective_rpc(self, method: str, path: str, resident: int) -> None:
        try:
            swap.swap_drafter(self.scheduler, path, resident)
        except Exception as error:
            raise AssertionError(str(error)) from None  # all that SGLang's carries of it

    def ask(self, request: str) -> None:
        check_tokenized(lambda manager, request: self.sent.append(request), self.tokenizer_manager, request)


def scheduler_of(worker: Any) -> SimpleNamespace:
    """One that is idle, on a single rank."""
    return SimpleNamespace(
        draft_worker=SimpleNamespace(draft_worker=worker),
        flush_cache=lambda: True,
        tp_group=SimpleNamespace(world_size=1),
    )


class Hosting(Model):
    """With a body that writes down what is loaded into it."""

    def __init__(self, running: str) -> None:
        super().__init__()
        self.info, self.model, self.loaded = read_info(running), torch.nn.Linear(1, 1), set[str]()
        self.origins = origins(self.info)
        self.longest = LongestDraft(steps=2, topk=1, nodes=3)

    def swap(self, info: Any, tensors: Any, origins: Any) -> bool:
        return HostsHead.swap(self, info, tensors, origins)

    def _load_body(self, tensors: Any) -> None:
        self.loaded = {name for name in tensors if not name.startswith("lm_head.")}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model asks of SGLang when it hosts another drafter."""
    monkeypatch.setattr(hosted_head, "check_target", lambda info: None)
    monkeypatch.setattr(hosted_head, "served_stop_ids", tuple)
    monkeypatch.setattr(swap, "metrics", lambda: None)
    monkeypatch.setattr(sharded_head, "get_parallel", lambda: SimpleNamespace(tp_size=1))


def tensors_read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of what is read of safetensors files from here on."""
    read: set[str] = set()

    class Reading:
        """A safetensors file."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.file = safe_open(*arguments, **options)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> Tensor:
            read.add(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(checkpoint, "safe_open", Reading)
    return read


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(("other", "shares"), [("specvocab", True), ("full", True), ("foreign", False)])
def test_a_swap_reads_no_body_that_is_there(
    other: str, shares: bool, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two heads on one base, whose folder holds the body of both, and the base itself."""
    monkeypatch.setattr(EagleDraftWorker, "_capture_cuda_graphs", lambda worker: None)
    folder = DRAFTERS[other] if shares else another_body(tmp_path / other)
    read = tensors_read(monkeypatch)
    model = worker.draft_runner.model = Hosting(str(DRAFTERS["truncated"]))
    scheduler = scheduler_of(worker)
    swap.swap_drafter(scheduler, str(folder))
    named = set(read)
    drafter, info = load_drafter(str(folder))
    assert model.info == info
    for name, tensor in model.lm_head.state_dict().items():
        torch.testing.assert_close(tensor, drafter.lm_head.state_dict()[name])
    body = {name for name in drafter.state_dict() if not name.startswith("lm_head.")}
    assert named & body == model.loaded == (set() if shares else body)


@pytest.mark.usefixtures("hosts")
def test_a_swap_makes_the_tree_of_the_longest_drafts(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EagleDraftWorker, "_capture_cuda_graphs", lambda worker: None)
    monkeypatch.setattr(hosted_head, "get_parallel", lambda: SimpleNamespace(pp_size=1))
    model = worker.draft_runner.model = Hosting(str(DRAFTERS["full"]))
    model.longest = LongestDraft(steps=2, topk=2, nodes=4)
    swap.swap_drafter(scheduler_of(worker), str(with_tree(tmp_path / "slim")))
    assert model.pruner is not None
    assert model.pruner.num_nodes == 4


def with_tree(folder: Path) -> Path:
    """The drafter `full` with a tree, whose pairs have not been counted."""
    shutil.copytree(DRAFTERS["full"], folder)
    config = json.loads((folder / "config.json").read_text())
    config["draft_tree"] = {"kind": "slim", "correlation": False}
    (folder / "config.json").write_text(json.dumps(config))
    tree = SlimTree(SlimOptions(correlation=False), config["vocab_size"])
    tensors = load_file(folder / WEIGHTS) | {f"draft_tree.{name}": t for name, t in tree.state_dict().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def another_body(folder: Path) -> Path:
    """A drafter of the same shapes."""
    shutil.copytree(DRAFTERS["full"], folder)
    tensors = load_file(folder / WEIGHTS)
    tensors["fc.weight"] += 1
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


class Swapping:
    """A worker with graphs and attention backends, which are swapped from one drafter to the next."""

    def __init__(self, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker, self.captured = worker, list[str]()
        self.errors: list[Exception] = []  # of the captures to come
        self.model = worker.draft_runner.model = Hosting(str(DRAFTERS["truncated"]))
        self.scheduler = scheduler_of(worker)
        monkeypatch.setattr(ranks, "_apart", nullcontext)  # a group of their own, which needs processes
        monkeypatch.setattr(EagleDraftWorker, "_capture_cuda_graphs", lambda _: self.capture())
        monkeypatch.setattr(EagleDraftWorker, "init_attention_backend", lambda _: self.new_backends())
        self.new_backends()
        self.capture()

    def new_backends(self) -> None:
        worker = self.worker
        worker.draft_attn_backend, worker.draft_extend_attn_backend = object(), object()
        worker.draft_runner.draft_attn_backend = worker.draft_attn_backend
        worker.draft_runner.attn_backend = worker.draft_extend_attn_backend

    def capture(self) -> None:
        self.worker.cuda_graph_runner = self.worker.cuda_graph_runner_for_draft_extend = None
        if self.errors:
            raise self.errors.pop()
        self.worker.cuda_graph_runner, self.worker.cuda_graph_runner_for_draft_extend = Captured(), Captured()
        self.captured.append(Path(self.model.info.path).name)

    @property
    def state(self) -> tuple[Any, ...]:
        w = self.worker
        runner = (w.draft_runner.draft_attn_backend, w.draft_runner.attn_backend)
        assert runner == (w.draft_attn_backend, w.draft_extend_attn_backend)
        graphs = (w.cuda_graph_runner, w.cuda_graph_runner_for_draft_extend)
        assert not any(g.is_empty for g in graphs)
        return (*runner, *graphs, self.model.lm_head, self.model.info)

    def to(self, folder: Path, resident: int = 2) -> tuple[Any, ...]:
        swap.swap_drafter(self.scheduler, str(folder), resident)
        return self.state


@pytest.mark.usefixtures("hosts")
def test_who_stays_is_swapped_in_again_as_it_was(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Swapping(worker, monkeypatch)
    first = s.state
    second = s.to(DRAFTERS["specvocab"])
    third = s.to(DRAFTERS["full"])
    assert len({id(part) for state in (first, second, third) for part in state}) == 18, "nothing is shared"
    monkeypatch.setattr(swap, "read_tensors", lambda *_: pytest.fail("it was read again"))
    for state, name in ((first, "truncated"), (third, "full"), (second, "specvocab"), (first, "truncated")):
        found = s.to(DRAFTERS[name])
        assert all(a is b for a, b in zip(found, state, strict=True))
    assert s.captured == ["truncated", "specvocab", "full"]


@pytest.mark.usefixtures("hosts")
def test_the_oldest_go_and_without_the_option_all(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Swapping(worker, monkeypatch)
    first = s.state
    second = s.to(DRAFTERS["specvocab"], resident=1)
    s.to(DRAFTERS["full"], resident=1)
    assert all(graphs.is_empty for graphs in first[2:4])
    assert not any(graphs.is_empty for graphs in second[2:4])
    s.to(DRAFTERS["truncated"], resident=0)
    assert all(graphs.is_empty for graphs in second[2:4])
    assert worker._residents == ()


@pytest.mark.usefixtures("hosts")
def test_another_body_sends_away_all_that_stand_on_the_one_before(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = Swapping(worker, monkeypatch)
    first = s.state
    s.to(DRAFTERS["specvocab"])
    s.to(another_body(tmp_path / "foreign"))
    assert all(graphs.is_empty for graphs in first[2:4])
    s.to(DRAFTERS["truncated"])
    assert s.captured == ["truncated", "specvocab", "foreign", "truncated"]
    assert {"fc.weight"} < s.model.loaded, "the body came back with it"


@pytest.mark.usefixtures("hosts")
def test_one_whose_files_have_changed_is_read_again(
    worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = Swapping(worker, monkeypatch)
    own = shutil.copytree(DRAFTERS["full"].parent, tmp_path / "drafters") / DRAFTERS["specvocab"].name
    s.to(own)
    s.to(DRAFTERS["full"])
    tensors = load_file(own / WEIGHTS)
    changed = next(name for name, t in tensors.items() if t.is_floating_point())
    tensors[changed] = tensors[changed] + 1
    save_file(tensors, own / WEIGHTS, metadata={"format": "pt"})
    s.to(own)
    torch.testing.assert_close(
        s.model.lm_head.state_dict()[changed.removeprefix("lm_head.")].float(), tensors[changed].float()
    )
    assert s.captured == ["truncated", "specvocab", "full", "specvocab"]


@pytest.mark.usefixtures("hosts")
def test_where_memory_is_short_those_that_stay_go(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s, short = Swapping(worker, monkeypatch), Exception("Capture cuda graph failed: CUDA out of memory")
    first = s.state
    s.errors = [short]
    found = s.to(DRAFTERS["specvocab"])
    assert all(graphs.is_empty for graphs in first[2:4])
    assert found[:2] == first[:2], "the backends that there were"
    assert worker.refusal is None
    assert worker._residents == ()
    s.to(DRAFTERS["full"])
    s.errors = [short] * 2
    with pytest.raises(RuntimeError, match="could not be captured in CUDA graphs"):
        s.to(DRAFTERS["truncated"])
    s.to(DRAFTERS["specvocab"])
    assert worker.refusal is None
    assert worker._residents == (), "what failed is not kept"


@pytest.mark.usefixtures("hosts")
def test_those_that_stay_go_for_another_head(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Swapping(worker, monkeypatch)
    first = s.state
    s.to(DRAFTERS["specvocab"])
    outcomes = iter([torch.OutOfMemoryError("CUDA out of memory"), None, torch.OutOfMemoryError("CUDA out of memory")])
    make = hosted_head._head_of

    def head_of(info: Any) -> DraftHead:
        error = next(outcomes)
        if error is not None:
            raise error
        return make(info)

    monkeypatch.setattr(hosted_head, "_head_of", head_of)
    found = s.to(DRAFTERS["full"])
    assert all(graphs.is_empty for graphs in first[2:4])
    worker._residents = ()
    with pytest.raises(RuntimeError, match=r"no memory for .* beside the running drafter"):
        s.to(DRAFTERS["truncated"])
    assert s.state == found, "nothing has changed"


@pytest.mark.usefixtures("hosts")
def test_of_several_ranks_none_makes_room_alone(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Swapping(worker, monkeypatch)
    monkeypatch.setattr(draft_worker, "get_parallel", lambda: SimpleNamespace(tp_size=2))
    s.errors = [Exception("Capture cuda graph failed: CUDA out of memory")]
    with pytest.raises(RuntimeError, match="could not be captured in CUDA graphs"):
        s.to(DRAFTERS["specvocab"])
    assert s.captured == ["truncated"]


@pytest.mark.usefixtures("hosts")
def test_the_running_one_is_not_captured_again(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Swapping(worker, monkeypatch)
    for resident in (0, 2):
        before = s.to(DRAFTERS["specvocab"], resident)
        assert s.to(DRAFTERS["specvocab"], resident) == before
    assert s.captured == ["truncated", "specvocab"]


@dataclass
class Ranks:
    """A group of two, of which the other says `words`, one after the other."""

    words: list[str | None]
    world_size: int = 2
    cpu_group: None = None

    def gather(self, found: list[Any], own: Any, group: None) -> None:
        other = self.words.pop(0)
        found[:] = [own, own if other == "the same" else other]


READ: list[str | None] = [None, "the same", "read"]  # it has looked the drafter up, and has to read it


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize(
    ("words", "message", "is_left"),
    [
        ([None, "the same", "here", None, None, None], None, True),  # it reads all the same, as this one does
        (["no drafter weights at /node/two"], "on tensor-parallel rank 1: no drafter weights at /node/two", True),
        ([None, "0" * 64], "the files of .* are not the same on all nodes", True),
        ([*READ, "no whole file"], "on tensor-parallel rank 1: no whole file", True),
        ([*READ, None, "out of memory"], "could not be captured .*rank 1: out of memory.*; swap in another", False),
    ],
)
def test_ranks_swap_together_or_say_that_they_did_not(
    words: list[str | None], message: str | None, is_left: bool, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = Swapping(worker, monkeypatch)
    before, s.scheduler.tp_group, left = s.state, Ranks([*words]), s.captured.copy()
    monkeypatch.setattr(torch.distributed, "all_gather_object", s.scheduler.tp_group.gather)
    with nullcontext() if message is None else pytest.raises((ValueError, RuntimeError), match=message):
        s.to(DRAFTERS["specvocab"])
    assert (worker.refusal is None) == is_left
    assert (s.captured == left) == (message is not None), "who waits in a capture for one that is not there?"
    assert (s.state[-1] is before[-1]) == (message is not None and is_left)
    assert s.scheduler.tp_group.words == [], "all ranks take part in every exchange, or wait for each other for ever"


@pytest.mark.usefixtures("hosts")
def test_this_rank_alone_fails_to_host(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Swapping(worker, monkeypatch)
    s.scheduler.tp_group = Ranks([*READ, None, None])
    monkeypatch.setattr(torch.distributed, "all_gather_object", s.scheduler.tp_group.gather)
    monkeypatch.setattr(draft_worker, "get_parallel", lambda: SimpleNamespace(tp_size=2))

    def head_of(info: Any) -> DraftHead:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(hosted_head, "_head_of", head_of)
    with pytest.raises(RuntimeError, match=r"could not be captured .*rank 0: CUDA out of memory"):
        s.to(DRAFTERS["specvocab"])
    assert worker.refusal is not None, "the other one has the new drafter"


@pytest.mark.usefixtures("hosts")
@pytest.mark.parametrize("is_own", [False, True])
def test_a_capture_that_fails_on_one_rank_alone(is_own: bool, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither serves, or takes another drafter."""
    s = Swapping(worker, monkeypatch)
    monkeypatch.setattr(draft_worker, "get_parallel", lambda: SimpleNamespace(tp_size=2))
    if is_own:
        s.errors = [Exception("Capture cuda graph failed: out of memory\nPossible solutions: none")]
    s.scheduler.tp_group = Ranks([*READ, None, None, None if is_own else "Capture cuda graph failed: out of memory"])
    monkeypatch.setattr(torch.distributed, "all_gather_object", s.scheduler.tp_group.gather)
    found = rf"could not be captured .* by all ranks \(on tensor-parallel rank {0 if is_own else 1}: "
    message = found + r"Capture cuda graph failed: out of memory\), .*; start anew, with a lower --mem-fraction-static"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            s.to(DRAFTERS["specvocab"])
        assert worker.refusal is not None
    assert s.scheduler.tp_group.words == [], "the second attempt asks nothing"
    assert s.captured == (["truncated"] if is_own else ["truncated", "specvocab"])


@pytest.mark.usefixtures("hosts")
def test_after_a_capture_that_fails_on_all_ranks_they_take_no_other(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may have got to another place in it."""
    s = Swapping(worker, monkeypatch)
    monkeypatch.setattr(draft_worker, "get_parallel", lambda: SimpleNamespace(tp_size=2))
    s.errors = [Exception("Capture cuda graph failed: out of memory")]
    s.scheduler.tp_group = Ranks([*READ, None, None, "out of memory"])
    monkeypatch.setattr(torch.distributed, "all_gather_object", s.scheduler.tp_group.gather)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"by all ranks \(.*out of memory\), .* no other swap; start anew"):
            s.to(DRAFTERS["specvocab"])
    assert worker.refusal is not None
    assert s.scheduler.tp_group.words == [], "the second attempt asks nothing"


def test_what_ranks_hear_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Any]()

    def exchange(other: str | None) -> None:
        def gather(found: list[Any], own: Any, group: None) -> None:
            told.append(own)
            found[:] = [own, other]

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)

    def work() -> None:
        raise ValueError("it does not fit")

    exchange("it does not fit")
    with pytest.raises(ValueError, match=r"^it does not fit$"):
        on_all_ranks(Ranks([]), work)
    exchange(None)
    with pytest.raises(RanksDiffer, match="rank 0: it does not fit"):
        on_all_ranks(Ranks([]), work)
    assert told == ["it does not fit"] * 2
    assert on_all_ranks(Ranks([]), lambda: 7) == 7


def test_after_a_failed_capture_every_request_is_refused_until_a_swap_succeeds(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it goes to the scheduler, which an exception would end."""
    hosting = worker.draft_runner.model = Hosting(str(DRAFTERS["truncated"]))
    monkeypatch.setattr(hosting, "swap", lambda info, tensors, origins: False)
    monkeypatch.setattr(swap, "metrics", lambda: None)
    outcomes = iter([torch.OutOfMemoryError("CUDA out of memory"), None])

    def capture(worker: Any) -> None:
        error = next(outcomes)
        if error is not None:
            raise error

    monkeypatch.setattr(EagleDraftWorker, "_capture_cuda_graphs", capture)
    engine = Asked(scheduler_of(worker))
    engine.ask("before")
    other, unfit = str(DRAFTERS["specvocab"]), "no such folder"
    with pytest.raises(ValueError, match=rf"could not swap .*passes of {other} could not be captured in CUDA graphs"):
        engine_calls.swap_drafter(engine, other)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"could not be captured .* swap in another drafter, or start anew"):
            engine.ask("while none is left")
        with pytest.raises(ValueError, match=f"could not swap the drafter to {unfit}"):  # nor is there one after this
            engine_calls.swap_drafter(engine, unfit)
    engine_calls.swap_drafter(engine, other)
    engine.ask("after")
    assert engine.sent == ["before", "after"]


def test_a_request_that_was_under_way_meets_no_graphs_that_are_gone(worker: Any) -> None:
    worker.refusal = "the draft passes of large could not be captured"
    with pytest.raises(RuntimeError, match="passes of large could not be captured"):
        worker._draft_extend_for_prefill(SimpleNamespace())


@pytest.mark.parametrize("has_graphs", [False, True])
def test_adaptive_lengths_and_swaps_exclude_each_other_where_there_are_graphs(
    worker: Any, spec: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, has_graphs: bool
) -> None:
    monkeypatch.setattr(draft_worker, "has_accelerator", lambda: has_graphs)
    worker.check_swappable()
    spec.speculative_adaptive_config = "policy.json"
    message = r"a policy \(--speculative-adaptive-config\) keep graphs of other draft lengths, which hold the running"
    with pytest.raises(ValueError, match=message) if has_graphs else nullcontext():
        worker.check_swappable()
    spec.speculative_adaptive = True
    with pytest.raises(ValueError, match=message):
        worker.check_swappable()
