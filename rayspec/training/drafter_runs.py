"""All of one configuration: answers where they are missing, then every drafter, each skipped once it is exported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayspec.home import tracking_uri
from rayspec.identity import differences
from rayspec.training.acceptance import Acceptance
from rayspec.training.checks import check_config, checked_target
from rayspec.training.data.answers import missing_shards, read_answers
from rayspec.training.drafter import summary, train_drafter
from rayspec.training.drafter_config import DEFAULT_DRAFTER, DrafterEntry, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.origin import calibration_sha256, pairs_sha256
from rayspec.training.precision import has_bfloat16
from rayspec.training.prepare import (
    own_device,
    plan_sets,
    prepared_answers,
    target_with_states,
    work_folder_of_our_own,
)
from rayspec.training.reckoning import reckon
from rayspec.training.served import check_served
from sglang_ext.drafters.checkpoint_config import read_config
from sglang_ext.fingerprints import weights_sha256
from sglang_ext.folder_kinds import DRAFTER, WEIGHTS
from sglang_ext.folders import check_place

ANSWERS_SHA256 = "trained_on.sha256 (the answers)"
CALIBRATION_SHA256, PAIRS_SHA256 = "calibration.sha256 (the artifacts)", "tree_pairs_sha256"
MADE_OF = {CALIBRATION_SHA256: calibration_sha256, PAIRS_SHA256: pairs_sha256}


def plan(config: DrafterTrainConfig) -> list[str]:
    """What `train_all` would do, one line each; nothing is written. Raises ValueError for what it would refuse."""
    target = checked_target(config)
    config = check_config(config, target)
    lines = [f"target {config.target_folder} (sha256 {target.sha256[:12]})", *plan_sets(config, target)]
    r = config.recipe
    lines.append(f"trained {_where(config)}, in {_precision(config)}")
    lines.append(
        f"recipe: {r.num_steps} steps of {r.batch_size} sequences "
        f"({r.num_steps * r.batch_size / config.answers.count:.2f} passes), {r.ttt_steps} rollout steps, {r.optimizer}"
        + (f", each update in {r.accumulate} pieces a worker" if r.accumulate > 1 else "")
        + (f", CSRA {r.csra_weight} at temperature {r.csra_temperature}" if r.csra_weight else "")
    )
    for entry in config.drafters:
        folder = config.output_folder / entry.name
        unfinished = sorted((config.work_folder / "unfinished" / entry.name).glob("step-*"))
        if is_exported(config, entry, target.sha256):
            state = "already exported"
        elif unfinished:
            state = f"to resume at {unfinished[-1].name}"
        else:
            state = "to train"
        drafter = "" if entry.drafter == DEFAULT_DRAFTER else f"{entry.drafter} "
        lines.append(f"{entry.name} {drafter}{entry.draft_head} -> {folder}: {state}")
    return lines + reckon(config, target)


def train_all(config: DrafterTrainConfig) -> dict[str, Acceptance | None]:
    """Run the configuration; {name: held-out acceptance, None where it was already exported}. Raises ValueError."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    target = checked_target(config)
    config = check_config(config, target)
    results: dict[str, Acceptance | None] = {}
    for entry in config.drafters:
        if is_exported(config, entry, target.sha256):
            print(f"{entry.name}: already exported to {config.output_folder / entry.name}, skipped")
            results[entry.name] = None
    if len(results) == len(config.drafters):
        return results
    if config.mlflow:
        from rayspec.tracking import connect  # seconds of import, not paid where it is off

        connect(tracking_uri())  # a store that does not answer should not wait for the answers
    config = config.resolved()  # engines and workers may have another current folder
    with work_folder_of_our_own(config):
        return results | _train(config, [entry for entry in config.drafters if entry.name not in results], target)


