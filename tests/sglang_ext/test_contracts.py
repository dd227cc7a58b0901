"""CPU replacements are held against the demands of SGLang's CUDA operations."""

import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from rayspec_kernels.cpu.tree_verify import verify_greedy_reference
from sglang_ext.adapter.cpu.attention import CpuAttentionBackend, CpuDraftDecodeBackend
from sglang_ext.adapter.cpu.contracts import Contract, ContractBrokenError, demands
from sglang_ext.adapter.cpu.fused_ops import cap_logits
from sglang_ext.adapter.cpu.spec_ops import draft_slots, verify_tree_greedy
from sglang_ext.adapter.internals import CPU_MISSING, CPU_REPLACEMENTS

B, N, D = 2, 3, 3
CPU = "sglang_ext.adapter.cpu"
WITHOUT_CONTRACT = {
    "spec_ops.skip_kv_copy_warmup": "takes no tensors",
    "spec_ops.create_decode_backend": "takes no tensors",
    "spec_ops.create_draft_extend_backend": "takes no tensors",
    "attention.CpuAttentionBackend": "a class, which holds each pass against a contract (below)",
    "fused_ops.clamped_swiglu": "plain torch in SGLang, too, compiled for CUDA: it takes what ours takes",
}


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


def test_rows_may_lie_apart_but_not_their_columns() -> None:
    logits_TV = torch.randn(3, 8)
    expected = 2 * torch.tanh(logits_TV[:, :6] / 2)
    torch.testing.assert_close(cap_logits(logits_TV[:, :6], 2.0), expected)
    for spoilt, problem in (
        (logits_TV[:, ::2], r"strides \(8, 2\) .* not those of contiguous rows"),
        (logits_TV.double(), r"dtype torch.float64; .* demands floating T V rows"),
        (logits_TV[0], r"shape \[8\]"),
    ):
        with pytest.raises(ContractBrokenError, match=f"cap_logits was given full_logits with {problem}"):
            cap_logits(spoilt, 2.0)


def contracts() -> dict[str, Contract | None]:
    names = {i.replacement for i in CPU_REPLACEMENTS + CPU_MISSING} | {f"{CPU}.spec_ops.extend_slots"}
    return {name: getattr(pkgutil.resolve_name(name), "contract", None) for name in names}


def test_every_replaced_operation_has_a_contract() -> None:
    bare = {name.removeprefix(f"{CPU}.") for name, contract in contracts().items() if contract is None}
    assert bare == set(WITHOUT_CONTRACT)


# where SGLang's kernel is told strides, or takes rows as they lie; every other tensor must be contiguous
NEED_NOT_BE_CONTIGUOUS = {
    ("cap_logits", "full_logits"),
    ("row_argmax", "x"),
    *(("verify_chain_sampled", name) for name in ("candidates", "uniform_samples", "target_probs", "draft_probs")),
}


def test_only_a_kernel_that_is_told_strides_takes_a_view() -> None:
    known = [contract for contract in contracts().values() if contract is not None]
    loose = {(c.operation, name) for c in known for name, demand in c.demands.items() if demand.layout is not None}
    assert loose == NEED_NOT_BE_CONTIGUOUS


NODES, BRANCHES, STEPS = 4, 2, 3


def lengths(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def batch(mode: ForwardMode, new: int, **other: Any) -> SimpleNamespace:
    """A pass of two requests with so many new tokens each."""
    of_pass = {
        "req_pool_indices": lengths(1, 0),
        "seq_lens": lengths(5, 9),
        "out_cache_loc": torch.zeros(B * new, dtype=torch.int64),
        "extend_seq_lens": lengths(new, new, dtype=torch.int32),
        "extend_prefix_lens": lengths(5 - new, 9 - new, dtype=torch.int32),
        "positions": lengths(5, 5, 9, 9),
        "spec_info": SimpleNamespace(
            draft_token_num=NODES,
            tree_topk=2,
            draft_token=torch.zeros(B * NODES, dtype=torch.int64),
            positions=torch.zeros(B * NODES, dtype=torch.int64),
            custom_mask=torch.ones(B * NODES * NODES, dtype=torch.bool),
        ),
    }
    return SimpleNamespace(forward_mode=mode, **(of_pass | other))


PASSES: dict[str, tuple[ForwardMode, int]] = {  # kind: mode, new tokens of a request
    "decode": (ForwardMode.DECODE, 1),
    "extend": (ForwardMode.EXTEND, 2),
    "verification": (ForwardMode.TARGET_VERIFY, NODES),
    "draft loop": (ForwardMode.DECODE, BRANCHES * STEPS),
}


def begin(kind: str, given: SimpleNamespace, table: torch.Tensor) -> None:
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=None,
        model_config=SimpleNamespace(context_len=table.shape[1]),
    )
    backend = CpuDraftDecodeBackend(runner, BRANCHES, STEPS) if kind == "draft loop" else CpuAttentionBackend(runner)
    backend.init_forward_metadata(given)


