"""What a draft of ours becomes for SGLang: masks in every form that its attention backends ask for, and links that its
verification on CUDA takes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask, tree_mask_numel
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_ext.adapter.cpu.spec_ops import verify_tree_greedy
from sglang_ext.adapter.workers.tree_verify import TreeVerifyInput, tree_verify_input
from sglang_ext.trees import Draft
from sglang_ext.trees.base import DraftTree
from sglang_ext.trees.static import StaticProposer

PATHS = [(0,), (1,), (0, 0)]  # a root with two children, the first of which has one
LENGTHS = torch.tensor([4, 6])
B, N, CONTEXT = len(LENGTHS), len(PATHS) + 1, 16
TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
SEEN = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)


def made(verify_mask: VerifyMask | None) -> TreeVerifyInput:
    """As a static tree hands its draft over."""
    links = StaticProposer(PATHS, torch.device("cpu")).links
    draft = Draft(TOKENS, DraftTree(*(x.expand(B, *x.shape[1:]) for x in links)))
    backend = SimpleNamespace(verify_mask=verify_mask, max_context_len=CONTEXT)
    batch = SimpleNamespace(seq_lens=LENGTHS, seq_lens_sum=int(LENGTHS.sum()))
    runner: Any = SimpleNamespace(attn_backend=backend)
    return tree_verify_input(batch, draft, runner, draft_steps=2, topk=2)


def mask_of(mode: TreeMaskMode, dtype: torch.dtype) -> VerifyMask:
    buffer = torch.zeros(tree_mask_numel(mode, B + 1, N, CONTEXT), dtype=dtype)
    return VerifyMask(buffer=buffer, mode=mode, max_bs=B + 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8], ids=["bool", "uint8_as_of_triton"])
@pytest.mark.parametrize("mode", [TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY], ids=["full", "tree_only"])
def test_the_mask_is_written_into_the_buffer_of_the_backend(mode: TreeMaskMode, dtype: torch.dtype) -> None:
    own = mask_of(mode, dtype)
    given = made(own).custom_mask
    assert given is own.buffer
    read = 0
    for length in LENGTHS.tolist():
        prefix = length if mode == TreeMaskMode.FULL_MASK else 0
        rows = given[read : read + N * (prefix + N)].view(N, prefix + N)
        assert bool(rows[:, :prefix].all())
        assert torch.equal(rows[:, prefix:].bool(), SEEN)
        read += rows.numel()


def test_without_a_buffer_the_mask_is_one_of_this_batch() -> None:
    assert made(None).custom_mask.dtype == torch.bool
    assert made(VerifyMask(torch.empty(0), TreeMaskMode.QLEN_ONLY, 0)).custom_mask.view(B, N, N)[1].equal(SEEN)


def test_two_requests_with_one_tree_are_verified_as_on_a_gpu() -> None:
    """The replacement refuses what the CUDA operation does."""
    given = made(mask_of(TreeMaskMode.FULL_MASK, torch.uint8))
    target_BN = torch.tensor([[2, 4, 0, 9], [7, 0, 9, 0]])
    predicts, path_BD, accepted_B = verify_tree_greedy(
        torch.zeros(B * N, dtype=torch.int32),
        torch.full((B, given.max_tree_depth), -1, dtype=torch.int32),
        torch.zeros(B, dtype=torch.int32),
        given.draft_token.view(B, N),
        given.retrieve_index,
        given.retrieve_next_token,
        given.retrieve_next_sibling,
        target_BN,
    )
    assert accepted_B.tolist() == [2, 1]
    assert path_BD.tolist() == [[0, 1, 3], [4, 6, -1]]
    assert predicts[path_BD[0]].tolist() == [2, 4, 9]
    assert given.positions.view(B, N).tolist() == [[4, 5, 5, 6], [6, 7, 7, 8]]
