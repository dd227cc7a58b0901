"""How much of a draft the target verifies: a chain, or a tree."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

SUFFIX = re.compile(r"(?P<name>.+)@(?:(?P<chain>chain)|(?P<topk>\d+)x(?P<nodes>\d+))")


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """`topk`: candidates of a draft position, 1 for a chain. `num_draft_tokens`: verified nodes with the root; None for
    a chain, which has draft_steps + 1."""

    topk: int = 1
    num_draft_tokens: int | None = None

    @property
    def label(self) -> str:
        return "chain" if self.topk == 1 else f"{self.topk}x{self.num_draft_tokens}"

    def verified(self, draft_steps: int) -> int:
        """Nodes of a step, with the root."""
        return self.num_draft_tokens or draft_steps + 1

    def problem(self, draft_steps: Sequence[int]) -> tuple[object, str] | None:
        """(wrong num_draft_tokens, what is allowed), or None where the shape is possible at every draft length."""
        if self.topk == 1:
            is_chain = self.num_draft_tokens is None or {self.num_draft_tokens} == {s + 1 for s in draft_steps}
            allowed = "unset for a chain (topk=1), which verifies draft_steps + 1 tokens"
            return None if is_chain else (self.num_draft_tokens, allowed)
        if self.num_draft_tokens is None:
            return None, "given for a tree (topk > 1)"
        # what the fewest draft forwards with `topk` branches can propose, and the root
        most = 1 + self.topk + (min(draft_steps) - 1) * self.topk**2
        allowed = f"in 2..{most} for topk={self.topk} and draft_steps={min(draft_steps)}"
        return None if 2 <= self.num_draft_tokens <= most else (self.num_draft_tokens, allowed)


CHAIN = DraftShape()


def split_shape(drafter: str) -> tuple[str, DraftShape | None]:
    """Name or folder of an entry of `drafters`, and its own shape: `full@chain`, `full@8x32` (8 candidates, 32 nodes);
    None for that of the sweep. Raises ValueError for a tree of one candidate."""
    found = SUFFIX.fullmatch(drafter)
    if found is None:
        return drafter, None
    if found["chain"]:
        return found["name"], CHAIN
    topk, nodes = int(found["topk"]), int(found["nodes"])
    if topk < 2:
        raise ValueError(
            f"drafters: {drafter!r} is a tree of {topk} candidate(s); at least 2, or {found['name']}@chain"
        )
    return found["name"], DraftShape(topk=topk, num_draft_tokens=nodes)
