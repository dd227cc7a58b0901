"""What drafters share that draft from one vector a request. It is the target's last hidden state: Medusa, Hydra, and
BPD as their chain; or (SpecFormer) what a layer of their own has made of several.

T = rows, H = hidden size of the target, d = tokens of a path.

h_t is the target's hidden state of token x_t, after its final norm: what its own LM head reads. By then the target has
already named x_{t+1}, the root of every draft. Draft position i (from 0) predicts x_{t+2+i}. Such a drafter has no
cache and no layer that SGLang would run, and all positions can be drafted from one h_t.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from sglang_ext.drafters.options import DrafterOptions, check_sizes
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.trees import CandidateTree


@dataclass(frozen=True, kw_only=True)
class LastHiddenConfig(DrafterOptions):
    """`positions`: how many tokens ahead it can draft. `shared_head`: one vocabulary projection for all positions
    instead of one each. The other sizes are the target's."""

    hidden_size: int
    vocab_size: int
    positions: int = 4
    shared_head: bool = False
    max_position_embeddings: int = 2048

    tap_layers: ClassVar[tuple[int, ...]] = ()
    of_target: ClassVar[tuple[str, ...]] = ("hidden_size", "vocab_size", "max_position_embeddings")

    def __post_init__(self) -> None:
        check_sizes(self, "drafter.")

    @classmethod
    def from_json(cls, config: Mapping[str, Any], target_hidden: int, taps: tuple[int, ...]) -> Self:
        """The fields of a checkpoint's config.json. Raises ValueError for those that are missing or do not fit."""
        if taps:
            raise ValueError(f"rayspec.target.tap_layers must be empty for this drafter, got {list(taps)}")
        missing = [name for name in (*cls.of_target, "drafter") if config.get(name) is None]
        if missing:
            raise ValueError(f"config.json has no '{missing[0]}'")
        if config["hidden_size"] != target_hidden:
            raise ValueError(f"hidden_size ({config['hidden_size']}) must equal the target's ({target_hidden})")
        options = {name: value for name, value in config["drafter"].items() if name != "kind"}
        return cls.from_options(options, {name: config[name] for name in cls.of_target})

    def to_json(self) -> dict[str, Any]:
        return {
            # SGLang reads a config of every drafter; a Llama without layers costs it no cache
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.hidden_size,
            "num_hidden_layers": 0,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": self.hidden_size,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "drafter": self.options(),
        }

    def heads(self, make: Callable[[], DraftHead]) -> DraftHead | PositionHeads:
        """The drafter's heads, of whatever `make` gives."""
        return make() if self.shared_head else PositionHeads([make() for _ in range(self.positions)])


class LastHiddenDrafter(nn.Module, ABC):
    """`lm_head` projects the state of a position to the vocabulary; `draft_tree` says which candidates are verified,
    None where only a chain of the best is."""

    kind: ClassVar[str]
    Config: ClassVar[type[LastHiddenConfig]] = LastHiddenConfig
    reads_path: ClassVar[bool]  # whether a position's state depends on the tokens drafted before it

    def __init__(
        self, config: LastHiddenConfig, head: DraftHead | PositionHeads, draft_tree: CandidateTree | None = None
    ) -> None:
        super().__init__()
        if draft_tree is not None and self.reads_path and not draft_tree.serves_paths:
            raise ValueError(
                f"draft_tree of kind '{draft_tree.kind}' needs all candidates before it has a path, but a drafter of "
                f"kind '{self.kind}' reads the path; use draft_tree.kind 'static'"
            )
        self.config = config
        self.lm_head = head
        self.draft_tree = draft_tree

    def begin(self, hidden_TH: Tensor, num_steps: int) -> Tensor:
        """What each position of a draft reads of the one vector of each row, [T, num_steps, H]; made once a draft."""
        return hidden_TH[:, None].expand(-1, num_steps, -1)

    @abstractmethod
    def state(self, step: int, hidden_TH: Tensor, path_TdH: Tensor | None) -> Tensor:
        """What the head of a draft position reads, [T, H].

        Args:
            hidden_TH: what `begin` gives this position: for most the target's last hidden state itself.
            path_TdH: embeddings of the d = step + 1 tokens from the root on that are drafted before this position;
                None where `reads_path` is false.
        """

    def state_flops(self, step: int) -> int:
        """FLOPs of the state of one row, two per multiplication and addition."""
        layers = [m for part in self.parts(step) for m in part.modules() if isinstance(m, nn.Linear)]
        return 2 * sum(layer.weight.numel() for layer in layers)

    @abstractmethod
    def parts(self, step: int) -> list[nn.Module]:
        """The modules that `state` of a draft position runs through."""
