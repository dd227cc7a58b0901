"""Answers on disk: numbered files, each with the sequences of one shard.

Parquet, one row a sequence, so that any tool reads it: `id` (number of the sequence in its set), `prompt` (what was
asked, as text), `token_ids` (the whole sequence: chat template, prompts and answers), `loss_mask` (true on answer
tokens), `prompt_length` (tokens before the first answer), `temperature` (0 = greedy). Shards of earlier releases are
safetensors with the same tensors, padded, and are read as well. N = sequences of a shard, M = their tokens, one
sequence behind the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sglang_ext.whole import whole_file

PATTERN = "answers-*"
SUFFIXES = (".parquet", ".safetensors")  # what is written now, and what earlier releases wrote
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "prompt": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "prompt_length": pa.int32(),
        "temperature": pa.float32(),
    }
)
OLD_TENSORS = ("token_ids", "loss_mask", "prompt_length", "length", "temperature")


@dataclass
class Row:
    """A sequence in the making. `prompt`: what is asked, as text; `prompt_length`: tokens before the first answer."""

    number: int
    prompt: str
    prompt_length: int
    temperature: float
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)

    def add(self, ids: Sequence[int], is_answer: bool) -> None:
        self.ids += ids
        self.mask += [is_answer] * len(ids)

    def set_end(self, token: int) -> None:
        """Let the last answer end by `token`, as the chat template writes it once the conversation goes on. Where the
        target has ended it by another, there is nothing to learn from it."""
        if self.ids[-1] != token:
            self.ids[-1], self.mask[-1] = token, False


class Shard(NamedTuple):
    ids_M: Tensor  # int32
    mask_M: Tensor  # bool, true on answer tokens
    length_N: Tensor  # int32
    prompt_length_N: Tensor  # int32
    temperature_N: Tensor  # float32

    def problem(self) -> str | None:
        """What keeps it from being a set of answers; None where nothing does."""
        if not len(self.length_N):
            return "no sequence"
        if bool((self.length_N < 1).any()):
            return "a sequence without tokens"
        if bool((self.prompt_length_N < 1).any() | (self.prompt_length_N > self.length_N).any()):
            return "a prompt_length that is not within its sequence"
        if int(self.ids_M.min()) < 0:
            return f"the token {int(self.ids_M.min())}"
        return None

    def padded(self, values_M: Tensor, width: int) -> Tensor:
        """[N, width], with 0 behind each sequence."""
        rows = values_M.new_zeros(len(self.length_N), width)
        rows[torch.arange(width) < self.length_N[:, None]] = values_M
        return rows


def shard_files(folder: Path) -> dict[int, Path]:
    """{number: file} of a folder, in order; nothing where there is none. Raises ValueError for a shard that is there in
    both forms."""
    found: dict[int, Path] = {}
    for file in sorted(folder.glob(PATTERN)) if os.path.isdir(folder) else []:
        number = file.stem.removeprefix("answers-")
        if file.suffix not in SUFFIXES or not number.isdecimal():
            continue
        if int(number) in found:
            raise ValueError(f"{folder} holds shard {number} twice, as {' and '.join(SUFFIXES)}; delete one of them")
        found[int(number)] = file
    return found


def stored_prompts(file: Path) -> list[str]:
    """What was asked in a shard; nothing of one of an earlier release, or of one that `read_shard` would refuse."""
    if file.suffix != ".parquet":
        return []
    try:
        return pq.read_table(file, columns=["prompt"])["prompt"].drop_null().to_pylist()
    except (pa.ArrowException, OSError, KeyError):
        return []


def write_shard(folder: Path, number: int, rows: Sequence[Row]) -> None:
    """Whole or not at all. Raises OSError where the disk refuses."""
    columns = {
        "id": [row.number for row in rows],
        "prompt": [row.prompt for row in rows],
        "token_ids": [row.ids for row in rows],
        "loss_mask": [row.mask for row in rows],
        "prompt_length": [row.prompt_length for row in rows],
        "temperature": [row.temperature for row in rows],
    }
    with whole_file(folder / f"answers-{number:05d}.parquet") as draft:
        pq.write_table(pa.table(columns, schema=SCHEMA), draft, compression="zstd")


def read_shard(file: Path) -> Shard:
    """Raises ValueError for a file that is not whole, or holds something else."""
    shard = _read_parquet(file) if file.suffix == ".parquet" else _read_safetensors(file)
    problem = shard.problem()
    if problem is not None:
        raise ValueError(f"{file} holds no answers ({problem}); delete it to have it made again")
    return shard


def _read_parquet(file: Path) -> Shard:
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} is no whole Parquet file ({error}); delete it to have it made again") from error
    missing = sorted(set(SCHEMA.names) - set(table.column_names))
    if missing:
        raise ValueError(f"{file} holds no answers ({', '.join(missing)} missing); name another folder")
    try:
        table = table.select(SCHEMA.names).cast(SCHEMA).combine_chunks()
    except pa.ArrowException as error:
        raise ValueError(f"{file} holds no answers ({error}); name another folder") from error

    gaps = [name for name in SCHEMA.names if table.column(name).null_count]
    if gaps:
        raise ValueError(f"{file} holds no answers ({gaps[0]} has gaps); name another folder")

    def flat(name: str) -> pa.Array:
        return table.column(name).combine_chunks()

    def tensor(values: pa.Array) -> Tensor:
        return torch.from_numpy(values.to_numpy(zero_copy_only=False).copy())

    ids, mask = flat("token_ids"), flat("loss_mask")
    lengths = ids.value_lengths()
    if not lengths.equals(mask.value_lengths()):
        raise ValueError(f"{file} holds no answers (loss_mask is not as long as token_ids); name another folder")
    return Shard(
        tensor(ids.flatten()),
        tensor(mask.flatten()),
        tensor(lengths),
        tensor(flat("prompt_length")),
        tensor(flat("temperature")),
    )


def _read_safetensors(file: Path) -> Shard:
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no whole safetensors file ({error}); delete it to have it made again") from error
    missing = sorted(set(OLD_TENSORS) - set(tensors))
    if missing:
        raise ValueError(f"{file} holds no answers ({', '.join(missing)} missing); name another folder")
    ids_NL, mask_NL, prompt_length_N, length_N, temperature_N = (tensors[name] for name in OLD_TENSORS)
    fits = ids_NL.dim() == 2 and mask_NL.shape == ids_NL.shape and mask_NL.dtype == torch.bool
    fits &= all(tensors[name].shape == ids_NL.shape[:1] for name in OLD_TENSORS[2:])
    if not fits or (length_N > ids_NL.shape[-1]).any():
        raise ValueError(f"{file} holds no answers (its tensors do not fit each other); name another folder")
    is_token_NL = torch.arange(ids_NL.shape[1]) < length_N[:, None]
    return Shard(ids_NL[is_token_NL], mask_NL[is_token_NL], length_N, prompt_length_N, temperature_N)