TABLE = torch.arange(3 * 20, dtype=torch.int32).view(3, 20)


@pytest.mark.parametrize("kind", PASSES)
def test_a_pass_that_a_gpu_would_take_is_taken(kind: str) -> None:
    begin(kind, batch(*PASSES[kind]), TABLE)
    mode, new = PASSES[kind]
    every_other = torch.zeros(2 * B * new, dtype=torch.int32)[::2]  # SGLang's store is told the stride
    begin(kind, batch(mode, new, out_cache_loc=every_other), TABLE)


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize(
    ("name", "spoil", "problem"),
    [
        ("seq_lens", lambda x: x.repeat_interleave(2)[::2], r"strides \(2,\)"),
        ("seq_lens", lambda x: x.double(), "dtype torch.float64"),
        ("req_pool_indices", lambda x: x[:1].expand(B), r"strides \(0,\)"),
        ("out_cache_loc", lambda x: x.short(), "dtype torch.int16"),
    ],
)
def test_a_pass_that_a_gpu_would_misread_is_refused(kind: str, name: str, spoil: Any, problem: str) -> None:
    given = batch(*PASSES[kind])
    setattr(given, name, spoil(getattr(given, name)))
    with pytest.raises(ContractBrokenError, match=rf"attention \({kind}\) was given {name} with {problem}"):
        begin(kind, given, TABLE)
    with pytest.raises(ContractBrokenError, match=r"req_to_token with dtype torch.int64"):
        begin(kind, batch(*PASSES[kind]), TABLE.long())


@pytest.mark.parametrize(
    ("kind", "name", "value", "problem"),
    [
        ("decode", "out_cache_loc", torch.zeros(3, dtype=torch.int64), r"shape \[3\], where B is 2"),
        ("extend", "extend_seq_lens", lengths(2, 2, 2), r"shape \[3\], where B is 2"),
        ("extend", "extend_prefix_lens", lengths(3, 0, 7, 0)[::2], r"strides \(2,\)"),
        ("draft loop", "positions", lengths(5, 9), r"shape \[2\], where B\*W is 4"),
        ("draft loop", "out_cache_loc", torch.zeros(4, dtype=torch.int64), r"where B\*W\*n is 12"),
    ],
)
def test_sizes_of_a_pass(kind: str, name: str, value: torch.Tensor, problem: str) -> None:
    with pytest.raises(ContractBrokenError, match=f"given {name} with .*{problem}"):
        begin(kind, batch(*PASSES[kind], **{name: value}), TABLE)


@pytest.mark.parametrize(
    ("name", "spoil", "problem"),
    [
        ("custom_mask", lambda x: x[:-1], r"shape \[31\], where >=B\*N\*N is 32"),
        ("custom_mask", lambda x: x.float(), "dtype torch.float32"),
        ("custom_mask", lambda x: x.repeat_interleave(2)[::2], r"strides \(2,\)"),
        ("draft_token", lambda x: x[:-1], r"where B\*N is 8"),
        ("positions", lambda x: x.int(), "dtype torch.int32"),
    ],
)
def test_what_is_verified_is_what_a_gpu_takes(name: str, spoil: Any, problem: str) -> None:
    given = batch(*PASSES["verification"])
    setattr(given.spec_info, name, spoil(getattr(given.spec_info, name)))
    with pytest.raises(ContractBrokenError, match=f"given {name} with .*{problem}"):
        begin("verification", given, TABLE)


def test_a_mask_may_be_larger_than_what_is_read_of_it() -> None:
    given = batch(*PASSES["verification"])
    given.spec_info.custom_mask = torch.ones(100, dtype=torch.bool)
    begin("verification", given, TABLE)
