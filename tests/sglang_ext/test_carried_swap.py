"""Live swaps of drafters that draft from one vector a request: what is captured again, and what is read."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from carried_workers import SIZES, Played, batch_of, draft_of, eager_draft_of, equal, replayed, serving
from head_cases import SPECS, H
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_last_hidden import PATHS, TARGET, save
from test_swap import Asked, scheduler_of, tensors_read

from sglang_ext.adapter import engine as engine_calls
from sglang_ext.adapter import swap
from sglang_ext.adapter.models.sharded_head import ShardedHead
from sglang_ext.adapter.workers import last_hidden
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.hydra import HydraDrafter
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.trees.static import StaticTree


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
    engine = Asked(scheduler_of(worker))
    engine.ask("before")
    Played.errors = [torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.raises(ValueError, match=r"the draft passes of .*other could not be captured in CUDA graphs"):
        engine_calls.swap_drafter(engine, str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"could not be captured .* swap in another drafter, or start anew"):
        engine.ask("while none is left")
    with pytest.raises(RuntimeError, match="could not be captured in CUDA graphs"):  # one that was under way
        worker._draft_extend_for_prefill(SimpleNamespace(), None, None)
    engine_calls.swap_drafter(engine, str(tmp_path / "other"))
    engine.ask("after")
    assert engine.sent == ["before", "after"]
    draft_of(worker, batch_of(2))
    assert replayed(worker) == [2]


@pytest.mark.usefixtures("serves")
def test_without_memory_for_both_the_running_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "one", "medusa", SPECS["full"])
    save(tmp_path / "other", "hydra", SPECS["slimspec"])
    worker = serving(tmp_path / "one")
    engine, before = Asked(scheduler_of(worker)), draft_of(worker, batch_of(2))

    def to(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(HydraDrafter, "to", to)
        with pytest.raises(
            ValueError,
            match=r"no memory for .*other beside the running drafter.*5 GiB\); start anew with it, or with a",
        ):
            engine_calls.swap_drafter(engine, str(tmp_path / "other"))
    engine.ask("after")
    assert equal(draft_of(worker, batch_of(2)), before)
    assert Played.captures == len(SIZES)
    engine_calls.swap_drafter(engine, str(tmp_path / "other"))


@pytest.mark.usefixtures("serves")
@pytest.mark.parametrize("tokens", [1, 3])
def test_what_a_prefill_carries_is_no_memory_of_its_graph(tokens: int, tmp_path: Path) -> None:
    """SGLang's selection gives the graph's own output back where each request has one new token."""
    save(tmp_path / "one", "medusa", SPECS["full"])
    worker = serving(tmp_path / "one")
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, batch_size=lambda: 2, extend_lens=[tokens] * 2, seq_lens=torch.tensor([4, 5])
    )
    output_TH = torch.randn(2 * tokens, H)
    expected = output_TH[[tokens - 1, 2 * tokens - 1]].clone()
    carried = worker._draft_extend_for_prefill(batch, output_TH, torch.tensor([1, 2])).hidden_states
    output_TH.fill_(torch.nan)
    assert torch.equal(carried, expected)


def family(folder: Path) -> set[str]:
    """A base, another tree on all of its tensors, other heads on its body, and a stranger; the names of the heads'."""
    drafter = save(folder / "base", "hydra", SPECS["full"])
    drafter.draft_tree = StaticTree([*PATHS[:-1], (2,)])
    save_drafter(folder / "tree", drafter, TARGET, share_with=folder / "base")
    for tensor in drafter.lm_head.state_dict().values():
        tensor += 1.0
    save_drafter(folder / "heads", drafter, TARGET, share_with=folder / "base")
    save(folder / "foreign", "hydra", SPECS["slimspec"])
    return {name for name in drafter.state_dict() if name.startswith("lm_head.")}


@pytest.mark.usefixtures("serves")
def test_a_swap_reads_nothing_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, worker = family(tmp_path), serving(tmp_path / "base")
    for name, expected in (("tree", set()), ("heads", heads), ("base", heads), ("foreign", None)):
        before = {id(tensor) for tensor in worker.drafter.state_dict(keep_vars=True).values()}
        with monkeypatch.context() as patch:
            read = tensors_read(patch)
            swap.swap_drafter(scheduler_of(worker), str(tmp_path / name))
        stored, info = load_drafter(tmp_path / name)
        assert worker.info == info
        assert read == (set(stored.state_dict()) if expected is None else expected)
        found = worker.drafter.state_dict(keep_vars=True)
        for tensor, value in stored.state_dict().items():
            torch.testing.assert_close(found[tensor], value, rtol=0, atol=0, msg=tensor)
            assert (id(found[tensor]) in before) == (tensor not in read), "in memory once"
        assert equal(draft_of(worker, batch_of(2)), eager_draft_of(worker, batch_of(2)))


@pytest.mark.usefixtures("serves")
def test_heads_that_ranks_share_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has no tensor of theirs that is the file's."""

    def shared(heads: PositionHeads) -> PositionHeads:
        shards = [(head, head.shard(0, 1)) for head in heads]
        return PositionHeads([ShardedHead(head, shard, lambda x: x) for head, shard in shards if shard is not None])

    monkeypatch.setattr(last_hidden, "all_shared_over_ranks", shared)
    heads, worker = family(tmp_path), serving(tmp_path / "base")
    read = tensors_read(monkeypatch)
    swap.swap_drafter(scheduler_of(worker), str(tmp_path / "tree"))
    assert read == heads
    found = draft_of(worker, batch_of(2))
    monkeypatch.setattr(last_hidden, "all_shared_over_ranks", lambda heads: heads)
    assert equal(found, draft_of(serving(tmp_path / "tree"), batch_of(2)))


@pytest.mark.usefixtures("serves")
def test_one_that_runs_is_neither_read_nor_captured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family(tmp_path)
    worker = serving(tmp_path / "base")
    drafter, graphs = worker.drafter, worker.graphs[3]
    with monkeypatch.context() as patch:
        patch.setattr(swap, "read_tensors", lambda *_: pytest.fail("it was read again"))
        swap.swap_drafter(scheduler_of(worker), str(tmp_path / "base"))
    assert (worker.drafter, worker.graphs[3]) == (drafter, graphs)
    save(tmp_path / "base", "hydra", SPECS["slimspec"])  # other files in its place are read
    swap.swap_drafter(scheduler_of(worker), str(tmp_path / "base"))
    assert worker.drafter.lm_head.kind == "slimspec"


@pytest.mark.usefixtures("serves")
def test_a_drafter_that_does_not_fit_leaves_what_it_would_have_shared(tmp_path: Path) -> None:
    family(tmp_path)
    worker = serving(tmp_path / "base")
    expected, tree = draft_of(worker, batch_of(2)), tmp_path / "tree" / "config.json"
    config = json.loads(tree.read_text())
    config["draft_tree"]["paths"] = [[0]]
    tree.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="draft_tree has 2 nodes within 3 draft steps"):
        swap.swap_drafter(scheduler_of(worker), str(tmp_path / "tree"))
    assert equal(draft_of(worker, batch_of(2)), expected)
    assert worker.refusal is None
