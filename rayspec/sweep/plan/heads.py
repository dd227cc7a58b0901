"""Which heads the `heads` of a sweep's config ask for, and whether each can be made: found and checked by `--plan` as
by a run, without loading a weight."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayspec.artifacts import load_artifacts
from rayspec.home import home
from rayspec.shipped import calibration_path, drafter_label, drafter_path, own_folder, target_name
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.head_entry import AskedHead, filled_in, label
from rayspec.sweep.plan.made_heads import MadeHead
from rayspec.sweep.shape import split_shape
from rayspec.training.data.answers import read_answers, read_index
from rayspec.training.data.shards import shard_files
from rayspec.training.frozen_target import FrozenTarget, target_sha256
from rayspec.training.origin import is_base_head
from sglang_ext.drafters.checkpoint import check_files
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.fingerprints import file_sha256
from sglang_ext.folder_kinds import CALIBRATED, WEIGHTS
from sglang_ext.folders import check_name
from sglang_ext.heads import HeadConfig, head_class, parse_head

MAKER = 1  # higher when a head of the same things would have other tensors


class HeadPlanner:
    """Finds and checks the heads of a config; writes nothing. Every error is a ValueError that names the setting."""

    def __init__(self, config: SweepConfig, target_folder: str) -> None:
        self.config = config
        self.target_folder = target_folder

    @cached_property
    def target(self) -> FrozenTarget:
        return FrozenTarget.without_weights(self.target_folder)

    @cached_property
    def answers(self) -> tuple[Path, str] | None:
        """The folder of this target's own, and their fingerprint, where rayspec train has made them."""
        folder = home() / "training" / target_name(self.config.target) / "answers"
        if not Path(self.target_folder).is_dir() or not shard_files(folder):
            return None
        made_by = read_index(folder, "make the answers again with rayspec train")["target_sha256"]
        return (folder, read_answers(folder).sha256) if made_by == target_sha256(self.target_folder) else None

    def plan(self) -> list[MadeHead]:
        found: list[MadeHead] = []
        taken = {drafter_label(entry): f"drafters: {entry}" for entry in self.config.drafters}
        for i, entry in enumerate(self.config.heads):
            setting = f"heads[{i}]"
            with _in_the_words_of(setting):
                for asked in entry.asked:
                    head = self._plan(asked, setting)
                    if head.label in taken:
                        raise ValueError(
                            f"{setting} makes {head.label!r}, but {taken[head.label]} has that name already; take one "
                            "of the two out"
                        )
                    taken[head.label] = setting
                    found.append(head)
        return found

    def _plan(self, asked: AskedHead, setting: str) -> MadeHead:
        drafter, artifacts = asked.drafter or self.config.baseline, asked.artifacts
        known = {drafter_label(entry): entry for entry in self.config.drafters}
        name, shape = self.config.shape_of(known.get(drafter, drafter))
        base = read_info(drafter_path(name, self.config.target))
        check_files(base)

        tensors, calibration = self._artifacts(artifacts)
        options = asked.options
        if isinstance(base.head, head_class(asked.kind).Config):
            wanted = parse_head({**base.head.spec(), **options})
        else:
            incomplete = parse_head(options)
            wanted = incomplete.complete(tensors)
            options = filled_in(options, incomplete.spec(), wanted.spec())
        wanted.check_sizes(base.body.hidden_size, base.body.vocab_size)
        is_new = not is_base_head(base, wanted, f"{setting}.drafter")
        answers = self.answers if is_new and wanted.uses_states else None
        met = {"states": torch.empty(0)} if answers else {}  # that there will be some
        if is_new:
            _check_can_be_made(wanted, {**tensors, **met}, base.body.vocab_size, setting)
        if artifacts and not (is_new and _needs_artifacts(wanted, met, base.body.vocab_size)):
            raise ValueError(
                f"{setting}.artifacts is {artifacts!r}, but this {wanted.kind} head is made of none; leave it out"
            )

        base_sha256 = {file: file_sha256(Path(base.path) / file) for file in ("config.json", WEIGHTS)}
        calibrated = Path(calibration_path(artifacts, self.config.target)) if artifacts else None
        made = {
            "maker": MAKER,
            "base": base_sha256,
            "calibration": file_sha256(calibrated / CALIBRATED) if calibrated else None,
            "answers": answers[1] if answers else None,
        }
        plain_name = split_shape(drafter_label(drafter))[0]
        own = label(options, artifacts, None if drafter == self.config.baseline else plain_name)
        address = hashlib.sha256(json.dumps([wanted.spec(), made], sort_keys=True).encode()).hexdigest()[:12]
        folder = own_folder("heads", self.config.target) / f"{own}-{address}"
        check_name(folder.name, f"the name that {setting} gives")
        provenance = {"base": {"drafter": Path(base.path).name, "sha256": base_sha256[WEIGHTS]}, "made": made}
        return MadeHead(
            label=own + drafter_label(drafter).removeprefix(plain_name),  # and its shape
            shape=shape,
            base=Path(base.path),
            info=replace(base, path=str(folder), head=wanted, shares=(), provenance=provenance | calibration),
            artifacts=calibrated,
            answers=answers[0] if answers else None,
        )

    def _artifacts(self, name: str | None) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """A calibration's tensors, and what provenance says of it."""
        if name is None:
            return {}, {}
        info = self.target.info(target_name(self.config.target), ())
        tensors, description = load_artifacts(name, info, self.target.eos_ids)
        return tensors, {"calibration": description}


@contextmanager
def _in_the_words_of(setting: str) -> Iterator[None]:
    """Errors name the setting: a head calls the entry that it is made of draft_head, wherever it stands."""
    try:
        yield
    except ValueError as error:
        text = str(error).replace("draft_head", setting)
        raise ValueError(text if setting in text else f"{setting}: {text}") from error


def _check_can_be_made(wanted: HeadConfig, artifacts: Mapping[str, Tensor], vocab_size: int, setting: str) -> None:
    if wanted.starts_at_random:
        raise ValueError(
            f"{setting} asks for a new head of kind {wanted.kind!r}, which begins at random and must be trained first: "
            "add it with its base and artifacts to configs/train/heads.yaml, run rayspec train, and name that drafter "
            f"in {setting}.drafter; {', '.join(sorted(wanted.inference_options))} can then be swept without training"
        )
    wanted.check_artifacts(artifacts, vocab_size)


def _needs_artifacts(wanted: HeadConfig, met: Mapping[str, Tensor], vocab_size: int) -> bool:
    try:
        wanted.check_artifacts(met, vocab_size)
    except ValueError:
        return True
    return False


def plan_heads(config: SweepConfig, target_folder: str) -> list[MadeHead]:
    """All of them, in their order. Raises ValueError."""
    return HeadPlanner(config, target_folder).plan() if config.heads else []
