"""The options that a drafter kind offers, as the `drafter` entry of a training config and of a checkpoint has them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self


class DrafterOptions:
    """Base of the configs (frozen dataclasses) of kinds with options of their own: all fields but those `of_target`."""

    of_target: ClassVar[tuple[str, ...]]

    @classmethod
    def from_options(cls, options: Mapping[str, Any], sizes: Mapping[str, Any]) -> Self:
        """From a `drafter` entry without its kind, and the target's sizes. Raises ValueError for unknown options."""
        own = {f.name: f.type for f in fields(cls) if f.name not in cls.of_target}  # type: ignore[arg-type]
        for name, value in options.items():
            if name not in own:
                raise ValueError(f"drafter has no option {name!r}; its options: {', '.join(own)}")
            if type(value) is not own[name]:
                wanted = getattr(own[name], "__name__", own[name])
                raise ValueError(f"drafter.{name} must be of type {wanted}, got {value!r}")
        return cls(**options, **sizes)

    def options(self) -> dict[str, Any]:
        """The `drafter` entry without its kind; inverse of `from_options`."""
        own = [f.name for f in fields(self) if f.name not in self.of_target]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in own}
