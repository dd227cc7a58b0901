"""A head that tensor-parallel ranks share answers as the whole one."""

from types import SimpleNamespace

import pytest
import torch
from head_cases import SPECS, H, V, make_head
from torch import Tensor

from sglang_ext.adapter.models import sharded_head
from sglang_ext.adapter.models.sharded_head import ShardedHead, shared_over_ranks
from sglang_ext.heads import DraftHead

SHARED = {
    "full": SPECS["full"],
    "slimspec": SPECS["slimspec"],
    "truncated": SPECS["truncated"],
    "smaller_than_k": {**SPECS["truncated"], "size": 5},
}
WHOLE = ["truncated_by_step", "specvocab", "dynaspec", "coral", "rdk_full"]


class Ranks:
    """All ranks in one process: every rank is asked twice, at first to hear what it sends."""

    def __init__(self, whole: DraftHead, ranks: int) -> None:
        self.sent: dict[int, Tensor] = {}
        self.ranks = ranks
        self.heads = []
        for rank in range(ranks):
            shard = whole.shard(rank, ranks)
            assert shard is not None
            self.heads.append(ShardedHead(whole, shard, lambda x, rank=rank: self.gather(rank, x)))

    def gather(self, rank: int, x: Tensor) -> Tensor:
        self.sent[rank] = x
        return torch.cat([self.sent.get(other, x) for other in range(self.ranks)], dim=-1)

    def ask(self, method: str, *arguments: object) -> list[object]:
        self.sent.clear()
        for head in self.heads:
            getattr(head, method)(*arguments)
        return [getattr(head, method)(*arguments) for head in self.heads]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SHARED)
def test_every_rank_answers_as_the_whole_head(name: str, ranks: int) -> None:
    whole = make_head(SHARED[name])
    shared, hidden_TH = Ranks(whole, ranks), torch.randn(6, H, generator=torch.Generator().manual_seed(3))
    stored = sum(sum(p.numel() for p in head.part.parameters()) for head in shared.heads)
    down = H * SPECS["slimspec"]["rank"] if name == "slimspec" else 0
    assert stored == sum(p.numel() for p in whole.parameters()) + (ranks - 1) * down, "no row is there twice"
    for k in (1, 3, 5):
        expected = whole.propose(hidden_TH, 0, k)
        for found in shared.ask("propose", hidden_TH, 0, k):
            assert torch.equal(found.token_ids_Tk, expected.token_ids_Tk)
            torch.testing.assert_close(found.probabilities_Tk, expected.probabilities_Tk)
    for method, arguments in {
        "best": (hidden_TH, 0),
        "target_distribution": (hidden_TH, 0, None, torch.full((6, 1), 0.7)),
        "target_logits": (hidden_TH, 0),
    }.items():
        expected = getattr(whole, method)(*arguments)
        for found in shared.ask(method, *arguments):
            torch.testing.assert_close(found, expected)
    for head in shared.heads:
        assert torch.equal(head.scored(hidden_TH), whole.scored(hidden_TH)), "by all ranks together"


@pytest.mark.parametrize("name", WHOLE)
def test_heads_that_are_more_than_rows_stay_whole(name: str) -> None:
    assert make_head(SPECS[name]).shard(0, 2) is None


def test_small_heads_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(tp_size=2, tp_rank=1, attn_dp_enabled=False)
    monkeypatch.setattr(sharded_head, "get_parallel", lambda: parallel)
    head = make_head(SPECS["full"])
    assert shared_over_ranks(head) is head
    monkeypatch.setattr(sharded_head, "MIN_SAVED_BYTES", 0)
    shared = shared_over_ranks(head)
    assert isinstance(shared, ShardedHead)
    assert (shared.first_id, shared.rows, shared.part.weight.shape) == (V // 2, [26, 27], (27, H))
    parallel.attn_dp_enabled = True
    assert shared_over_ranks(head) is head
