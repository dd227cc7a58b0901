"""A head that tensor-parallel ranks share answers as the whole one."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from head_cases import SPECS, STEPS, H, V, make_head
from test_last_hidden import POSITIONS, embed, make_drafter, rows
from torch import Tensor

from rayspec_kernels.common.quantized import FORMATS
from sglang_ext.adapter.longest_draft import LongestDraft
from sglang_ext.adapter.models import context, sharded_head
from sglang_ext.adapter.models.sharded_head import ShardedHead, shared_over_ranks
from sglang_ext.adapter.workers import last_hidden
from sglang_ext.drafters.shared.last_hidden import LastHiddenDrafter
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.trees import CandidateTree
from sglang_ext.trees.slim import SlimOptions, SlimTree
from sglang_ext.trees.static import StaticTree, chain_paths

SHARED = {
    **{name: SPECS[name] for name in ("full", "full_biased", "slimspec", "truncated", "truncated_by_step")},
    "smaller_than_k": {**SPECS["truncated"], "size": 5},
}
NARROW = {"full": SPECS["full"], "slimspec": {**SPECS["slimspec"], "rank": 32}, "by_step": SPECS["truncated_by_step"]}
WHOLE = ["specvocab", "dynaspec", "coral", "rdk_full"]
WIDE = 2 * 64  # columns of matrices in fewer bits: two groups


class Ranks:
    """All ranks of `whole`, each in a thread of its own when they are asked."""

    def __init__(self, whole: DraftHead, ranks: int) -> None:
        self.sent: list[Tensor] = [torch.empty(0)] * ranks
        self.meet = threading.Barrier(ranks, timeout=60)
        self.heads = [self.head_of(whole, rank) for rank in range(ranks)]

    def head_of(self, whole: DraftHead, rank: int) -> ShardedHead:
        shard = whole.shard(rank, len(self.sent))
        assert shard is not None
        return ShardedHead(whole, shard, partial(self.gather, rank))

    def gather(self, rank: int, x: Tensor) -> Tensor:
        self.sent[rank] = x
        self.meet.wait()
        gathered = torch.cat(self.sent, dim=-1)
        self.meet.wait()
        return gathered

    def ask(self, method: str, *arguments: object) -> list[Any]:
        return self.each(lambda rank: getattr(self.heads[rank], method)(*arguments))

    def each(self, answer: Callable[[int], Any]) -> list[Any]:
        """Of every rank."""
        with ThreadPoolExecutor(len(self.sent)) as threads:
            return list(threads.map(answer, range(len(self.sent))))


def check_answers(whole: DraftHead, shared: Ranks, hidden_TH: Tensor, step: int, has_ties: bool = False) -> None:
    """Of every rank those of the whole head, for which torch's top-k leaves the order of equal scores open."""
    for k in (1, 3, 5):
        expected = whole.propose(hidden_TH, step, k)
        for found in shared.ask("propose", hidden_TH, step, k):
            torch.testing.assert_close(found.scores_Tk, expected.scores_Tk)
            torch.testing.assert_close(found.probabilities_Tk, expected.probabilities_Tk)
            assert has_ties or torch.equal(found.token_ids_Tk, expected.token_ids_Tk)
            of_ids_Tk = whole.target_logits(hidden_TH, step).gather(1, found.token_ids_Tk)
            torch.testing.assert_close(found.scores_Tk, of_ids_Tk)
            assert all(len(row.unique()) == k for row in found.token_ids_Tk)
    for method, arguments in {
        "best": (hidden_TH, step),
        "target_distribution": (hidden_TH, step, None, torch.full((len(hidden_TH), 1), 0.7)),
        "target_logits": (hidden_TH, step),
    }.items():
        expected = getattr(whole, method)(*arguments)
        for found in shared.ask(method, *arguments):
            torch.testing.assert_close(found, expected)
    for head in shared.heads:
        assert torch.equal(head.scored(hidden_TH, step), whole.scored(hidden_TH, step)), "by all ranks together"
        assert head.fewest_candidates(step + 1) == whole.fewest_candidates(step + 1)


