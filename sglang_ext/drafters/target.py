"""Which target a drafter was made for, and the check that it is served with that one."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Self

from sglang_ext.settings import Settings, build


def vocabulary_sha256(vocabulary: Mapping[str, int]) -> str:
    """Fingerprint of a tokenizer: SHA-256 over its (token, id) pairs in order of id.

    Over the vocabulary and not the file, since tokenizer.json is rewritten by every release of the library.
    """
    pairs = sorted(vocabulary.items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


@lru_cache(maxsize=8)
def tokenizer_sha256(tokenizer: Any) -> str:
    """`vocabulary_sha256` of a tokenizer of transformers, a sixth of a second for 150,000 tokens, once."""
    return vocabulary_sha256(tokenizer.get_vocab())


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
        """Info from the checkpoint's `rayspec.target`. Raises ValueError for a missing or unknown field."""
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


DEFAULT_TAPS = 3
TAPS = "eagle_aux_hidden_state_layer_ids"


def stored_taps(config: Mapping[str, Any]) -> list[int]:
    """The tapped layers that a config.json names for SGLang. Raises ValueError where they are no whole numbers."""
    return [i + 1 for i in checked_layers((config.get("eagle_config") or {}).get(TAPS), f"eagle_config.{TAPS}")]


def taps_for_vllm(config: Mapping[str, Any]) -> list[int]:
    """The tapped layers that a config.json names for vLLM, which counts them by their input. Raises ValueError as
    above."""
    return checked_layers(config.get(TAPS), TAPS)


def checked_layers(ids: Any, setting: str) -> list[int]:
    """[] for None. Raises ValueError where they are no whole numbers."""
    if ids is not None and (not isinstance(ids, list) or not all(type(i) is int for i in ids)):
        raise ValueError(f"{setting} must be a list of layers, got {ids!r}")
    return ids or []


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's taps [2, L//2, L-3], which are SGLang's default. Raises ValueError where they are not three different
    layers inside the target."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not 0 < taps[0] < taps[1] < taps[2] < num_layers:
        raise ValueError(
            f"a target of {num_layers} layers has no three different default taps (got {list(taps)}); "
            "EAGLE-3 needs at least 8 layers here, or tap_layers named explicitly"
        )
    return taps
