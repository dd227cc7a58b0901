"""Heads that a sweep makes itself, on a drafter that is there and without training: `heads` of its config.

A head is made of the rows of a full one (factors by SVD, rows of a calibrated list, groups), or it is a trained head
used otherwise (fewer bits, clusters, tokens of a shortlist). What it is made of gives it a name under
`$RAYSPEC_HOME/heads/TARGET`, where it lies as a drafter that shares the body of the other: whole or not at all, and
made once.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from rayspec.artifacts import load_artifacts
from rayspec.messages import first_line
from rayspec.provenance import git_state
from rayspec.shipped import target_name
from rayspec.sweep.candidate import Candidate, Head
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.drafters import at_every_length, candidate_of
from rayspec.sweep.plan.fits import check_fits
from rayspec.sweep.shape import DraftShape
from rayspec.target import TargetModel
from rayspec.training.data.answers import read_answers
from rayspec.training.drafter_config import DrafterEntry
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.moments import head_moments
from rayspec.training.origin import Origin, new_drafter
from rayspec.training.recipe import Recipe
from rayspec.training.ttt import check_prompt_lengths
from sglang_ext.adapter.algorithms import algorithm_of
from sglang_ext.drafters.checkpoint import check_files, load_drafter, save_drafter
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, read_info


@dataclass(frozen=True, kw_only=True)
class MadeHead:
    """One drafter to make, found and checked. `info` is what its config.json will say; `artifacts` the folder of a
    calibration; `answers` that of those on whose states it is weighted, None for a head that looks at none, and where
    there are none."""

    label: str
    shape: DraftShape
    base: Path
    info: CheckpointInfo
    artifacts: Path | None = None
    answers: Path | None = None

    @property
    def is_made(self) -> bool:
        """Whether it lies there, whole, and what it shares with does too."""
        try:
            check_files(read_info(self.info.path))
        except ValueError:
            return False
        return True

    def describe(self) -> str:
        source = f" of {self.artifacts}" if self.artifacts else ""
        how = f", weighted by what it meets on {self.answers}" if self.answers else ""
        state = "already made" if self.is_made else "to make"
        return (
            f"{self.label}: {Head.of(self.info.head.spec())} on {self.base}{source}{how} -> {self.info.path}: {state}"
        )

    def candidates(self, config: SweepConfig, target: TargetModel) -> list[Candidate]:
        """The head with each of the draft steps, as `inspect_drafter` gives candidates of a drafter that is there."""
        problem = None
        algorithm = algorithm_of(self.base, self.shape.topk)
        try:
            check_fits(self.info, self.shape, config, target)
        except ValueError as error:
            problem = str(error)
        found = candidate_of(self.info, self.label, self.shape, algorithm)
        return at_every_length(replace(found, problem=problem), config)


def make_heads(heads: Sequence[MadeHead], config: SweepConfig, target_folder: str) -> None:
    """Write the drafters that are not there, each whole or not at all. Raises ValueError and OSError."""
    missing = [head for head in heads if not head.is_made]
    if not missing:
        return
    target = FrozenTarget.without_weights(target_folder)
    met: dict[Path, Mapping[str, Tensor]] = {}  # cached by base drafter: measuring takes seconds to minutes
    for head in missing:
        print(f"making {head.label}", flush=True)
        if head.answers is not None and head.base not in met:
            met[head.base] = _moments(head.base, head.answers, target_folder)
        try:
            _make(head, met[head.base] if head.answers else {}, target, target_name(config.target))
        except OSError:
            if not head.is_made:  # by another sweep, meanwhile
                raise


def _moments(base: Path, folder: Path, target_folder: str) -> Mapping[str, Tensor]:
    """Raises ValueError."""
    if torch.cuda.is_available():
        # a process that has used a GPU keeps some of its memory until it ends, and the engines want all of it
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            try:
                return process.submit(measured_moments, base, folder, target_folder, torch.device("cuda")).result()
            except (torch.OutOfMemoryError, BrokenProcessPool) as error:
                print(f"on the CPU, since the GPU cannot run the target now: {first_line(error)}", flush=True)
    return measured_moments(base, folder, target_folder, torch.device("cpu"))


def measured_moments(base: Path, folder: Path, target_folder: str, device: torch.device) -> Mapping[str, Tensor]:
    """What the head of the drafter `base` meets on the answers of `folder`. Raises ValueError."""
    drafter, _ = load_drafter(base)
    answers = read_answers(folder)
    steps = drafter.config.max_draft_steps or Recipe().ttt_steps
    check_prompt_lengths(answers, steps)
    target = FrozenTarget.load(target_folder, device=device)
    return head_moments(target, answers, drafter.to(device), steps)


def _make(head: MadeHead, met: Mapping[str, Tensor], target: FrozenTarget, name: str) -> None:
    entry = DrafterEntry(
        name=head.label,
        base=str(head.base),
        draft_head=head.info.head,
        drafter=head.info.body.options,
    )
    artifacts = load_artifacts(head.artifacts)[0] if head.artifacts else {}
    origin = Origin({**artifacts, **met}, head.base)
    drafter = new_drafter(target, entry, Recipe(), None, origin)
    drafter.lm_head.quantize()
    if head.info.tree is not None:
        drafter.draft_tree = load_drafter(head.base)[0].draft_tree
    save_drafter(
        head.info.path,
        drafter,
        target.info(name, drafter.config.tap_layers),
        {**head.info.provenance, "commit": git_state()[0]},
        share_with=head.base,
    )
