"""Finds everything that a calibration job needs, and what is already made, before Ray starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rayspec.artifacts import CALIBRATION, read_description
from rayspec.calibration.config import CalibrationConfig, NamedRule
from rayspec.calibration.drafter import ReferenceDrafter
from rayspec.calibration.sources.kinds import Context, TargetAnswers
from rayspec.calibration.vocabulary import Vocabulary
from rayspec.identity import differences
from rayspec.training.data.shards import shard_files
from sglang_ext.folders import check_place


@dataclass(frozen=True)
class Prepared:
    """A config with its target's vocabulary, and its sources described."""

    config: CalibrationConfig
    vocabulary: Vocabulary
    context: Context
    sources: dict[str, dict[str, Any]]
    held_out: TargetAnswers | None

    @cached_property
    def held_out_description(self) -> dict[str, Any] | None:
        return None if self.held_out is None else self.held_out.describe(self.context)

    def drafter(self, calibration: NamedRule) -> ReferenceDrafter:
        return ReferenceDrafter(self.context.target_folder, self.vocabulary, calibration.rule.drafter_name)

    def folder(self, calibration: NamedRule) -> Path:
        return self.config.output_folder / calibration.name

    def identity(self, calibration: NamedRule, drafter: ReferenceDrafter) -> dict[str, Any]:
        """What a calibration is made of: two with the same identity are equal."""
        v = self.vocabulary
        return {
            "rule": calibration.entry,
            "source": self.sources[calibration.source],
            "target": {"name": v.target, "vocab_size": v.size, "tokenizer_sha256": v.tokenizer_sha256},
            "stop_ids": list(v.stop_ids),
            "drafter": calibration.rule.depends_on(drafter),
        }

    def is_made(self, calibration: NamedRule, drafter: ReferenceDrafter) -> bool:
        """Whether this very calibration lies in the output folder. Raises ValueError if anything else does."""
        folder = self.folder(calibration)
        if not CALIBRATION.is_ours(folder):
            check_place(folder, CALIBRATION)
            return False
        wanted = self.identity(calibration, drafter)
        for key, was, now in differences(read_description(folder), wanted, keys=wanted):
            raise ValueError(
                f"{folder} holds a calibration with {key} {was}, this run has {now}; delete that folder to make it "
                "again, or choose another name or output_dir"
            )
        return True


def prepare(config: CalibrationConfig) -> Prepared:
    """Resolve the target and the sources. Raises ValueError."""
    vocabulary = Vocabulary.load(config.target_folder, config.target_name)
    for c in config.calibrations:
        try:
            c.rule.check(vocabulary)
        except ValueError as error:
            raise ValueError(f"calibrations.{c.name}: {error}") from error
    context = Context(
        target_folder=config.target_folder,
        target_name=config.target_name,
        tokenizer_sha256=vocabulary.tokenizer_sha256,
        work_folder=config.work_folder,
        corpus=config.corpus,
    )
    used = {c.source for c in config.calibrations}  # another one need not be there, and counting takes minutes
    sources = {
        name: {"name": name, "kind": source.kind, **source.describe(context)}
        for name, source in config.sources.items()
        if name in used
    }
    prepared = Prepared(config, vocabulary, context, sources, _held_out(config))
    _ = prepared.held_out_description
    for c in config.calibrations:
        if c.rule.drafter_name is not None:
            try:
                c.rule.depends_on(prepared.drafter(c))
            except ValueError as error:
                raise ValueError(f"calibrations.{c.name}: {error}") from error
    return prepared


def _held_out(config: CalibrationConfig) -> TargetAnswers | None:
    """A folder that was named must be there; the default one need not."""
    if config.held_out is not None:
        return TargetAnswers(answers=config.held_out)
    folder = config.work_folder / "held_out"
    return TargetAnswers(answers=str(folder)) if shard_files(folder) else None


def describe(prepared: Prepared) -> list[str]:
    """What the job would do, one line each. Raises ValueError for what it would refuse."""
    v = prepared.vocabulary
    lines = [
        f"target {prepared.context.target_folder}: {v.size} tokens, stop tokens {list(v.stop_ids)}, "
        f"{len(v.unusable_ids)} special or padding"
    ]
    for name, description in prepared.sources.items():
        rest = ", ".join(f"{k} {x}" for k, x in description.items() if k not in ("name", "sha256", "drafter_sha256"))
        lines.append(f"source {name} (sha256 {description['sha256'][:12]}): {rest}")
    if prepared.held_out_description is None:
        lines.append(
            f"no held-out answers in {prepared.config.work_folder / 'held_out'}, so no coverage is measured "
            "(rayspec train makes them; held_out=... names others)"
        )
    else:
        d = prepared.held_out_description
        lines.append(f"held out: {d['answer_tokens']} answer tokens of {d['sequences']} sequences")
    for c in prepared.config.calibrations:
        state = "already made" if prepared.is_made(c, prepared.drafter(c)) else "to make"
        lines.append(f"{c.name} {c.entry} on {c.source} -> {prepared.folder(c)}: {state}")
    return lines
