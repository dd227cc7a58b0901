"""The drafter that training starts from: made from the target, or from another drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayspec.artifacts import load_artifacts
from rayspec.shipped import calibration_path
from rayspec.training.data.answers import AnswerSet
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.moments import head_moments
from rayspec.training.recipe import Recipe
from sglang_ext.drafters import body_for
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.checkpoint_config import CheckpointInfo
from sglang_ext.drafters.training import Batch
from sglang_ext.fingerprints import file_sha256, weights_sha256
from sglang_ext.folder_kinds import CALIBRATED, WEIGHTS
from sglang_ext.heads import DraftHead, HeadConfig, head_from_target
from sglang_ext.heads.by_position import PositionHeads


@dataclass(frozen=True)
class Origin:
    """What a drafter is made of besides the target: calibration artifacts, and the drafter whose body it takes over."""

    artifacts: Mapping[str, Tensor] = field(default_factory=dict)
    base: Path | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def with_artifacts(self, more: Mapping[str, Tensor]) -> Origin:
        return replace(self, artifacts={**self.artifacts, **more})


NOTHING = Origin()


def origin_of(config: DrafterTrainConfig, entry: DrafterEntry, target: FrozenTarget) -> Origin:
    """Read an entry's artifacts and find its base. Raises ValueError for artifacts or a base of another target."""
    base = config.base_folder(entry)
    provenance: dict[str, Any] = {}
    if base is not None:
        provenance["base"] = {"drafter": base.name, "sha256": weights_sha256(base / WEIGHTS)}
    artifacts, description = _read_artifacts(config, entry, target)
    if description:
        provenance["calibration"] = description
    pairs = pairs_sha256(config, entry)
    if pairs is not None:
        provenance["tree_pairs_sha256"] = pairs
    return Origin(artifacts, base, provenance)


def completed(config: DrafterTrainConfig, entry: DrafterEntry, target: FrozenTarget) -> DrafterEntry:
    """The same with what its head leaves to its artifacts written out. Raises ValueError."""
    artifacts, _ = _read_artifacts(config, entry, target)
    return replace(entry, draft_head=entry.draft_head.complete(artifacts))


def _read_artifacts(
    config: DrafterTrainConfig, entry: DrafterEntry, target: FrozenTarget
) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Tensors and calibration.json, with the tensors' hash; nothing for an entry without artifacts."""
    if entry.artifacts is None:
        return {}, {}
    tensors, description = load_artifacts(entry.artifacts, target.info(config.target_name, ()), target.eos_ids)
    return tensors, {**description, "sha256": calibration_sha256(config, entry)}


def calibration_sha256(config: DrafterTrainConfig, entry: DrafterEntry) -> str | None:
    """Hash of a calibration's tensors; None for an entry without artifacts."""
    return None if entry.artifacts is None else _sha256_of(entry.artifacts, config.target_name)


def pairs_sha256(config: DrafterTrainConfig, entry: DrafterEntry) -> str | None:
    """Hash of the calibration that a tree's pairs are from; None for an entry without such a tree."""
    calibration = None if entry.tree is None else entry.tree.calibration
    return None if calibration is None else _sha256_of(calibration, config.target_name)


def _sha256_of(calibration: str, target: str) -> str:
    return file_sha256(Path(calibration_path(calibration, target)) / CALIBRATED)


def new_drafter(
    target: FrozenTarget, entry: DrafterEntry, recipe: Recipe, answers: AnswerSet | None, origin: Origin = NOTHING
) -> Drafter:
    """A drafter at step 0, on the CPU: the head made from the target's and the body from the seed, or both from the
    base, whose parameters are then frozen unless `train_body` is set. On a base without `answers`, what a head meets on
    them is what the origin's artifacts say, and the target needs no weights. Raises ValueError."""
    if origin.base is None:
        assert answers is not None, "a body begins at the size of what it meets"
        drafter = _drafter_from_target(target, entry, recipe, answers, origin)
    else:
        drafter = _drafter_on_base(target, entry, recipe, answers, origin)
        if entry.train_body:
            drafter.requires_grad_(True)
    if entry.freeze_head:
        for lm_head in drafter.lm_head if isinstance(drafter.lm_head, PositionHeads) else [drafter.lm_head]:
            _freeze_rows(lm_head, target.head_VG.dtype)
    return drafter


def _freeze_rows(lm_head: DraftHead, dtype: torch.dtype) -> None:
    """Freeze the rows taken from the target, in the target's dtype, which saves training a cast at each product."""
    for name in lm_head.config.taken_over:
        parameter = lm_head.get_parameter(name)
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)


