"""The drafters that a config names, as candidates."""

from dataclasses import replace

from rayspec.shipped import drafter_label, drafter_path
from rayspec.sweep.candidate import Candidate, Head
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.fits import check_fits
from rayspec.sweep.shape import DraftShape
from rayspec.target import TargetModel
from sglang_ext.adapter.algorithms import algorithm_of, fixed_body
from sglang_ext.drafters.checkpoint import check_files
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, read_info


def inspect_drafter(entry: str, config: SweepConfig, target: TargetModel | None = None) -> list[Candidate]:
    """A drafter with each of the draft steps. Of its checkpoint the config and the names and shapes of the tensors are
    read, not the weights, and held against the target, where one is given.

    Raises ValueError for a drafter that does not exist (a typing error); anything wrong inside is a `problem`.
    """
    name, shape = config.shape_of(entry)
    path, label = drafter_path(name, config.target), drafter_label(entry)
    try:
        info = read_info(path)
        check_files(info)
        algorithm = algorithm_of(path, shape.topk)
        check_fits(info, shape, config, target)
    except ValueError as error:
        found = Candidate(label=label, path=path, draft_steps=0, shape=shape, problem=str(error))
    else:
        found = candidate_of(info, label, shape, algorithm)
    return at_every_length(found, config)


def candidate_of(info: CheckpointInfo, label: str, shape: DraftShape, algorithm: str) -> Candidate:
    """What a checked config.json says of a candidate, but for the draft steps."""
    base, calibration = (info.provenance.get(name) or {} for name in ("base", "calibration"))
    return Candidate(
        label=label,
        path=info.path,
        head=Head.of(info.head.spec()),
        draft_steps=0,
        shape=shape,
        family=info.kind,
        algorithm=algorithm,
        base=base.get("drafter"),
        calibration=calibration.get("name"),
        is_made="made" in info.provenance,
        body=fixed_body(info),
    )


def at_every_length(candidate: Candidate, config: SweepConfig) -> list[Candidate]:
    return [replace(candidate, draft_steps=steps) for steps in config.draft_steps]
