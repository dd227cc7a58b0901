"""CPU replacements are held against the demands of SGLang's CUDA operations."""

import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayspec_kernels.cpu.tree_verify import verify_greedy_reference
from sglang_ext.adapter.cpu.contracts import ContractBrokenError, demands
from sglang_ext.adapter.cpu.spec_ops import draft_slots, verify_tree_greedy
from sglang_ext.adapter.internals import CPU_MISSING, CPU_REPLACEMENTS

B, N, D = 2, 3, 3
TAKES_NO_TENSORS = {"skip_kv_copy_warmup", "create_decode_backend", "create_draft_extend_backend"}


def verified(**other: torch.Tensor) -> dict[str, Any]:
    """Arguments of a verification of two chains, of which the target agrees with the first draft of each."""
    chain_BN = torch.tensor([[1, 2, -1]] * B)
    return {
        "predicts": torch.zeros(B * N, dtype=torch.int32),
        "accept_index": torch.full((B, D), -1, dtype=torch.int32),
        "accept_token_num": torch.zeros(B, dtype=torch.int32),
        "candidates": torch.tensor([[5, 6, 7], [1, 2, 3]]),
        "retrieve_index": torch.arange(B * N).view(B, N),
        "retrieve_next_token": chain_BN,
        "retrieve_next_sibling": torch.full((B, N), -1),
        "target_predict": torch.tensor([[6, 9, 9], [2, 9, 9]]),
        **other,
    }


def test_what_fits_is_passed_on() -> None:
    predicts, accept_index, accepted = verify_tree_greedy(**verified())
    assert accepted.tolist() == [1, 1]
    assert accept_index.tolist() == [[0, 1, -1], [3, 4, -1]]
    assert predicts.tolist() == [6, 9, 0, 2, 9, 0]


@pytest.mark.parametrize("width", [1, D])
def test_a_root_alone_is_accepted_as_the_walk_would(width: int) -> None:
    given = verified(
        accept_index=torch.full((B, width), -1, dtype=torch.int32),
        accept_token_num=torch.full((B,), 9, dtype=torch.int32),
        retrieve_index=torch.arange(B)[:, None],
        predicts=torch.zeros(B, dtype=torch.int32),
    )
    for name in ("candidates", "target_predict"):
        given[name] = given[name][:, :1].contiguous()
    for name in ("retrieve_next_token", "retrieve_next_sibling"):
        given[name] = torch.full((B, 1), -1)
    nodes = [given[f] for f in ("candidates", "target_predict", "retrieve_next_token", "retrieve_next_sibling")]
    walked = verify_greedy_reference(*nodes, width)
    predicts, accept_index, accepted = verify_tree_greedy(**given)
    assert predicts.tolist() == walked.bonus_B.tolist() == [6, 2]
    assert accepted.tolist() == walked.num_drafts_B.tolist()
    assert accept_index[:, 0].tolist() == [0, 1]
    assert (accept_index[:, 1:] == -1).all()


@pytest.mark.parametrize(
    ("name", "spoil", "problem"),
    [
        ("retrieve_next_token", lambda x: x[:1].expand(B, -1), r"strides \(0, 1\) .* not contiguous"),
        ("target_predict", lambda x: x.T.contiguous().T, r"strides \(1, 2\)"),
        ("candidates", lambda x: x.int(), "dtype torch.int32; .* demands int64 B N"),
        ("accept_index", lambda x: x.long(), "dtype torch.int64"),
        ("predicts", lambda x: x[:-1], r"shape \[5\], where B\*N is 6"),
        ("retrieve_next_sibling", lambda x: x[:, :-1].contiguous(), r"shape \[2, 2\], where N is 3"),
        ("target_predict", lambda x: x.flatten(), r"shape \[6\]"),
        ("accept_token_num", lambda x: x.to("meta"), "device meta, while others are on cpu"),
    ],
)
def test_what_a_gpu_would_refuse_is_refused(
    name: str, spoil: Callable[[torch.Tensor], torch.Tensor], problem: str
) -> None:
    given = verified()
    verify_tree_greedy(**given)  # what is remembered of these forms is not of others
    given[name] = spoil(given[name])
    with pytest.raises(ContractBrokenError, match=f"verify_tree_greedy was given {name} with {problem}"):
        verify_tree_greedy(**given)


def test_sizes_may_be_arguments_and_tensors_may_be_left_out() -> None:
    slots = torch.zeros(8, dtype=torch.int64)
    given = [torch.tensor([0]), torch.arange(20, dtype=torch.int32).view(1, 20), torch.tensor([3]), slots, 2, 4]
    draft_slots(*given)
    assert slots.tolist() == list(range(3, 11))
    positions = torch.zeros(2, dtype=torch.int64)
    draft_slots(*given, positions=positions)
    assert positions.tolist() == [3, 3]
    with pytest.raises(ContractBrokenError, match=r"positions with shape \[3\], where B\*topk is 2"):
        draft_slots(*given, positions=torch.zeros(3, dtype=torch.int64))


def test_a_buffer_may_be_larger_and_a_view_may_be_allowed() -> None:
    @demands(x="float32 n strided", out="byte >=2*n")
    def operation(x: torch.Tensor, out: torch.Tensor) -> bool:
        return True

    every_other = torch.zeros(8)[::2]
    assert operation(every_other, torch.zeros(9, dtype=torch.uint8))
    assert operation(every_other, torch.zeros(8, dtype=torch.bool))
    with pytest.raises(ContractBrokenError, match=r"where >=2\*n is 8"):
        operation(every_other, torch.zeros(7, dtype=torch.bool))


def test_every_replaced_operation_has_a_contract() -> None:
    names = [i.replacement for i in CPU_REPLACEMENTS + CPU_MISSING if ".spec_ops." in i.replacement]
    names.append("sglang_ext.adapter.cpu.spec_ops.extend_slots")
    bare = {n.rsplit(".", 1)[1] for n in names if not hasattr(pkgutil.resolve_name(n), "__wrapped__")}
    assert bare == TAKES_NO_TENSORS
