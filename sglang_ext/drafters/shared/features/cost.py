"""What a verify step costs a drafter of one decoder layer over features."""

from dataclasses import dataclass

from sglang_ext.drafters.counting import DecoderCost, StepShape, head_cost, step_by_step_flops
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads


@dataclass(frozen=True, kw_only=True)
class FeatureCost:
    """`params`: body and head, without the token embedding, which the drafter takes from its target. `body_bytes`:
    without the head. `fuse_flops`: of making a row's first feature of the target's states. `head`: shapes.
    """

    params: int
    body_bytes: int
    fuse_flops: int
    layer: DecoderCost
    head: DraftHead | PositionHeads

    def rows(self, shape: StepShape) -> list[int]:
        """Rows that the head is asked about at each draft position."""
        return shape.rows

    def drafting(self, shape: StepShape, keys: float) -> float:
        """FLOPs of one step: the drafter extends by every verified token, scores the last of them, and makes
        draft_steps - 1 further forwards of `topk` rows with their scores."""
        fused = shape.verified * self.fuse_flops
        return step_by_step_flops(shape, keys, self.layer, self.head) + fused

    def read_bytes(self, shape: StepShape, embedding_bytes: int) -> float:
        """Bytes read in one step. As VocabTrim counts, the token embedding is part of the body, at every forward."""
        return shape.draft_steps * (self.body_bytes + embedding_bytes) + head_cost(self.head, shape.rows, shape).bytes
