"""Trees of one shape for every step, as Medusa and Hydra verify them; a chain is the smallest.

A node is named by its path of ranks: (0, 2) is the third best token after the best one. B = requests, N = nodes with
the root, P = nodes of a level that have children, n = nodes of the next level, d = depth, H = hidden size.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Self

import torch
from pydantic import PlainValidator
from torch import Tensor

from rayspec_kernels.common.draft_tree import DraftTree, link_tree_reference
from rayspec_kernels.cpu.sibling_distribution import Siblings
from sglang_ext.trees.base import CandidateTree, Draft, Embed, HiddenDrafter, Pick, Proposer, TreeOptions, most_likely

RankPath = tuple[int, ...]

TOPK, NODES = 10, 64  # Medusa's published trees: ten candidates a position, 63 nodes and the root


def checked_paths(paths: Iterable[Sequence[int]]) -> tuple[RankPath, ...]:
    """Raises ValueError unless every path comes once, after its own beginning."""
    checked: dict[RankPath, None] = {}
    if not isinstance(paths, Iterable) or not all(isinstance(path, Sequence) for path in paths):
        raise ValueError(f"draft_tree.paths must be a list of lists of ranks, got {paths!r}")
    for path in map(tuple, paths):
        if not path or not all(type(rank) is int and rank >= 0 for rank in path):
            raise ValueError(f"draft_tree.paths must be lists of ranks from 0 on, got {list(path)}")
        if path in checked:
            raise ValueError(f"draft_tree.paths holds {list(path)} twice")
        if len(path) > 1 and path[:-1] not in checked:
            raise ValueError(f"draft_tree.paths has {list(path)} without {list(path[:-1])} before it")
        checked[path] = None
    if not checked:
        raise ValueError("draft_tree.paths is empty; a tree has at least [0]")
    return tuple(checked)


@dataclass(frozen=True, kw_only=True)
class StaticOptions(TreeOptions):
    """`paths`: all nodes but the root, the most useful first, so that the first of them are a smaller tree."""

    kind: ClassVar[str] = "static"

    paths: Annotated[tuple[RankPath, ...], PlainValidator(checked_paths)]


class StaticTree(CandidateTree):
    """A tree whose nodes have the same places in every step."""

    Options = StaticOptions
    options: StaticOptions

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        super().__init__()
        self.options = StaticOptions(paths=checked_paths(paths))

    @classmethod
    def from_options(cls, options: StaticOptions, vocab_size: int) -> Self:
        return cls(options.paths)

    @property
    def paths(self) -> tuple[RankPath, ...]:
        return self.options.paths

    def check_can_be_drawn(self) -> None:
        """Any can, whose siblings have all ranks; `StaticProposer.siblings` looks at those that are verified."""

    def _usable(self, draft_steps: int, topk: int) -> list[RankPath]:
        return [path for path in self.paths if len(path) <= draft_steps and max(path) < topk]

    def most_nodes(self, draft_steps: int, topk: int) -> int:
        return len(self._usable(draft_steps, topk)) + 1

    def fit(self, draft_steps: int, topk: int, num_nodes: int, device: torch.device) -> StaticProposer:
        usable = self._usable(draft_steps, topk)
        if len(usable) < num_nodes - 1:
            raise ValueError(
                f"draft_tree has {len(usable) + 1} nodes within {draft_steps} draft steps and {topk} candidates of a "
                f"position, but {num_nodes} are to be verified; lower num_draft_tokens, or use a larger tree"
            )
        return StaticProposer(usable[: num_nodes - 1], device)


def read_paths(file: str | Path) -> tuple[RankPath, ...]:
    """A tree from a JSON file: a list of rank paths. Raises ValueError."""
    try:
        return checked_paths(json.loads(Path(file).expanduser().read_text()))
    except (OSError, TypeError, ValueError, RuntimeError) as error:  # RuntimeError: nested too deep, ~ of nobody
        raise ValueError(
            f"no tree in {file}: {error}; it must be a JSON list of rank paths, as [[0], [1], [0, 0]]"
        ) from error


def chain_paths(draft_steps: int) -> tuple[RankPath, ...]:
    return tuple((0,) * depth for depth in range(1, draft_steps + 1))


def greedy_paths(accuracy: Sequence[Sequence[float]], num_nodes: int) -> tuple[RankPath, ...]:
    """The tree of `num_nodes` nodes (without the root) that is expected to be accepted longest, most useful node first
    (Medusa, section 3.3.2): the node added next is the one whose path is most often right.

    Args:
        accuracy: [position][rank], how often the candidate of this rank is right; a path's is their product, as if
            positions were right independently of each other.

    Raises ValueError where there are not as many nodes.
    """
    waiting: list[tuple[float, int, RankPath]] = []  # every node whose parent is in, as (-probability, depth, path)
    chosen: list[RankPath] = []

    def add_children(path: RankPath, probability: float) -> None:
        if len(path) < len(accuracy):
            for rank, right in enumerate(accuracy[len(path)]):
                heapq.heappush(waiting, (-probability * right, len(path) + 1, (*path, rank)))

    add_children((), 1.0)
    while len(chosen) < num_nodes:
        if not waiting:
            raise ValueError(f"there are only {len(chosen)} nodes of {len(accuracy)} positions, not {num_nodes}")
        minus_probability, _, path = heapq.heappop(waiting)
        chosen.append(path)
        add_children(path, -minus_probability)
    return tuple(chosen)


@dataclass(frozen=True)
class Level:
    """The nodes of one depth; they lie side by side."""

    nodes: slice
    path_Pd: Tensor  # node numbers from the root to each of their parents
    place_n: Tensor  # which of the parents is a node's
    rank_n: Tensor
    topk: int  # candidates that some parent needs


class StaticProposer(Proposer):
    """Nodes are numbered by (depth, path)."""

    def __init__(self, paths: Iterable[RankPath], device: torch.device) -> None:
        nodes: list[RankPath] = [(), *sorted(paths, key=lambda path: (len(path), path))]
        number = {path: i for i, path in enumerate(nodes)}
        self.num_nodes = len(nodes)
        parent_1N = torch.tensor([[-1, *(number[path[:-1]] for path in nodes[1:])]], device=device)
        self.links = link_tree_reference(parent_1N, len(nodes[-1]))
        self.levels: list[Level] = []
        for depth in range(1, len(nodes[-1]) + 1):
            own = [path for path in nodes if len(path) == depth]
            parents = sorted({path[:-1] for path in own})
            self.levels.append(
                Level(
                    nodes=slice(number[own[0]], number[own[-1]] + 1),
                    path_Pd=torch.tensor([[number[p[:i]] for i in range(depth)] for p in parents], device=device),
                    place_n=torch.tensor([parents.index(path[:-1]) for path in own], device=device),
                    rank_n=torch.tensor([path[-1] for path in own], device=device),
                    topk=max(path[-1] for path in own) + 1,
                )
            )

    def rows_by_level(self) -> list[int]:
        return [len(level.path_Pd) for level in self.levels]

    def candidates_by_level(self) -> list[int]:
        return [level.topk for level in self.levels]

    def siblings(self, reads_path: bool) -> Siblings:
        """Raises ValueError where a tree leaves out a rank: a draw that is not verified changes the distribution of the
        next."""
        parents, children, distributions = [], [], []
        first_distribution = 0
        for depth, level in enumerate(self.levels):
            places, ranks = level.place_n.tolist(), level.rank_n.tolist()
            for place, path in enumerate(level.path_Pd.tolist()):
                own = [i for i, of in enumerate(places) if of == place]
                if [ranks[i] for i in own] != list(range(len(own))):
                    raise ValueError(
                        f"draft_tree has a node with children of the ranks {[ranks[i] for i in own]}; siblings can be "
                        "drawn where they have all ranks from 0 on: leave --speculative-use-rejection-sampling out, or "
                        "use another tree"
                    )
                parents.append(path[-1])
                children.append([level.nodes.start + i for i in own])
                distributions.append(first_distribution + place if reads_path else depth)
            first_distribution += len(level.path_Pd)
        most = max(map(len, children))
        device = self.levels[0].place_n.device
        padded = [[*own, *[-1] * (most - len(own))] for own in children]
        return Siblings(*(torch.tensor(x, device=device) for x in (parents, padded, distributions)))

    def propose(
        self, drafter: HiddenDrafter, hidden_BH: Tensor, root_B: Tensor, embed: Embed, pick: Pick = most_likely
    ) -> Draft:
        B = len(root_B)
        tokens_BN = root_B.new_empty((B, self.num_nodes), dtype=torch.int64)
        tokens_BN[:, 0] = root_B
        own_BKH = drafter.begin(hidden_BH, len(self.levels))
        if drafter.reads_path:
            drafter.lm_head.expect_rows(self.rows_by_level())
        for step, level in enumerate(self.levels):
            head = drafter.lm_head.at(step)
            path_TdH, hidden_TH, own_TH = None, hidden_BH, own_BKH[:, step]
            if drafter.reads_path:
                path_TdH = embed(tokens_BN[:, level.path_Pd].flatten(0, 1))
                hidden_TH, own_TH = (x.repeat_interleave(len(level.path_Pd), dim=0) for x in (hidden_TH, own_TH))
            state_TH = drafter.state(step, own_TH, path_TdH)
            routed = None
            if head.routes:
                last_TH = embed(tokens_BN[:, 0]) if path_TdH is None else path_TdH[:, -1]
                routed = head.route(last_TH, hidden_TH, step)
            picked_BPk = pick(head, state_TH, step, level.topk, routed).token_ids_Tk.view(B, -1, level.topk)
            place_n = level.place_n if drafter.reads_path else 0
            tokens_BN[:, level.nodes] = picked_BPk[:, place_n, level.rank_n]
        return Draft(tokens_BN, DraftTree(*(x.expand(B, *x.shape[1:]) for x in self.links)))
