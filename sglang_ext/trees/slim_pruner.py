"""SLiM on the tree that EAGLE-2 expands: which of its scored candidates are verified.

EAGLE-2 scores a node by the draft probabilities on its path; SLiM multiplies r of every pair of neighbours on it, from
the root's token on, and its factor for length (slim.py). B = requests.
"""

from torch import Tensor

from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.tree_prune import tree_prune
from sglang_ext.trees.base import Draft, Expansion, Pruner


class SlimPruner(Pruner):
    """Nodes are numbered as EAGLE-2 numbers its own."""

    def __init__(
        self,
        correlations: Correlations,
        *,
        length_bonus: float,
        hypotheses: int,
        draft_steps: int,
        topk: int,
        num_nodes: int,
    ) -> None:
        self.correlations, self.length_bonus, self.hypotheses = correlations, length_bonus, hypotheses
        self.draft_steps, self.topk, self.num_nodes = draft_steps, topk, num_nodes

    def prune(self, root_B: Tensor, expansion: Expansion) -> Draft:
        chosen = tree_prune(
            root_B, expansion, self.correlations, self.length_bonus, self.topk, self.draft_steps,
            self.hypotheses, self.num_nodes,
        )  # fmt: skip
        return Draft(*chosen)
