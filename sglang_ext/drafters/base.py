"""What the configs and the modules of all drafter families have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

from torch import nn

from sglang_ext.drafters.stock import StockForm
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.settings import Settings, build, check_type
from sglang_ext.trees import CandidateTree

MAX_BY_NAME = {"positions": 128, "num_layers": 512, "mlp_layers": 64}  # a module each; of other sizes a tensor's side
MAX_OTHER_SIZE = 2**24


def check_sizes(config: Any, prefix: str = "") -> None:
    """Raise ValueError unless every size of a drafter's config (a dataclass) is a positive number, small enough for
    tensors of such sides to be counted."""
    for f in fields(config):
        value, most = getattr(config, f.name), MAX_BY_NAME.get(f.name, MAX_OTHER_SIZE)
        if f.type in (int, float):
            check_type(f"{prefix}{f.name}", value, f.type)
            if not (0 < value <= most if f.type is int else value > 0):
                allowed = f"in 1..{most}" if f.type is int else "above 0"
                raise ValueError(f"{prefix}{f.name} must be {allowed}, got {value}")


def check_attention(config: Any, prefix: str = "") -> None:
    """Raise ValueError for heads that do not share out, or that rotary halves do not divide."""
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if heads % shared:
        raise ValueError(
            f"{prefix}num_attention_heads ({heads}) must be a multiple of {prefix}num_key_value_heads ({shared})"
        )
    if config.head_dim % 2:
        raise ValueError(f"{prefix}head_dim must be even (rotary halves), got {config.head_dim}")


@dataclass(frozen=True, kw_only=True, repr=False)
class DrafterOptions(Settings):
    """What of a body its target does not decide: the `drafter` entry {kind, options} of a training and of a checkpoint.
    A family's own options are a subclass."""

    kind: ClassVar[str]  # the family's name
    added: ClassVar[frozenset[str]] = frozenset()  # options added later: left out of checkpoints at their default

    def entry(self) -> dict[str, Any]:
        """{kind, options}, defaults written out."""
        left_out = {f.name for f in fields(self) if f.name in self.added and getattr(self, f.name) == f.default}
        return {"kind": self.kind} | {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}

    def __repr__(self) -> str:
        return str(self.entry())


@dataclass(frozen=True, kw_only=True, repr=False)
class DrafterConfig(DrafterOptions, ABC):
    """Sizes and options of a body: a frozen dataclass. What a family is like, the rest of the project reads here.

    `Options`: the class of its options, which it inherits. `tap_layers`: the target layers whose input is tapped (HF
    `hidden_states[i]`)."""

    Options: ClassVar[type[DrafterOptions]]
    architecture: ClassVar[str]  # what `architectures` of a checkpoint names
    of_target: ClassVar[tuple[str, ...]]
    tree_kinds: ClassVar[tuple[str, ...]] = ()  # kinds of draft_tree that it takes
    takes_trees: ClassVar[str] = ""  # completes the error "does not fit a drafter of kind X, ..."
    expands_tree: ClassVar[bool] = False  # as it drafts, whatever its draft_tree
    feeds_back: ClassVar[bool] = False  # what one draft step made is what the next one reads
    reads_target: ClassVar[bool] = True  # its states, and not its tokens alone
    taps_output: ClassVar[bool] = False  # the last tap is no layer's input, but what the target's LM head reads
    stock: ClassVar[StockForm | None] = None  # the form of its checkpoint that SGLang serves without rayspec

    hidden_size: int  # that the head reads
    vocab_size: int
    max_position_embeddings: int
    tap_layers: Any  # tuple[int, ...]; None where a stock checkpoint leaves them to SGLang

    @property
    def max_draft_steps(self) -> int | None:
        """The most draft steps that it was made for; None for a drafter that goes on as long as one likes."""
        return None

    @property
    def has_cache(self) -> bool:
        """Whether a layer of it, which SGLang runs and builds with the engine, keeps keys and values of the context."""
        return True

    @classmethod
    @abstractmethod
    def from_json(cls, config: Mapping[str, Any], target_hidden: int, taps: Any) -> Self:
        """The config in a checkpoint's config.json. Raises ValueError for fields that are missing or do not fit."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The fields of config.json that describe the body; inverse of `from_json`."""

    @staticmethod
    def own_name(name: str) -> str:
        """Our name of a stored tensor."""
        return name

    def heads(self, make: Callable[[], DraftHead]) -> DraftHead | PositionHeads:
        """The drafter's head, of whatever `make` gives: one for all draft steps."""
        return make()

    @classmethod
    def check_tree(cls, kind: str, setting: str) -> None:
        """Raise ValueError for a kind of tree that drafters of this family do not take; `setting` is where it is
        asked for."""
        if kind not in cls.tree_kinds:
            way_out = f"use {setting}.kind {' or '.join(cls.tree_kinds)}" if cls.tree_kinds else f"leave {setting} out"
            raise ValueError(
                f"{setting}.kind {kind!r} does not fit a drafter of kind {cls.kind}, {cls.takes_trees}; {way_out}"
            )

    @classmethod
    def from_options(cls, options: DrafterOptions, sizes: Mapping[str, Any]) -> Self:
        """The config from its options and the target's sizes, of which those `of_target` are taken. Raises ValueError
        for sizes that do not fit."""
        return build(cls, asdict(options), "drafter", given={name: sizes[name] for name in cls.of_target})

    @property
    def options(self) -> DrafterOptions:
        return self.Options(**{f.name: getattr(self, f.name) for f in fields(self.Options)})

    def entry(self) -> dict[str, Any]:
        return self.options.entry()


class Question(NamedTuple):
    """What a head is asked at a draft position: rows of each request, candidates of each row."""

    rows: int
    candidates: int


class Drafter(nn.Module):
    """A body and its head. `draft_tree` says which candidates are verified; None where only a chain of the best is, or
    where the body expands a tree, for EAGLE-2's choice."""

    config: DrafterConfig
    lm_head: DraftHead | PositionHeads

    def __init__(
        self, config: DrafterConfig, head: DraftHead | PositionHeads, draft_tree: CandidateTree | None = None
    ) -> None:
        super().__init__()
        if draft_tree is not None:
            config.check_tree(draft_tree.kind, "draft_tree")
        self.config = config
        self.lm_head = head
        self.draft_tree = draft_tree

    @property
    def kind(self) -> str:
        return self.config.kind

    def questions(self, draft_steps: int, topk: int, num_draft_tokens: int) -> list[Question]:
        """What a draft of this size asks of the head, position by position: of a drafter that goes step by step the
        `topk` best of one row, then of `topk` rows."""
        return [Question(1, topk)] + [Question(topk, topk)] * (draft_steps - 1)
