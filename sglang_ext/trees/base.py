"""What a tree builder is: from a drafter's candidates to the nodes that one pass of the target verifies.

B = requests, N = nodes of a request, the root included, T = rows, k = candidates, H = hidden size, C = all candidates
of a draft loop, P = its beam entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from rayspec_kernels.common.draft_tree import DraftTree
from rayspec_kernels.cpu.sibling_distribution import Siblings
from rayspec_kernels.tree_prune.reference import Expansion
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.settings import Settings

Embed = Callable[[Tensor], Tensor]  # the target's embedding: int64 [...] -> [..., H]


class Draft(NamedTuple):
    """Node 0 is the root, the last verified token. Parents precede their children; siblings come best first."""

    tokens_BN: Tensor  # int64
    links: DraftTree
    num_nodes_B: Tensor | None = None  # int64, used of the N; None for all


class Picked(NamedTuple):
    token_ids_Tk: Tensor  # int64
    log_p_Tk: Tensor | None  # float32; None where nobody needs them


class Pick(Protocol):
    """Takes k tokens of each row from a head."""

    def __call__(self, head: DraftHead, state_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Picked: ...


def most_likely(head: DraftHead, state_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Picked:
    """The k best tokens of each row, best first; a single one without its probability."""
    if k == 1:
        return Picked(head.best(state_TH, step, routed), None)
    proposal = head.propose(state_TH, step, k, routed)
    return Picked(proposal.token_ids_Tk, proposal.scores_Tk - proposal.log_norm_T[:, None])


class HiddenDrafter(Protocol):
    """What a tree asks of a drafter that drafts from one vector a request (`drafters.shared.last_hidden`)."""

    reads_path: ClassVar[bool]
    lm_head: DraftHead | PositionHeads

    def begin(self, hidden_TH: Tensor, num_steps: int) -> Tensor: ...

    def state(self, step: int, hidden_TH: Tensor, path_TdH: Tensor | None) -> Tensor: ...


class Proposer(ABC):
    """A tree made to fit a number of draft steps, of candidates and of nodes."""

    num_nodes: int

    @abstractmethod
    def rows_by_level(self) -> list[int]:
        """How many nodes have children at each depth that is drafted: the rows of a path-reading drafter."""

    @abstractmethod
    def candidates_by_level(self) -> list[int]:
        """How many candidates of a row the head is asked for at each depth that is drafted."""

    def siblings(self, reads_path: bool) -> Siblings | None:
        """Which nodes are drawn together: of each level one distribution, or of a drafter that reads the path one for
        each parent, in the order in which `propose` asks for them. None for a tree that cannot be drawn."""
        return None

    @abstractmethod
    def propose(
        self, drafter: HiddenDrafter, hidden_BH: Tensor, root_B: Tensor, embed: Embed, pick: Pick = most_likely
    ) -> Draft:
        """Draft for B requests. Of fixed shape, and no look at values: a graph can capture it.

        Args:
            hidden_BH: the target's hidden state of the token before the root.
            pick: takes tokens from the head; in a chain, and in a tree with `siblings`, it may draw them.
        """


class Pruner(ABC):
    """Chooses from the candidates of a drafter that expands its tree itself."""

    num_nodes: int

    @abstractmethod
    def prune(self, root_B: Tensor, expansion: Expansion) -> Draft:
        """What is verified of the expansions of B requests, whose last verified tokens are `root_B` (int64)."""


class TreeOptions(Settings):
    """Options of a kind of tree, as a checkpoint's `draft_tree` entry {kind, options} has them: a frozen dataclass."""

    kind: ClassVar[str]

    def spec(self) -> dict[str, Any]:
        """The `draft_tree` entry; inverse of `parse_draft_tree`."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


class CandidateTree(nn.Module, ABC):
    """A kind of tree with its options and tensors."""

    Options: ClassVar[type[TreeOptions]]
    options: TreeOptions

    @classmethod
    @abstractmethod
    def from_options(cls, options: Any, vocab_size: int) -> Self:
        """The tree of these options; tensors that it has are not loaded yet."""

    @property
    def kind(self) -> str:
        return self.options.kind

    def spec(self) -> dict[str, Any]:
        """The `draft_tree` entry {kind, options}."""
        return self.options.spec()

    def check(self) -> None:
        """Raise ValueError where the loaded tensors contradict each other."""

    def check_can_be_drawn(self) -> None:
        """Raise ValueError unless the nodes that it has never depend on the tokens that are drafted: whether a draw is
        verified must not depend on what was drawn."""
        raise ValueError(
            f"which nodes a draft_tree of kind {self.kind} has depends on the drafted tokens, so that they cannot be "
            "drawn; leave speculative_use_rejection_sampling out"
        )

    @abstractmethod
    def most_nodes(self, draft_steps: int, topk: int) -> int:
        """How many nodes, with the root, the tree can have within so many steps and candidates of a position."""

    def fewest_nodes(self, draft_steps: int) -> int:
        """How many nodes, with the root, must be verified of so many steps."""
        return 1

    @abstractmethod
    def fit(self, draft_steps: int, topk: int, num_nodes: int, device: torch.device) -> Proposer:
        """The tree cut to at most so many steps, candidates of a position and nodes. Raises ValueError where it cannot
        fill them."""


class PruningTree(CandidateTree):
    """A kind that can also choose from the candidates that a drafter's own loop has scored."""

    @abstractmethod
    def pruner(self, draft_steps: int, topk: int, num_nodes: int, device: torch.device) -> Pruner:
        """For a loop of so many steps with `topk` nodes in its beam and as many children of each. Raises ValueError
        where `num_nodes` has no room."""
