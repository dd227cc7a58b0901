"""One head a draft position, as Medusa's heads have them, where other drafters have one for all positions."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import nn

from sglang_ext.heads.base import DraftHead


class PositionHeads(nn.Module):
    """Heads of one kind with the same options; the tensors of position i are `<i>.<name>`."""

    def __init__(self, heads: Sequence[DraftHead]) -> None:
        super().__init__()
        for i, head in enumerate(heads):
            self.add_module(str(i), head)

    def __iter__(self) -> Iterator[DraftHead]:
        return cast(Iterator[DraftHead], self.children())

    def at(self, step: int) -> DraftHead:
        return cast(DraftHead, self.get_submodule(str(step)))

    @property
    def kind(self) -> str:
        return self.at(0).kind

    @property
    def routes(self) -> bool:
        return self.at(0).routes

    def spec(self) -> dict[str, Any]:
        """The `draft_head` entry of each of them."""
        return self.at(0).spec()

    def quantize(self, is_loaded: bool = True) -> None:
        for head in self:
            head.quantize(is_loaded)

    def expect_rows(self, rows_by_step: Sequence[int]) -> None:
        """As `DraftHead.expect_rows`: `step` counts the draft's positions in each of them."""
        for head in self:
            head.expect_rows(rows_by_step)

    def pack(self) -> None:
        for head in self:
            head.pack()

    def check(self, stop_ids: Iterable[int] = ()) -> None:
        """Raise ValueError as `DraftHead.check`, for the first head that has a fault."""
        stop_ids = tuple(stop_ids)
        for head in self:
            head.check(stop_ids)

    def fewest_candidates(self, draft_steps: int) -> int:
        return self.at(0).fewest_candidates(draft_steps)
