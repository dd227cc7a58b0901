"""The target's own answers to prompts cut from source files: what drafters are trained and measured on.

A folder of safetensors shards and `answers.json` (which target, which settings, totals). One shard is one generated
batch; a killed run goes on with the first missing shard. N = sequences, L = longest sequence.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.generation import generate
from sglang_ext.folders import save_tensors

FORMAT_VERSION = 1
INDEX = "answers.json"


@dataclass(frozen=True, kw_only=True)
class AnswersConfig:
    """How many prompts of what length are answered, and how. `documents`: training, held_out, or a folder of files."""

    documents: str = "training"
    count: int = 3072
    min_prompt_tokens: int = 32
    max_prompt_tokens: int = 96
    answer_tokens: int = 160
    greedy_share: float = 0.5  # of the sequences; the rest is drawn at `temperature`
    temperature: float = 0.8
    batch_size: int = 128  # sequences generated together, one shard
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("count", "min_prompt_tokens", "answer_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"answers.{name} must be at least 1, got {getattr(self, name)}")
        if self.max_prompt_tokens < self.min_prompt_tokens:
            raise ValueError(
                f"answers.max_prompt_tokens must be at least answers.min_prompt_tokens ({self.min_prompt_tokens}), "
                f"got {self.max_prompt_tokens}"
            )
        if not 0.0 <= self.greedy_share <= 1.0:
            raise ValueError(f"answers.greedy_share must be in 0..1, got {self.greedy_share}")
        if self.temperature <= 0.0 and self.greedy_share < 1.0:
            raise ValueError(
                f"answers.temperature must be above 0 (greedy_share: 1 for greedy), got {self.temperature}"
            )

    @property
    def num_shards(self) -> int:
        return -(-self.count // self.batch_size)

    def is_greedy(self, index: int) -> bool:
        """Spread evenly: every shard mixes both kinds."""
        return int((index + 1) * self.greedy_share) > int(index * self.greedy_share)


@dataclass(frozen=True)
class AnswerSet:
    """Prompt and answer in one row, left-aligned, padded with 0 on the right."""

    name: str
    sha256: str
    token_ids_NL: Tensor  # int32
    loss_mask_NL: Tensor  # bool, true on answer tokens
    prompt_length_N: Tensor  # int32
    length_N: Tensor  # int32, prompt and answer
    temperature_N: Tensor  # float32, 0 = greedy

    def __len__(self) -> int:
        return self.token_ids_NL.shape[0]

    @property
    def num_answer_tokens(self) -> int:
        return int(self.loss_mask_NL.sum())

    def provenance(self) -> dict[str, Any]:
        return {
            "answers": self.name,
            "sha256": self.sha256,
            "sequences": len(self),
            "answer_tokens": self.num_answer_tokens,
            "greedy_sequences": int((self.temperature_N == 0).sum()),
        }


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"answers-{index:05d}.safetensors"


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def check_index(folder: Path, target_sha256: str, config: AnswersConfig) -> None:
    """Raise ValueError if the folder holds answers of another target or made with other settings."""
    if not (folder / INDEX).is_file():
        return
    index = json.loads((folder / INDEX).read_text())
    way_out = "name another folder with work_dir=..., or delete this one to have it made again"
    if index["target_sha256"] != target_sha256:
        raise ValueError(
            f"the answers in {folder} come from another target (sha256 {index['target_sha256'][:12]}..., this target "
            f"{target_sha256[:12]}...); a drafter learns its own target's answers: {way_out}"
        )
    wanted = asdict(config)
    for key in wanted.keys() | index["config"].keys():
        if index["config"].get(key) != wanted.get(key):
            raise ValueError(
                f"the answers in {folder} were made with answers.{key}={index['config'].get(key)}, "
                f"not {wanted.get(key)}; {way_out}"
            )


def missing_shards(folder: Path, config: AnswersConfig) -> list[int]:
    return [i for i in range(config.num_shards) if not shard_path(folder, i).is_file()]


def make_answers(folder: Path, target: FrozenTarget, config: AnswersConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Answer the prompts (token ids) into `folder`; shards that exist are kept. Raises ValueError as `check_index`."""
    check_index(folder, target.sha256, config)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "target": target.info().name,
        "target_sha256": target.sha256,
        "config": asdict(config),
    }
    if not (folder / INDEX).is_file():
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    todo = missing_shards(folder, config)
    for shard in tqdm(todo, desc=f"answers: {folder.name}", unit="shard", disable=not todo):
        rows = range(shard * config.batch_size, min((shard + 1) * config.batch_size, config.count))
        temperature_B = torch.tensor([0.0 if config.is_greedy(n) else config.temperature for n in rows])
        # a generator per shard, so that a resumed run draws what an uninterrupted one would
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + shard)
        batch = [list(prompts[n]) for n in rows]
        answers = generate(
            target.model,
            batch,
            temperature_B=temperature_B,
            max_new_tokens=config.answer_tokens,
            eos_ids=target.eos_ids,
            generator=generator,
        )
        _write_shard(shard_path(folder, shard), batch, answers, temperature_B)
    answer_set = read_answers(folder)
    write_text(folder / INDEX, json.dumps({**index, "totals": answer_set.provenance()}, indent=2) + "\n")


def _write_shard(
    path: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], temperature_B: Tensor
) -> None:
    rows = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int32)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for n, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids[n, : len(row)] = torch.tensor(row, dtype=torch.int32)
        mask[n, len(prompt) : len(row)] = True
    tensors = {
        "token_ids": ids,
        "loss_mask": mask,
        "prompt_length": torch.tensor([len(p) for p in prompts], dtype=torch.int32),
        "length": torch.tensor([len(r) for r in rows], dtype=torch.int32),
        "temperature": temperature_B,
    }
    temporary = path.with_name(f".{path.name}.tmp")
    save_tensors(tensors, temporary)
    os.replace(temporary, path)


def read_answers(folder: Path) -> AnswerSet:
    """All shards of a folder, padded to one width. Its name is the folder's, its sha256 that of the shards."""
    files = sorted(folder.glob("answers-*.safetensors"))
    if not files:
        raise ValueError(f"no answers in {folder}; python jobs/train.py makes them")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    shards = [load_file(file) for file in files]
    width = max(s["token_ids"].shape[1] for s in shards)

    def rows(name: str) -> Tensor:
        return torch.cat([torch.nn.functional.pad(s[name], (0, width - s[name].shape[1])) for s in shards])

    def column(name: str) -> Tensor:
        return torch.cat([s[name] for s in shards])

    return AnswerSet(
        name=folder.name,
        sha256=digest.hexdigest(),
        token_ids_NL=rows("token_ids"),
        loss_mask_NL=rows("loss_mask"),
        prompt_length_N=column("prompt_length"),
        length_N=column("length"),
        temperature_N=column("temperature"),
    )