def stored_bytes(head: DraftHead) -> int:
    return sum(t.nbytes for name, t in head.state_dict().items() if name != "ids")


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SHARED)
def test_every_rank_answers_as_the_whole_head(name: str, ranks: int) -> None:
    whole = make_head(SHARED[name])
    if name == "full_biased":
        torch.nn.init.normal_(whole.bias, generator=torch.Generator().manual_seed(4))
    shared, hidden_TH = Ranks(whole, ranks), torch.randn(6, H, generator=torch.Generator().manual_seed(3))
    down = whole.down.nbytes if name == "slimspec" else 0
    stored = sum(stored_bytes(head.part) for head in shared.heads)
    assert stored == stored_bytes(whole) + (ranks - 1) * down, "no row is there twice"
    for step in STEPS:
        check_answers(whole, shared, hidden_TH, step)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("name", NARROW)
def test_heads_in_fewer_bits(name: str, weight_format: str, is_packed: bool) -> None:
    """A row keeps its values and its scales, those of groups of its columns included."""
    spec = {**NARROW[name], "weight_format": weight_format, "group_size": 64}
    draw = torch.Generator().manual_seed(5)
    whole = make_head(spec, torch.randn(131, WIDE, generator=draw))
    whole.quantize()
    shared, hidden_TH = Ranks(whole, 3), torch.randn(6, WIDE, generator=draw)
    down = stored_bytes(whole.down) if name == "slimspec" else 0
    assert sum(stored_bytes(head.part) for head in shared.heads) == stored_bytes(whole) + 2 * down
    if is_packed:
        for head in (whole, *shared.heads):
            head.pack()
    for step in STEPS[:3]:
        check_answers(whole, shared, hidden_TH, step, has_ties=is_packed)  # packed ones answer in bfloat16


def test_equal_scores_of_a_list_by_frequency() -> None:
    """The first of the list comes first, whatever its id."""
    whole = make_head(SPECS["truncated_by_step"])
    whole.weight.data[:] = 1
    whole.weight.data[0] = 0  # id 0
    shared = Ranks(whole, 3)
    for step in STEPS:
        for found in shared.ask("best", torch.ones(2, H), step):
            assert found.tolist() == whole.best(torch.ones(2, H), step).tolist() == [[int(whole.ids[1])]] * 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_of_each_list_all_ranks_have_as_much(ranks: int) -> None:
    shards = [make_head(SPECS["truncated_by_step"]).shard(rank, ranks) for rank in range(ranks)]
    for step in STEPS:
        sizes = {shard.head.size_at(step) for shard in shards if shard is not None}
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("name", WHOLE)
def test_heads_that_are_more_than_rows_stay_whole(name: str) -> None:
    assert make_head(SPECS[name]).shard(0, 2) is None


