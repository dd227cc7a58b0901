"""What the draft worker does with CUDA graphs, on graphs that are played by Python: an engine on a CPU has none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_workers import NOTHING, WIDTH, WithBody
from head_cases import SPECS, H, make_head
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch import Tensor

from sglang_ext.adapter.models import hosted_head
from sglang_ext.adapter.workers.eagle import _rows_of
from sglang_ext.adapter.workers.extend_graphs import HeadExtendGraphs
from sglang_ext.heads import DraftHead

VERIFIED = SimpleNamespace(select_index=None, num_accept_tokens=torch.tensor([1, 3]), num_tokens_per_req=3)


def expected(head: DraftHead, hidden_BH: Tensor, k: int) -> tuple[Tensor, Tensor]:
    proposal = head.propose(hidden_BH, 0, k)
    return proposal.probabilities_Tk, proposal.token_ids_Tk


def verified(hidden_BH: Tensor) -> tuple[Any, Tensor]:
    """A batch whose requests have accepted no draft: the first of each one's rows is read."""
    hidden_TH = torch.randn(len(hidden_BH), WIDTH, H)
    hidden_TH[:, 0] = hidden_BH
    batch = SimpleNamespace(hidden_TH=hidden_TH.flatten(0, 1), input_ids=torch.zeros(WIDTH * len(hidden_BH)))
    return batch, WIDTH * torch.arange(len(hidden_BH))


def test_a_replayed_extend_answers_the_heads_own_request(worker: Any) -> None:
    graphs = HeadExtendGraphs(worker)
    answers, hiddens = [], []
    for rows in (3, 1, 4):
        hiddens.append(torch.randn(rows, H))
        graphs.execute(*verified(hiddens[-1]))
        answers.append(graphs.take_answer())
        assert graphs.take_answer() is None
    for answer, hidden_BH in zip(answers, hiddens, strict=True):  # the first outlives the others
        p_Bk, ids_Bk = expected(worker.draft_runner.model.head, hidden_BH, 3)
        assert torch.equal(answer.token_ids_Tk, ids_Bk)
        torch.testing.assert_close(answer.p_Tk, p_Bk, rtol=1e-6, atol=1e-6)


def test_what_a_graph_is_padded_with_is_of_no_request(worker: Any) -> None:
    """Of a head whose rows share what they choose."""
    worker.draft_runner.model.head = make_head(SPECS["dynaspec_union"]).float()
    graphs, hidden_BH, answers = HeadExtendGraphs(worker), torch.randn(3, H), []
    for before in (torch.zeros(4, H), 9 * torch.randn(4, H)):
        graphs.execute(*verified(before))
        graphs.execute(*verified(hidden_BH))
        answers.append(graphs.take_answer())
    for first, second in zip(*answers, strict=True):
        assert torch.equal(first, second)


def test_under_rejection_sampling_nothing_is_asked(worker: Any, spec: SimpleNamespace) -> None:
    spec.speculative_use_rejection_sampling = True
    graphs = HeadExtendGraphs(worker)
    graphs.execute(*verified(torch.randn(2, H)))
    assert graphs.take_answer() is None


def test_the_first_drafts_come_from_the_graph(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.cuda_graph_runner_for_draft_extend = HeadExtendGraphs(worker)
    hidden_BH = torch.randn(2, H)

    def replay(worker: Any, batch: Any, batch_result: Any) -> None:
        worker.cuda_graph_runner_for_draft_extend.execute(*verified(hidden_BH))

    monkeypatch.setattr(EagleDraftWorker, "_draft_extend_for_decode", replay)
    result = SimpleNamespace(
        speculative_num_draft_tokens=4, next_draft_input=SimpleNamespace(), new_seq_lens=torch.tensor([5, 6])
    )
    sampling = SimpleNamespace(is_all_greedy=True)
    worker._draft_extend_for_decode(SimpleNamespace(sampling_info=sampling), result)
    p_Bk, ids_Bk = expected(worker.draft_runner.model.head, hidden_BH, 3)
    assert torch.equal(result.next_draft_input.topk_index, ids_Bk)
    torch.testing.assert_close(result.next_draft_input.topk_p, p_Bk, rtol=1e-6, atol=1e-6)


def test_rows_of_a_chain_are_kept_by_the_graph_that_reads_them() -> None:
    """A policy puts others in their place at each of its switches, which frees these."""
    rows = torch.arange(3).repeat(4, 1)
    assert _rows_of(rows, 2).data_ptr() == rows.data_ptr()
    for B in (2, 4, 6):
        found = _rows_of(rows, B)
        assert found.is_contiguous()
        assert torch.equal(found, torch.arange(3).repeat(B, 1))


@pytest.mark.parametrize(
    ("mode", "fields", "read"),
    [
        (ForwardMode.EXTEND, {"extend_seq_lens": torch.tensor([3, 1, 2])}, [2, 3, 5]),
        (
            ForwardMode.DRAFT_EXTEND_V2,
            {
                "spec_info": SimpleNamespace(
                    select_index=None, num_accept_tokens=torch.tensor([1, 3]), num_tokens_per_req=3
                )
            },
            [0, 5],
        ),
        (ForwardMode.DECODE, {}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_the_last_mlp_computes_the_rows_that_the_head_reads(mode: Any, fields: dict[str, Any], read: list[int]) -> None:
    batch: Any = object.__new__(ForwardBatch)
    vars(batch).update(forward_mode=mode, hidden_TH=torch.randn(6, H), **fields)
    model = WithBody()
    out_TH = model(NOTHING, NOTHING, batch)
    assert model.rows == [len(read)]
    assert torch.equal(out_TH[read], 2 * batch.hidden_TH[read])
    assert model.extend is None


def test_attention_of_data_parallel_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted_head, "get_parallel", lambda: SimpleNamespace(attn_dp_enabled=True))
    with pytest.raises(ValueError, match=r"--enable-dp-attention is not offered .* leave it out"):
        hosted_head.hosted_info(SimpleNamespace(_name_or_path="a drafter"), "EAGLE3")


def test_a_second_choice_of_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted_head, "get_parallel", lambda: SimpleNamespace(attn_dp_enabled=False))
    monkeypatch.setattr(hosted_head, "get_spec", lambda: SimpleNamespace(speculative_token_map="ids.pt"))
    with pytest.raises(ValueError, match=r"--speculative-token-map .* leave it out, or train a head of kind truncated"):
        hosted_head.hosted_info(SimpleNamespace(_name_or_path="a drafter"), "EAGLE")
