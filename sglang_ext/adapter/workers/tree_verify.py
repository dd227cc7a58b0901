"""What SGLang verifies, from a draft of ours. B = requests, N = verified nodes of a request, V = vocabulary."""

from typing import Any, ClassVar

import torch
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from rayspec_kernels.common.draft_tree import DraftTree, full_mask_reference
from rayspec_kernels.cpu.sibling_distribution import Siblings
from sglang_ext.adapter.activation import has_accelerator
from sglang_ext.trees import Draft


class TreeVerifyInput(EagleVerifyInput):
    """A tree without a fixed number of children a node.

    `siblings`: of a tree whose nodes were drawn, in the order in which `draft_probs` [B, R, V] has the distributions.
    """

    siblings: ClassVar[Siblings | None] = None  # on the class, so that SGLang's dataclass stays as it is

    @property
    def tree_topk(self) -> int:
        return 1 if self.topk == 1 else -1

    @property
    def max_tree_depth(self) -> int:
        """Nodes of the longest path."""
        return min(self.spec_steps + 1, self.draft_token_num)


def tree_verify_input(
    batch: Any,
    draft: Draft,
    target_runner: Any,
    *,
    draft_steps: int,
    topk: int,
    probs_BRV: Tensor | None = None,
    siblings: Siblings | None = None,
) -> TreeVerifyInput:
    """SGLang's form of a draft, for the target's model runner; `probs_BRV` is what drafts were drawn from: one
    distribution a position of a chain, of a tree as its `siblings` say.

    Its width is the step's: less than was asked for where no request needs all of its nodes and no graph one width.
    """
    if draft.num_nodes_B is not None and not has_accelerator():
        draft = _without_padding(draft)
    B, N = draft.tokens_BN.shape
    tree = draft.links
    verify_input = TreeVerifyInput(
        draft_token=draft.tokens_BN.flatten(),
        custom_mask=_mask(batch, tree, target_runner.attn_backend),
        positions=(batch.seq_lens[:, None] + tree.depth_BN).flatten(),
        retrieve_index=torch.arange(B * N, device=draft.tokens_BN.device).view(B, N),
        # a static tree has views of one request's, and SGLang's kernels take no views
        retrieve_next_token=tree.first_child_BN.contiguous(),
        retrieve_next_sibling=tree.next_sibling_BN.contiguous(),
        retrieve_cum_len=None,
        spec_steps=draft_steps,
        topk=topk,
        draft_token_num=N,
        capture_hidden_mode=None,
        seq_lens_sum=None,
        seq_lens_cpu=None,
        draft_probs=probs_BRV,
    )
    if siblings is not None:
        verify_input.siblings = siblings  # type: ignore[misc]
    return verify_input


def _mask(batch: Any, tree: DraftTree, backend: Any) -> Tensor:
    """The mask as the target's attention takes it: [N, N] of each request, or [N, length + N], all True before."""
    B, N, _ = tree.mask_BNN.shape
    verify_mask = backend.verify_mask
    mode = TreeMaskMode.FULL_MASK if verify_mask is None else verify_mask.mode
    buffer = verify_mask.buffer if verify_mask is not None and verify_mask.fits(B) else None
    if mode == TreeMaskMode.QLEN_ONLY:
        if buffer is None:
            return tree.mask_BNN.flatten()
        buffer[: B * N * N] = tree.mask_BNN.flatten()
        return buffer
    if mode != TreeMaskMode.FULL_MASK:
        raise ValueError(
            f"the attention backend {type(backend).__name__} takes tree masks as {mode.name}, which rayspec's trees do "
            "not write; choose another --attention-backend"
        )
    if buffer is None:
        longest = batch.seq_lens_sum if batch.seq_lens_sum is not None else B * backend.max_context_len
        buffer = torch.empty(N * (longest + B * N), dtype=torch.bool, device=tree.mask_BNN.device)
    full_mask_reference(tree.mask_BNN, batch.seq_lens.long(), buffer)
    return buffer


def _without_padding(draft: Draft) -> Draft:
    """The draft, with as many nodes as the largest tree of the batch has. An accelerator verifies the padding instead:
    its graphs have one width, and this looks at values."""
    assert draft.num_nodes_B is not None, "asked for only where there is one"
    most = max(2, int(draft.num_nodes_B.max()))  # attention has a tree of two nodes at least
    mask_BNN, depth_BN, first_child_BN, next_sibling_BN = draft.links
    links = DraftTree(
        mask_BNN[:, :most, :most], depth_BN[:, :most], first_child_BN[:, :most], next_sibling_BN[:, :most]
    )
    return Draft(draft.tokens_BN[:, :most], links, draft.num_nodes_B)