def test_small_heads_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(tp_size=2, tp_rank=1, attn_dp_enabled=False)
    monkeypatch.setattr(sharded_head, "get_parallel", lambda: parallel)
    monkeypatch.setattr(LongestDraft, "of_server", lambda: LongestDraft(POSITIONS, 1, POSITIONS + 1))
    head = make_head(SPECS["full"])
    assert shared_over_ranks(head) is head
    monkeypatch.setattr(sharded_head, "MIN_SAVED_BYTES", 0)
    shared = shared_over_ranks(head)
    assert isinstance(shared, ShardedHead)
    assert torch.equal(shared.part.weight, head.weight[1::2])
    assert shared.share == (1, 2, (V,))
    parallel.attn_dp_enabled = True
    assert shared_over_ranks(head) is head


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is that rank, and no head is too small."""
    parallel = SimpleNamespace(tp_size=2, tp_rank=1, attn_dp_enabled=False)
    monkeypatch.setattr(sharded_head, "get_parallel", lambda: parallel)
    monkeypatch.setattr(LongestDraft, "of_server", lambda: LongestDraft(POSITIONS, 1, POSITIONS + 1))
    monkeypatch.setattr(sharded_head, "MIN_SAVED_BYTES", 0)


def of_rank(drafter: LastHiddenDrafter, ranks: list[Ranks], rank: int) -> LastHiddenDrafter:
    """As it is there."""
    own = copy(drafter)
    own._modules = dict(drafter._modules)
    heads = [each.heads[rank] for each in ranks]
    own.lm_head = heads[0] if len(heads) == 1 else PositionHeads(heads)
    return own


TREES: dict[str, tuple[CandidateTree, int, int]] = {  # with the candidates of a row, and nodes
    "chain": (StaticTree(chain_paths(POSITIONS)), 1, POSITIONS + 1),
    "static": (StaticTree([(0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 1)]), 3, 7),
    "slim": (SlimTree(SlimOptions(correlation=False), V), 3, 7),
}


@pytest.mark.parametrize("shared_head", [False, True])
@pytest.mark.parametrize(
    ("kind", "tree"), [("medusa", "chain"), ("medusa", "static"), ("medusa", "slim"), ("hydra", "static")]
)
def test_every_rank_drafts_as_the_whole_drafter(kind: str, tree: str, shared_head: bool) -> None:
    drafter = make_drafter(kind, SPECS["truncated_by_step"], shared_head=shared_head)
    ranks = [Ranks(head, 3) for head in ([drafter.lm_head] if shared_head else drafter.lm_head)]
    kept, topk, num_nodes = TREES[tree]
    proposer = kept.fit(POSITIONS, topk, num_nodes, torch.device("cpu"))

    def draft(drafter: LastHiddenDrafter) -> Any:
        with torch.no_grad():
            return proposer.propose(drafter, *rows(5), embed)

    expected = draft(drafter)
    for found in ranks[0].each(lambda rank: draft(of_rank(drafter, ranks, rank))):
        assert torch.equal(found.tokens_BN, expected.tokens_BN)
        assert all(torch.equal(*both) for both in zip(found.links, expected.links, strict=True))


def no_check(*arguments: Any) -> None: ...


@pytest.mark.usefixtures("second_of_two")
@pytest.mark.parametrize("shared_head", [False, True])
@pytest.mark.parametrize("has_model", [False, True])
def test_drafters_that_draft_from_one_vector_share_their_heads(
    has_model: bool, shared_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of SpecFormer and Hydra++ with a model of SGLang's, those of the others without one."""
    drafter = make_drafter("medusa", shared_head=shared_head)
    whole = [drafter.lm_head] if shared_head else list(drafter.lm_head)
    weights = drafter.state_dict()
    info: Any = SimpleNamespace(path="new", target=SimpleNamespace(check_served_with=no_check))
    for module, names in {
        context: ("check_replaces", "check_loaded"),
        last_hidden: ("check_tensors", "check_loaded", "served_target"),
    }.items():
        monkeypatch.setattr(module, "served_stop_ids", tuple)
        for name in names:
            monkeypatch.setattr(module, name, no_check)
    if has_model:
        monkeypatch.setattr(context, "_apart", lambda info: (drafter, None))
        model: Any = object.__new__(context.ContextModel)
        model.__dict__.update(info=info, self_attn=SimpleNamespace(qkv_proj=torch.nn.Linear(1, 1)))
        assert model.checked(info, weights, {}) is drafter
    else:
        monkeypatch.setattr(last_hidden, "empty_drafter", lambda info: drafter)
        worker: Any = object.__new__(last_hidden.LastHiddenDraftWorker)
        worker.device, worker.topk, worker.longest = "cpu", 1, LongestDraft(POSITIONS, 1, POSITIONS + 1)
        worker.target_worker = SimpleNamespace(model_runner=SimpleNamespace(dtype=torch.float32))
        worker._host(info, weights, {})
        assert worker.drafter is drafter
    found = [drafter.lm_head] if shared_head else list(drafter.lm_head)
    for own, all_of_it in zip(found, whole, strict=True):
        assert isinstance(own, ShardedHead)
        assert torch.equal(own.part.weight, all_of_it.weight[1::2])
