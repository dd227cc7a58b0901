"""The options that a drafter kind offers, as the `drafter` entry of a training config and of a checkpoint has them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

from sglang_ext.settings import Settings, build, check_type

MAX_BY_NAME = {"positions": 128, "num_layers": 512}  # a module each; of other sizes a tensor's side
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


class DrafterOptions(Settings):
    """Base of the configs (frozen dataclasses) of kinds with options of their own: all fields but those `of_target`."""

    of_target: ClassVar[tuple[str, ...]]

    @classmethod
    def from_options(cls, options: Mapping[str, Any], sizes: Mapping[str, Any]) -> Self:
        """From a `drafter` entry without its kind, and the target's sizes. Raises ValueError for unknown options."""
        return build(cls, options, "drafter", given=sizes)

    @classmethod
    def complete(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """A `drafter` entry without its kind, every default written out, whatever the target. Raises ValueError."""
        types = {f.name: f.type for f in fields(cls)}  # type: ignore[arg-type]
        sizes = {name: 1 if types[name] in (int, float) else (1,) for name in cls.of_target}
        return cls.from_options(options, sizes).options()

    def options(self) -> dict[str, Any]:
        """The `drafter` entry without its kind; inverse of `from_options`."""
        own = [f.name for f in fields(self) if f.name not in self.of_target]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in own}
