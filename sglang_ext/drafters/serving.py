"""Which speculative algorithms of SGLang serve a drafter family."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Serving:
    """`chain`: SGLang's name of the algorithm that serves one branch. `trees`: of the algorithm for each kind of
    draft_tree, None for the tree that the drafter expands itself.

    `algorithm`: the class behind these names, `module:Class`; None where they are SGLang's own. `worker`: a name for
    the worker of an engine in which drafters of any such family can take each other's place; None where the body is a
    model of SGLang's, which is built with the engine. `drafts_in_turn`: whether a shorter chain is the beginning of a
    longer one; False where its drafts are made of each other. `is_adaptive`: whether SGLang's
    `--speculative-adaptive` changes the length of its chains.
    """

    chain: str
    trees: Mapping[str | None, str]
    algorithm: str | None = None
    worker: str | None = None
    drafts_in_turn: bool = True
    is_adaptive: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all algorithms that serve the family."""
        return tuple(dict.fromkeys((self.chain, *self.trees.values())))

    def tree_kinds(self, algorithm: str) -> tuple[str | None, ...]:
        """The kinds of draft_tree that one of its algorithms serves; empty where it serves chains alone."""
        return tuple(kind for kind, name in self.trees.items() if name == algorithm)