def _train(config: DrafterTrainConfig, todo: Sequence[DrafterEntry], read: FrozenTarget) -> dict[str, Acceptance]:
    # `read` is the target without weights: on a GPU the engines that make the answers want its memory
    answers, held_out = sets = prepared_answers(config, read)
    target = target_with_states(config, read, sets)
    results = {}
    for entry in todo:
        if config.workers is None:
            acceptance = train_drafter(config, entry, target, answers, held_out)
        else:
            from rayspec.training.ray_train import train_by_workers  # with Ray, some seconds

            acceptance = train_by_workers(config, entry, target.sha256)
        results[entry.name] = acceptance
        print(f"{entry.name}: {summary(acceptance)}", flush=True)
        served = check_served(config, entry, target, held_out)
        if served is not None:
            print(f"{entry.name}: {served}", flush=True)
    return results


def _precision(config: DrafterTrainConfig) -> str:
    is_fast, is_asked = has_bfloat16(config.training_device), config.recipe.bfloat16 is not None
    if config.target_dtype == torch.bfloat16:
        return "bfloat16" if is_fast else "bfloat16, which this processor has no instructions for: expect it to be slow"
    return "float32" if is_asked else "float32, since this processor has no instructions for bfloat16"


def _where(config: DrafterTrainConfig) -> str:
    workers = config.workers
    if workers is None:
        return f"in this process, on {own_device(config).type}"
    each = f"{workers.num_cpus} CPU(s)" + (" and one GPU" if workers.num_gpus else "")
    return (
        f"by {workers.count} worker(s) of Ray Train with {each} each"
        + (", which share out the target's layers" if workers.shard_target else "")
        + f"; at most {config.sequences_at_once} sequences at once"
    )


def _recipe_beside(config: DrafterTrainConfig, stored: object) -> dict[str, Any]:
    """The recipe to compare with: where it leaves the precision open, that of the drafter which is there."""
    recipe = config.recipe.to_dict()
    if config.recipe.bfloat16 is None and isinstance(stored, dict) and "bfloat16" in stored:
        recipe["bfloat16"] = stored["bfloat16"]
    return recipe


def is_exported(config: DrafterTrainConfig, entry: DrafterEntry, target_sha256: str) -> bool:
    """Whether this very drafter lies in the output folder. Raises ValueError if anything else does.

    Answers that are gone are not compared: a shipped drafter is finished on a machine that never made any.
    """
    folder = config.output_folder / entry.name
    if not DRAFTER.is_ours(folder):
        check_place(folder, DRAFTER)
        return False
    found = read_config(folder)
    ours = found.get("rayspec")
    trained_on = ours.get("trained_on") if isinstance(ours, dict) else None
    sizes: list[Any] = [found.get(name) for name in ("hidden_size", "vocab_size")]
    if not isinstance(ours, dict) or not isinstance(trained_on, dict) or not all(type(n) is int for n in sizes):
        raise ValueError(f"{folder} is no drafter that training has made; choose another output_dir or name")
    entry.draft_head.check_sizes(*sizes)
    stored: dict[str, Any] = {
        **ours,
        "draft_head": found.get("draft_head"),
        "trained_on.target_sha256": trained_on.get("target_sha256"),
        "base.sha256": (ours.get("base") or {}).get("sha256"),
        ANSWERS_SHA256: trained_on.get("sha256"),
        CALIBRATION_SHA256: (ours.get("calibration") or {}).get("sha256"),
    }
    wanted: dict[str, Any] = {
        # with the options that were left at their defaults: the checkpoint spells them out
        "draft_head": entry.draft_head.spec(),
        "recipe": _recipe_beside(config, stored.get("recipe")),
        **dict.fromkeys(("tree", "freeze_head", "train_body")),  # also where they are not asked for
        **entry.asked(),
        "trained_on.target_sha256": target_sha256,
    }
    base = config.base_folder(entry)
    if base is not None:
        wanted["base.sha256"] = weights_sha256(base / WEIGHTS)
    # drafters of older releases do not say it
    wanted |= {name: sha256(config, entry) for name, sha256 in MADE_OF.items() if stored.get(name) is not None}
    if not missing_shards(config.work_folder / "answers", config.answers):
        wanted[ANSWERS_SHA256] = read_answers(config.work_folder / "answers").sha256
    for key, was, now in differences(stored, wanted, keys=wanted):
        raise ValueError(
            f"{folder} holds a drafter with {key} {was}, this run has {now}; delete that folder to train it again, or "
            "choose another output_dir"
        )
    return True
