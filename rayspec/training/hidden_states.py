"""Hidden states of the target, computed once and stored: what `hidden_states: offline` trains on.

The target is frozen, so that its states along an answer are a function of the answer's tokens, and many drafters that
are trained on the same answers need them computed only once. A file holds the states of one layer along CHUNK
sequences, one behind the other, in the dtype in which the target runs, and says of which target and sequences they are:
what does not fit is computed again. Training maps the files into memory and finds a sequence by its tokens, so nothing
that asks the target for states knows whether they are stored.

B = sequences, T = positions, G = target hidden size, M = tokens of a file.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from rayspec.messages import gib
from rayspec.training.data.answers import AnswerSet, missing_shards, read_answers
from rayspec.training.drafter import autocast
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.group import ALONE, Group
from sglang_ext.drafters import body_for
from sglang_ext.drafters.base import DrafterConfig
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.folders import save_tensors
from sglang_ext.whole import whole_file

CHUNK = 64  # sequences of a file
MAX_MAPPED_FILES = 4096  # files at once; Linux allows a process 65530 mappings
LAST = "last"  # the normed last hidden state, which is the input of no layer
STATES, IDENTITY = "states", "identity"

logger = logging.getLogger(__name__)


def layer_name(layer: int, num_layers: int) -> str:
    """Name of what is tapped: the input of a layer, or behind the last one what the LM head reads."""
    return LAST if layer == num_layers else f"layer-{layer:03d}"


@dataclass(frozen=True)
class StoredSet:
    """The files of one set of answers, whether they are there or not. `layers`: names."""

    folder: Path
    target_sha256: str
    hidden_size: int
    dtype: torch.dtype
    answers: AnswerSet
    layers: tuple[str, ...]

    @cached_property
    def chunks(self) -> list[range]:
        """Numbers of the sequences of each file."""
        count = len(self.answers)
        return [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]

    def tokens(self, chunk: range) -> int:
        return int(self.answers.length_N[chunk.start : chunk.stop].sum())

    def file(self, chunk: range, layer: str) -> Path:
        return self.folder / f"{layer}-{chunk.start // CHUNK:05d}.safetensors"

    def sequence(self, number: int) -> Tensor:
        return self.answers.token_ids_NL[number, : int(self.answers.length_N[number])]

    def identity(self, chunk: range) -> str:
        digest = hashlib.sha256(f"{self.target_sha256} {self.dtype} {self.hidden_size}".encode())
        for number in chunk:
            digest.update(f" {int(self.answers.length_N[number])} ".encode())
            digest.update(self.sequence(number).numpy().tobytes())
        return digest.hexdigest()

    @cached_property
    def missing(self) -> list[tuple[range, list[str]]]:
        """Files to make: (chunk, names of layers); also those that are there, but of other sequences."""
        found = []
        for chunk in self.chunks:
            identity = self.identity(chunk)
            names = [layer for layer in self.layers if _identity_of(self.file(chunk, layer)) != identity]
            if names:
                found.append((chunk, names))
        return found

    @property
    def missing_bytes(self) -> int:
        each = self.hidden_size * self.dtype.itemsize
        return sum(self.tokens(chunk) * len(names) * each for chunk, names in self.missing)


def _identity_of(file: Path) -> str | None:
    """What a file says that it holds; None for one that is not there or not whole."""
    try:
        with safe_open(file, framework="pt") as found:
            return (found.metadata() or {}).get(IDENTITY)
    except (SafetensorError, OSError):
        return None


class StoredStates:
    """States of the sequences of some sets, all of whose files are there."""

    def __init__(self, sets: Sequence[StoredSet]) -> None:
        self.layers = frozenset(sets[0].layers)
        self._places: dict[bytes, tuple[StoredSet, range, int, int]] = {}
        for own in sets:
            for chunk in own.chunks:
                start = 0
                for number in chunk:
                    ids_T = own.sequence(number)
                    key, before = _key(ids_T), self._places.get(_key(ids_T))
                    if before is None or before[3] < len(ids_T):  # one of two may end with the token that pads
                        self._places[key] = (own, chunk, start, len(ids_T))
                    start += len(ids_T)
        self._mapped = lru_cache(maxsize=MAX_MAPPED_FILES)(lambda file: load_file(file)[STATES])
        self._has_warned = False

    def find(self, ids_BT: Tensor, layers: Sequence[str]) -> list[Tensor] | None:
        """[B, T, G] of each layer, 0 behind the end of a sequence; None where one of them is not stored."""
        missing = sorted(set(layers) - self.layers)
        if missing:
            if not self._has_warned:
                logger.warning("states of %s are not stored, so the target computes them at each step", missing[0])
                self._has_warned = True
            return None
        places = [self._places.get(_key(ids_T)) for ids_T in ids_BT.cpu()]
        if not places or any(place is None for place in places):
            return None
        B, T = ids_BT.shape
        own = next(place[0] for place in places if place is not None)
        found = [torch.zeros(B, T, own.hidden_size, dtype=own.dtype) for _ in layers]
        for b, place in enumerate(places):
            assert place is not None, "looked at above"
            own, chunk, start, length = place
            count = min(length, T)
            for layer, states_BTG in zip(layers, found, strict=True):
                states_BTG[b, :count] = self._mapped(own.file(chunk, layer))[start : start + count]
        return [states_BTG.to(ids_BT.device) for states_BTG in found]


def _key(ids_T: Tensor) -> bytes:
    """Key of a sequence, the same however far it is padded with 0."""
    tokens = ids_T.int()
    used = tokens.nonzero()
    end = int(used[-1]) + 1 if len(used) else 0
    return hashlib.blake2b(tokens[:end].numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class StoredTarget(FrozenTarget):
    """The target, which reads the states of sequences that are stored, and computes those of any other."""

    states: StoredStates

    @classmethod
    def of(cls, target: FrozenTarget, states: StoredStates) -> StoredTarget:
        return cls(**{f.name: getattr(target, f.name) for f in fields(target)}, states=states)

    def features(self, ids_BT: Tensor, taps: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        names = [layer_name(layer, self.num_layers) for layer in taps or self.taps]
        found = self.states.find(ids_BT, [*names, LAST])
        return super().features(ids_BT, taps) if found is None else (torch.cat(found[:-1], dim=-1), found[-1])

    def last_hidden(self, ids_BT: Tensor) -> Tensor:
        found = self.states.find(ids_BT, [LAST])
        return super().last_hidden(ids_BT) if found is None else found[0]


def with_states(
    config: DrafterTrainConfig, target: FrozenTarget, sets: Iterable[AnswerSet], group: Group = ALONE
) -> FrozenTarget:
    """The target that training asks: itself, or with `hidden_states: offline` one that reads the states of these
    answers, computed where they are not stored yet: here, or by the workers of `group`, all of which call this and take
    files in turn, or with shared layers compute each together. Raises ValueError where the disk has no room for
    them."""
    if config.hidden_states == "online":
        return target
    stored = [_stored_set(config, target, answers) for answers in sets]
    _check_room(config, sum(own.missing_bytes for own in stored))
    for own in stored:
        _store(config, target, own, group)
    group.first_of(None)  # all files are there before anybody reads one
    return StoredTarget.of(target, StoredStates(stored))


def are_stored(config: DrafterTrainConfig, target: FrozenTarget, sets: Iterable[AnswerSet]) -> bool:
    """Whether nothing is to be computed; the target may be without weights. Raises ValueError where the disk has no
    room for what is."""
    if config.hidden_states == "online":
        return True
    missing = sum(_stored_set(config, target, answers).missing_bytes for answers in sets)
    _check_room(config, missing)
    return not missing


def plan_states(config: DrafterTrainConfig, target: FrozenTarget) -> list[str]:
    """The line of a plan: how large they are. Raises ValueError where it is known that they do not fit the disk."""
    if config.hidden_states == "online":
        return []
    layers = _layers(config, target)
    needed, is_known = 0, True
    for name in ("answers", "held_out"):
        settings, folder = getattr(config, name), config.work_folder / name
        if missing_shards(folder, settings):
            is_known = False
            each = len(layers) * target.model.config.hidden_size * config.target_dtype.itemsize
            needed += settings.count * settings.most_tokens * each
        else:
            needed += _stored_set(config, target, read_answers(folder)).missing_bytes
    free = _check_room(config, needed if is_known else 0)
    state = f"{'' if is_known else 'at most '}{gib(needed)} to compute" if needed else "complete"
    return [
        f"hidden states of {', '.join(layers)} in {_folder(config)}: {state}; {gib(free)} of the disk are free"
        + (", which may be too little" if needed > free else "")
        + _where_computed(config, needed)
    ]


def _where_computed(config: DrafterTrainConfig, needed: int) -> str:
    workers = config.workers
    if not needed or workers is None:
        return ""
    return f"; computed by the {workers.count} worker(s){', on a GPU each' if workers.num_gpus else ''}"


def _folder(config: DrafterTrainConfig) -> Path:
    return config.work_folder / "hidden_states"


def _stored_set(config: DrafterTrainConfig, target: FrozenTarget, answers: AnswerSet) -> StoredSet:
    return StoredSet(
        folder=_folder(config) / answers.name,
        target_sha256=target.sha256,
        hidden_size=target.model.config.hidden_size,
        dtype=config.target_dtype,
        answers=answers,
        layers=_layers(config, target),
    )


def _layers(config: DrafterTrainConfig, target: FrozenTarget) -> tuple[str, ...]:
    """Names of all that the drafters of the config read."""
    taps: set[int] = set()
    for entry in config.drafters:
        own = _body(config, entry, target).tap_layers
        taps |= set(target.taps if own is None else own)
    return tuple(sorted({layer_name(layer, target.num_layers) for layer in taps} | {LAST}))


def _body(config: DrafterTrainConfig, entry: DrafterEntry, target: FrozenTarget) -> DrafterConfig:
    with suppress(ValueError):  # a base that is still to be trained taps what a new drafter taps
        base = config.base_folder(entry)
        if base is not None:
            return read_info(base).body
    return body_for(target, entry.drafter, config.recipe)


def _check_room(config: DrafterTrainConfig, needed: int) -> int:
    """Free bytes of the disk. Raises ValueError where they are fewer than `needed`."""
    place = _folder(config).absolute()
    free = shutil.disk_usage(next(parent for parent in (place, *place.parents) if parent.is_dir())).free
    if needed > free:
        raise ValueError(
            f"hidden_states=offline needs {gib(needed)} in {place}, where {gib(free)} are free; name a larger disk "
            "with work_dir, lower answers.count, or set hidden_states=online, which computes them at each step"
        )
    return free


@torch.no_grad()
def _store(config: DrafterTrainConfig, target: FrozenTarget, own: StoredSet, group: Group) -> None:
    own.folder.mkdir(parents=True, exist_ok=True)
    is_shared = config.workers is not None and config.workers.shard_target and group.size > 1
    # by the number of a file, since others are written while this one looks which are missing
    todo = [found for found in own.missing if is_shared or found[0].start // CHUNK % group.size == group.rank]
    total = sum(own.tokens(chunk) for chunk, _ in todo)
    with tqdm(total=total, desc=f"hidden states: {own.answers.name}", unit="token", disable=not total) as bar:
        for chunk, names in todo:
            states = _compute(config, target, own, chunk, names)
            for name in names if group.is_writer or not is_shared else ():
                with whole_file(own.file(chunk, name)) as draft:
                    save_tensors({STATES: states[name]}, draft, {IDENTITY: own.identity(chunk)})
            bar.update(own.tokens(chunk))


def _compute(
    config: DrafterTrainConfig, target: FrozenTarget, own: StoredSet, chunk: range, names: Sequence[str]
) -> dict[str, Tensor]:
    """[M, G] of each layer along the sequences of a file."""
    taps = tuple(int(name.removeprefix("layer-")) for name in names if name != LAST)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for start in range(chunk.start, chunk.stop, config.sequences_at_once):
        numbers = range(start, min(start + config.sequences_at_once, chunk.stop))
        lengths = own.answers.length_N[numbers.start : numbers.stop].tolist()
        ids_BT = own.answers.token_ids_NL[numbers.start : numbers.stop, : max(lengths)].long().to(target.device)
        with autocast(config.recipe, target.device):
            if taps:
                tapped, last_BTG = target.features(ids_BT, taps)
                states = [*tapped.split(own.hidden_size, dim=-1), last_BTG]
            else:
                states = [target.last_hidden(ids_BT)]
        for name, states_BTG in zip([*(n for n in names if n != LAST), LAST], states, strict=True):
            if name in found:
                found[name] += [row_TG[:length] for row_TG, length in zip(states_BTG, lengths, strict=True)]
    return {name: torch.cat(rows).to("cpu", own.dtype).contiguous() for name, rows in found.items()}
