"""The options of a draft head, as a `draft_head` entry {kind: ..., options} of YAML and of a checkpoint has them.

An entry is parsed once (`parse_head` of heads/__init__.py); what is handed on is its config. A config is checked by
itself when it is parsed, and against the drafter that it is for by `check_sizes`. H = hidden size, V = vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Self

from torch import Tensor

from rayspec_kernels.common.quantized import FORMATS, GROUP_SIZES
from sglang_ext.settings import Settings, one_of


@dataclass(frozen=True, kw_only=True, repr=False)
class HeadConfig(Settings):
    """What the options of all kinds have in common.

    `weight_format`: int8, fp8 or int4 for matrices stored in fewer bits (activations stay), None for plain ones;
    `group_size`: how many columns share a scale of int4 (fewer where a matrix is narrower).
    `inference_options` are the options that need no other tensors: a trained head takes other values for them as it is.
    """

    kind: ClassVar[str]
    inference_options: ClassVar[frozenset[str]] = frozenset({"weight_format", "group_size"})
    added: ClassVar[frozenset[str]] = frozenset()  # options added later: left out of checkpoints at their default

    weight_format: Annotated[str, one_of(FORMATS, or_absent=True)] | None = None
    group_size: Annotated[int, one_of(GROUP_SIZES)] = 64

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        """Raise ValueError for options that do not fit a head over so many tokens that reads vectors of this size."""
        for name, size in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")

    def check_artifacts(self, artifacts: Mapping[str, Tensor], vocab_size: int) -> None:
        """Raise ValueError where the head cannot be made of these, before anything is trained; most need none."""

    def complete(self, artifacts: Mapping[str, Tensor]) -> Self:
        """The same with what it leaves to its artifacts, such as how many tokens a calibration chose to keep; most
        leave them nothing. Raises ValueError where the artifacts do not say."""
        return self

    @property
    def uses_states(self) -> bool:
        """Whether the head is made of what it meets on answers: `hidden_moment`, `token_share`, `states`."""
        return False

    @property
    def taken_over(self) -> tuple[str, ...]:
        """The parameters that a new head copies from the rows it is made of, and training may freeze."""
        return ()

    @property
    def gives_rows(self) -> bool:
        """Whether heads of other kinds are made of its rows: one of each token, in floating point."""
        return False

    @property
    def starts_at_random(self) -> bool:
        """Whether the head is of no use before it was trained."""
        return False

    def spec(self) -> dict[str, Any]:
        """The `draft_head` entry {kind, options}, as JSON has it; inverse of `parse_head`."""
        left_out = {"weight_format", "group_size"} if self.weight_format is None else set()
        left_out |= {f.name for f in fields(self) if f.name in self.added and getattr(self, f.name) == f.default}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        return {"kind": self.kind} | {name: _as_json(value) for name, value in own.items()}

    def __repr__(self) -> str:
        return str({name: value for name, value in self.spec().items() if value is not None})


def _as_json(value: Any) -> Any:
    if isinstance(value, HeadConfig):
        return value.spec()
    return list(value) if isinstance(value, tuple) else value
