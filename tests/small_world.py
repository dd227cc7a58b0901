"""A target, drafters of it, prompts and texts, all small, random and valid: to serve, or to break one thing of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters import family, parse_drafter
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.checkpoint import save_drafter
from sglang_ext.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from sglang_ext.drafters.independent import IndependentConfig, IndependentDrafter
from sglang_ext.drafters.medusa import MedusaConfig, MedusaDrafter
from sglang_ext.drafters.target import TargetInfo, vocabulary_sha256
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import build_head, head_from_target, parse_head
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.trees.static import StaticTree

V, H = 257, 32  # of the fixture tiny_target_folder


def tiny_info(target: Path, taps: tuple[int, ...]) -> TargetInfo:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(target))
    return TargetInfo(
        name="tiny",
        hidden_size=H,
        vocab_size=V,
        tokenizer_sha256=vocabulary_sha256(tokenizer.get_vocab()),
        tap_layers=taps,
    )


def _eagle3() -> Eagle3Drafter:
    config = Eagle3Config(
        hidden_size=H,
        target_hidden_size=H,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=V,
        tap_layers=(2, 4, 5),
        max_position_embeddings=128,
    )
    return Eagle3Drafter(config, build_head(parse_head({"kind": "full"}), hidden_size=H, vocab_size=V))


def _medusa() -> MedusaDrafter:
    config = MedusaConfig(hidden_size=H, vocab_size=V, positions=2, max_position_embeddings=128)
    heads = PositionHeads([build_head(parse_head({"kind": "full"}), hidden_size=H, vocab_size=V) for _ in range(2)])
    return MedusaDrafter(config, heads, StaticTree([(0,), (1,), (0, 0), (0, 1)]))


def _independent() -> IndependentDrafter:
    config = IndependentConfig(vocab_size=V, max_position_embeddings=128, hidden_size=16, num_layers=1, head_dim=8)
    return IndependentDrafter(config, build_head(parse_head({"kind": "full"}), hidden_size=16, vocab_size=V))


def untrained(
    target: FrozenTarget,
    kind: str,
    options: Mapping[str, Any],
    head: Mapping[str, Any],
    artifacts: Mapping[str, Tensor] | None = None,
    seed: int = 0,
) -> Any:
    """A new drafter, as training begins with it."""
    own = family(kind)
    config = own.training.config_for(target, parse_drafter({"kind": kind, **options}))
    rows_VH = own.training.head_rows(target, config)
    drafter = own.drafter_class(
        config, config.heads(lambda: head_from_target(parse_head(head), rows_VH, artifacts or {}))
    )
    probe = Batch((torch.arange(64) % 16)[None], torch.zeros(64, dtype=torch.int64), torch.arange(64))
    own.training.init_body(drafter, target, probe, seed)
    return drafter


def save_random(folder: Path, drafter: Drafter, info: TargetInfo, **options: Any) -> None:
    torch.manual_seed(0)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    save_drafter(folder, drafter, info, {"trained_on": {}, "recipe": {}, "commit": "none"}, **options)


@dataclass(frozen=True)
class World:
    """A target, drafters of it, prompts, and texts: all small and valid."""

    folder: Path

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def drafters(self) -> Path:
        return self.folder / "drafters"

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    @property
    def texts(self) -> Path:
        return self.folder / "texts"

    def copy_of(self, path: Path, name: str) -> Path:
        """A copy beside it, to be broken."""
        copy = path.with_name(name)
        if copy.exists():
            shutil.rmtree(copy)
        shutil.copytree(path, copy)
        return copy


def make_world(folder: Path, target: Path) -> World:
    """`target`: that of the fixture tiny_target_folder, of which a copy is taken."""
    world = World(folder)
    shutil.copytree(target, world.target)
    save_random(world.drafters / "full", _eagle3(), tiny_info(world.target, (2, 4, 5)))
    save_random(world.drafters / "medusa", _medusa(), tiny_info(world.target, ()))
    save_random(world.drafters / "independent", _independent(), tiny_info(world.target, ()))
    save_random(world.drafters / "stock", _eagle3(), tiny_info(world.target, (2, 4, 5)), stock=True)
    lines = [{"id": i, "prompt": f"def f{i}(a, b):"} for i in range(8)]
    world.prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    world.texts.mkdir()
    for n in range(4):
        body = "\n".join(f"def f{n}_{i}(a, b):\n    return a * {i} + b\n" for i in range(30))
        (world.texts / f"module_{n}.py").write_text(body)
    return world
