"""What a drafter's tree would accept of the target's greedy answers, without a server.

B = draft positions of a sequence, N = nodes of a tree with the root, L = tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters import family
from sglang_ext.drafters.base import Drafter
from sglang_ext.trees import Draft, Proposer


@dataclass(frozen=True)
class TreeAcceptance:
    """`tau`: tokens of a verify step from the positions that decoding would really stop at. `nodes`: verified in a step
    with the root, mean over them, padding left out."""

    tau: float
    nodes: float
    steps: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure_tree(
    drafter: Drafter,
    proposer: Proposer,
    target: FrozenTarget,
    answers: AnswerSet,
    *,
    draft_steps: int,
) -> TreeAcceptance:
    """Greedy decoding along the greedy answers. Raises ValueError if there are none long enough."""
    try:
        return _measured(drafter, proposer, target, answers, draft_steps)
    finally:
        drafter.lm_head.expect_rows((1,))  # the proposer has told it the rows of this tree


def _measured(
    drafter: Drafter, proposer: Proposer, target: FrozenTarget, answers: AnswerSet, draft_steps: int
) -> TreeAcceptance:
    carried = family(drafter.kind).training.carried
    emitted = nodes = steps = 0
    for n in (answers.temperature_N == 0).nonzero().squeeze(1).tolist():
        first, length = int(answers.prompt_length_N[n]), int(answers.length_N[n])
        ids_L = answers.token_ids_NL[n, :length].long().to(target.device)
        # the first answer token comes from the prompt's own pass; a root has draft_steps answer tokens behind it
        root_B = torch.arange(first, length - draft_steps, device=target.device)
        if not len(root_B):
            continue
        hidden_BH = carried(drafter, target, ids_L[None])[0][0, root_B - 1]
        draft = proposer.propose(drafter, hidden_BH, ids_L[root_B], target.embed)
        accepted_B = accepted_drafts(draft, ids_L, root_B).tolist()
        nodes_B = [proposer.num_nodes] * len(root_B) if draft.num_nodes_B is None else draft.num_nodes_B.tolist()
        place = 0
        while place < len(accepted_B):
            emitted, nodes, steps = emitted + 1 + accepted_B[place], nodes + nodes_B[place], steps + 1
            place += 1 + accepted_B[place]
    if not steps:
        raise ValueError(
            f"no greedy answer of {answers.name} is as long as {draft_steps + 1} tokens; raise held_out.answer_tokens"
        )
    return TreeAcceptance(emitted / steps, nodes / steps, steps)


def accepted_drafts(draft: Draft, ids_L: Tensor, root_B: Tensor) -> Tensor:
    """Length [B] of the longest path of each tree that the sequence goes along; `root_B` is where the root stands."""
    depth_BN, mask_BNN = draft.links.depth_BN, draft.links.mask_BNN
    right_BN = draft.tokens_BN == ids_L[root_B[:, None] + depth_BN]
    path_is_right_BN = ~(mask_BNN & ~right_BN[:, None, :]).any(dim=2)
    if draft.num_nodes_B is not None:
        path_is_right_BN &= torch.arange(depth_BN.shape[1], device=depth_BN.device) < draft.num_nodes_B[:, None]
    return torch.where(path_is_right_BN, depth_BN, 0).amax(dim=1)
