"""What the draft worker does with CUDA graphs, on graphs that are played by Python: an engine on a CPU has none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_workers import NOTHING, WIDTH, WithBody
from head_cases import SPECS, H, make_head
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from test_sampling import batch_info, plugins  # noqa: F401  (SGLang on a CPU)
from torch import Tensor

from sglang_ext.adapter.models import hosted_head
from sglang_ext.adapter.models.hosted_head import Answer, HeadRequest
from sglang_ext.adapter.workers.eagle import _rows_of
from sglang_ext.adapter.workers.extend_graphs import HeadExtendGraphs
from sglang_ext.adapter.workers.sampling import requested_distribution
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


def best(graphs: HeadExtendGraphs) -> Answer | None:
    """What a greedy batch is answered after a replay."""
    request = HeadRequest(0, graphs.eagle_worker.topk)
    graphs.answer(request)
    return request.best


def test_a_replayed_extend_answers_the_heads_own_request(worker: Any) -> None:
    graphs = HeadExtendGraphs(worker)
    answers, hiddens = [], []
    for rows in (3, 1, 4):
        hiddens.append(torch.randn(rows, H))
        graphs.execute(*verified(hiddens[-1]))
        answers.append(best(graphs))
        assert best(graphs) is None
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
        answers.append(best(graphs))
    for first, second in zip(*answers, strict=True):
        assert torch.equal(first, second)


def extended(worker: Any, hidden_BH: Tensor, sampling: Any) -> Any:
    """The next draft's input behind the extend after a verification, which a graph replays."""
    result = SimpleNamespace(
        speculative_num_draft_tokens=4,
        next_draft_input=SimpleNamespace(),
        new_seq_lens=torch.arange(5, 5 + len(hidden_BH)),
    )
    worker._draft_extend_for_decode(SimpleNamespace(sampling_info=sampling, hidden_BH=hidden_BH), result)
    return result.next_draft_input


@pytest.fixture
def replaying(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def replay(worker: Any, batch: Any, batch_result: Any) -> None:
        worker.cuda_graph_runner_for_draft_extend.execute(*verified(batch.hidden_BH))

    monkeypatch.setattr(EagleDraftWorker, "_draft_extend_for_decode", replay)
    return worker


def test_the_first_drafts_come_from_the_graph(replaying: Any) -> None:
    replaying.cuda_graph_runner_for_draft_extend = HeadExtendGraphs(replaying)
    hidden_BH = torch.randn(2, H)
    drafted = extended(replaying, hidden_BH, SimpleNamespace(is_all_greedy=True))
    p_Bk, ids_Bk = expected(replaying.draft_runner.model.head, hidden_BH, 3)
    assert torch.equal(drafted.topk_index, ids_Bk)
    torch.testing.assert_close(drafted.topk_p, p_Bk, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["slimspec", "truncated", "specvocab", "dynaspec", "dynaspec_request", "rdk_dynaspec"])
def test_a_replay_of_a_server_that_draws(name: str, replaying: Any, spec: SimpleNamespace) -> None:
    """Requests that draw are given the head's distribution at their temperatures and filters; where none does, nothing
    of the whole vocabulary is asked for."""
    spec.speculative_use_rejection_sampling, replaying.topk = True, 1
    model = replaying.draft_runner.model
    head = model.head = make_head(SPECS[name]).float()
    model.info = SimpleNamespace(body=SimpleNamespace(vocab_size=head.vocab_size))
    replaying.cuda_graph_runner_for_draft_extend = HeadExtendGraphs(replaying)
    hidden_BH, asked = torch.randn(3, H), []
    head.target_distribution = lambda *args: asked.append(args) or type(head).target_distribution(head, *args)

    drafted = extended(replaying, hidden_BH, SimpleNamespace(is_all_greedy=True))
    routed = head.route(hidden_BH, hidden_BH, 0)
    best_B1 = head.best(hidden_BH, 0, routed)
    assert not asked
    assert torch.equal(drafted.topk_index, best_B1)
    assert torch.equal(drafted.draft_probs, torch.zeros(3, head.vocab_size).scatter_(1, best_B1, 1.0))

    sampling = batch_info(["off", "top_k", "greedy"], 3)
    sampling.temperatures[0] = 0.5
    drafted = extended(replaying, hidden_BH, sampling)
    probs_BV = requested_distribution(head.target_distribution(hidden_BH, 0, routed, sampling.temperatures), sampling)
    torch.testing.assert_close(drafted.draft_probs, probs_BV)
    assert torch.equal(drafted.topk_index[2], best_B1[2])
    assert torch.equal(drafted.topk_p, drafted.draft_probs.gather(1, drafted.topk_index))


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