def _drafter_from_target(
    target: FrozenTarget, entry: DrafterEntry, recipe: Recipe, answers: AnswerSet, origin: Origin
) -> Drafter:
    own = entry.family
    config = body_for(target, entry.drafter, recipe)
    if config.reads_target and entry.draft_head.uses_states:
        origin = origin.with_artifacts(head_moments(target, answers))
    rows_VH = own.training.head_rows(target, config)
    drafter = own.drafter_class(
        config, config.heads(lambda: head_from_target(entry.draft_head, rows_VH, origin.artifacts))
    )
    probe = Batch.of(answers, torch.arange(min(8, len(answers))), target.device)
    own.training.init_body(drafter, target, probe, recipe.seed)
    return drafter


def read_base(target: FrozenTarget, entry: DrafterEntry, base: Path) -> tuple[Drafter, CheckpointInfo]:
    """The drafter that a head is made on. Raises ValueError where it is another target's or of another kind, where its
    weights are not finite, and where its head cannot be taken over."""
    drafter, info = load_drafter(base, stop_ids=target.eos_ids)
    check_base(target, entry, drafter, info)
    if drafter.config.tap_layers is None:  # a stock drafter, which has none of its own
        drafter.config = replace(drafter.config, tap_layers=target.taps)  # type: ignore[type-var]
    return drafter, info


def check_base(target: FrozenTarget, entry: DrafterEntry, drafter: Drafter, info: CheckpointInfo) -> None:
    """Check a loaded base: raise ValueError as `read_base` does."""
    base = info.path
    if info.target is not None:
        info.target.check_served_with(target.info(tap_layers=info.body.tap_layers), base)
    if info.kind != entry.family.kind:
        raise ValueError(
            f"drafters[{entry.name}].base is {base} of kind {info.kind}, but drafter.kind is {entry.family.kind}; "
            "both must be the same"
        )
    if entry.drafter != drafter.config.options:
        raise ValueError(
            f"drafters[{entry.name}].base is {base} with {drafter.config.options}, but drafter is {entry.drafter}; "
            "leave those options as they are there"
        )
    entry.draft_head.check_sizes(info.body.hidden_size, info.body.vocab_size)
    is_base_head(info, entry.draft_head, f"drafters[{entry.name}].base")


def is_base_head(base: CheckpointInfo, wanted: HeadConfig, setting: str) -> bool:
    """Whether the wanted head is that of the base with other inference options, or else a new one, made of the base's
    rows. Raises ValueError where it can be neither."""
    if _differs_in_inference_options_alone(base.head, wanted):
        return True
    if not base.head.gives_rows:
        raise ValueError(
            f"{setting} is {base.path}, whose head is {base.head}; a base needs a full head "
            f"without a bias, whose rows the new head takes over, or the same head up to "
            f"{', '.join(sorted(wanted.inference_options))}, not yet stored in fewer bits"
        )
    return False


def _differs_in_inference_options_alone(found: HeadConfig, wanted: HeadConfig) -> bool:
    """Whether a trained head needs nothing but other inference options, and no other tensors."""
    if type(found) is not type(wanted) or found.weight_format is not None:
        return False
    return replace(found, **{name: getattr(wanted, name) for name in wanted.inference_options}) == wanted


def _drafter_on_base(
    target: FrozenTarget, entry: DrafterEntry, recipe: Recipe, answers: AnswerSet | None, origin: Origin
) -> Drafter:
    assert origin.base is not None, "asked for only where there is one"
    drafter, info = read_base(target, entry, origin.base)
    drafter.draft_tree = None
    drafter.requires_grad_(False)
    if answers is not None and info.head.gives_rows and entry.draft_head.uses_states:
        steps = drafter.config.max_draft_steps or recipe.ttt_steps
        origin = origin.with_artifacts(head_moments(target, answers, drafter.to(target.device), steps))
        drafter.cpu()

    def on_base(found: DraftHead) -> DraftHead:
        return _head_on_base(found, entry, origin)

    if isinstance(drafter.lm_head, PositionHeads):
        drafter.lm_head = PositionHeads([on_base(found) for found in drafter.lm_head])
    else:
        drafter.lm_head = on_base(drafter.lm_head)
    return drafter


def _head_on_base(found: DraftHead, entry: DrafterEntry, origin: Origin) -> DraftHead:
    if _differs_in_inference_options_alone(found.config, entry.draft_head):
        found.config = entry.draft_head
        return found
    lm_head = head_from_target(entry.draft_head, found.get_parameter("weight").data, origin.artifacts)
    for name, parameter in lm_head.named_parameters():
        parameter.requires_grad_(name not in lm_head.config.taken_over)
    return lm_head
