"""Which target a drafter was made for, and the check that it is served with that one."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from sglang_ext.settings import Settings, build


def vocabulary_sha256(vocabulary: Mapping[str, int]) -> str:
    """Fingerprint of a tokenizer: SHA-256 over its (token, id) pairs in order of id.

    Over the vocabulary and not the file, since tokenizer.json is rewritten by every release of the library.
    """
    pairs = sorted(vocabulary.items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TargetInfo(Settings):
    """The target as a drafter sees it; `tap_layers` are the layers whose input is tapped."""

    name: str
    hidden_size: int
    vocab_size: int
    tokenizer_sha256: str
    tap_layers: tuple[int, ...]

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> Self:
        """From the checkpoint's `rayspec.target`. Raises ValueError for a missing or unknown field."""
        if not isinstance(entry, Mapping):
            raise ValueError(f"rayspec.target must be a JSON object, got {entry!r}")
        return build(cls, entry, "rayspec.target")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tap_layers": list(self.tap_layers)}

    def check_served_with(self, served: "TargetInfo", checkpoint: str) -> None:
        """Raise ValueError unless the served target is the one that the drafter was trained on (names may differ)."""
        for field, meaning in (
            ("hidden_size", "hidden size"),
            ("vocab_size", "vocabulary size"),
            ("tokenizer_sha256", "tokenizer"),
            ("tap_layers", "tapped layers"),
        ):
            want, got = getattr(self, field), getattr(served, field)
            if want != got:
                raise ValueError(
                    f"drafter {checkpoint} was trained for target {self.name!r} with {meaning} {want}, but the served "
                    f"target {served.name!r} has {got}; serve it with its own target, or train a drafter for this "
                    f"one: rayspec train target={served.name}"
                )
