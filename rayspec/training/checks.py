"""Checks before training what it would refuse only once it has begun: everything but the training itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from rayspec.config import MAX_SEED
from rayspec.target import check_weights
from rayspec.training.data.answers import AnswersConfig, missing_shards
from rayspec.training.data.chat import ChatTemplate
from rayspec.training.data.prompts import is_text
from rayspec.training.data.self_prompts import written_prompts
from rayspec.training.data.shards import shard_files, stored_prompts
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget, target_sha256
from rayspec.training.origin import check_base, completed, origin_of
from rayspec.workloads.prompt_hashes import evaluation_hashes, part_hashes
from sglang_ext.adapter.server_fields import check_overrides
from sglang_ext.adapter.target_hosts import check_host
from sglang_ext.drafters import body_for
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.checkpoint_config import CheckpointInfo
from sglang_ext.folders import check_parents

MAX_COUNT = 10**8


def checked_target(config: DrafterTrainConfig) -> FrozenTarget:
    """The target without its weights, which lie whole in its folder. Raises ValueError."""
    sha256 = target_sha256(config.target_folder)
    _check_device(config)
    check_weights(config.target_folder)
    return replace(FrozenTarget.without_weights(config.target_folder), sha256=sha256)


def check_config(config: DrafterTrainConfig, target: FrozenTarget) -> DrafterTrainConfig:
    """The config with what heads leave to their artifacts written out, in numbers. Raises ValueError for whatever the
    run would stop at. Weights of the target are not read, those of a base are."""
    check_parents(config.output_folder / "any", f"output_dir is {config.output_folder}")
    _check_engines(config)
    _check_held_out(config)
    load_base = lru_cache(maxsize=1)(partial(load_drafter, stop_ids=target.eos_ids))  # many heads may stand on one
    drafters: list[DrafterEntry] = []
    for entry in config.drafters:
        try:
            drafters.append(completed(config, entry, target))
            _check_head(config, drafters[-1], target, {earlier.name for earlier in drafters[:-1]}, load_base)
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith("drafters[") else f"drafters[{entry.name}]: {text}") from error
    _check_sets(config, target)
    return replace(config, drafters=drafters)


def _check_held_out(config: DrafterTrainConfig) -> None:
    if config.held_out.greedy_share == 0.0:
        raise ValueError("held_out.greedy_share is 0, but acceptance is measured along greedy answers; set it to 1")
    if config.held_out.as_given:
        raise ValueError(
            "held_out.as_given is set, but acceptance is measured along the target's own answers; leave it out (of "
            "answers it says what is trained on)"
        )
    steps = config.evaluation.draft_steps
    if config.held_out.answer_tokens < steps + 2:
        raise ValueError(
            f"held_out.answer_tokens must be at least {steps + 2} for evaluation.draft_steps={steps}, got "
            f"{config.held_out.answer_tokens}"
        )


def check_answers(config: DrafterTrainConfig, target: FrozenTarget) -> None:
    """`check_config` of what is made before the training alone."""
    _check_engines(config)
    _check_held_out(config)
    _check_sets(config, target)


def _check_engines(config: DrafterTrainConfig) -> None:
    check_parents(config.work_folder / "any", f"work_dir is {config.work_folder}")
    check_overrides(config.engines.extra, "engines.extra")
    if config.engines.dtype is not None:
        check_overrides({"dtype": config.engines.dtype}, "engines")


def _check_sets(config: DrafterTrainConfig, target: FrozenTarget) -> None:
    for name in ("answers", "held_out"):
        _check_answers(getattr(config, name), name, config.work_folder / name, target)
    _check_none_is_evaluated(config)


def _check_none_is_evaluated(config: DrafterTrainConfig) -> None:
    """Of what was written and answered already, maybe before a set lay on this machine or its hashes shipped."""
    folder, written = config.work_folder / "answers", config.work_folder / "answers_prompts"
    there = {file: stored_prompts(file) for file in shard_files(folder).values()}
    there[written] = written_prompts(written, config.answers.count)
    avoid = evaluation_hashes()
    for file, prompts in there.items():
        found = next((prompt for prompt in prompts if part_hashes(prompt) & avoid), None)
        if found is not None:
            raise ValueError(
                f"{file} holds a prompt that is for evaluation ({found[:60]!r}), and a drafter trained on it would be "
                f"measured on what it has seen; delete {folder} and {written} to have other ones, or choose another "
                "work_dir"
            )


def _check_device(config: DrafterTrainConfig) -> None:
    """Check the GPUs of this machine and of a cluster started on it; what another cluster has, it knows itself."""
    if config.workers is None:
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "device is cuda, but there is no CUDA GPU here that PyTorch can use; set device=cpu, or train on a Ray "
                "cluster that has GPUs (workers, docs/training.md)"
            )
        return
    wanted, here = config.workers.count * config.workers.num_gpus, torch.cuda.device_count()
    if not os.environ.get("RAY_ADDRESS") and wanted > here:
        raise ValueError(
            f"workers.count={config.workers.count} with workers.num_gpus={config.workers.num_gpus} ask for {wanted} "
            f"GPUs, but this machine has {here}; lower them, or name a Ray cluster that has as many in RAY_ADDRESS"
        )


def _check_answers(config: AnswersConfig, name: str, folder: Path, target: FrozenTarget) -> None:
    for setting, most in (("seed", MAX_SEED), ("count", MAX_COUNT), ("answer_tokens", MAX_COUNT)):
        found = getattr(config, setting)
        if not 0 <= found <= most:
            raise ValueError(f"{name}.{setting} must be at most {most}, and not negative, got {found}")
    if not missing_shards(folder, config):
        return
    longest = getattr(target.model.config, "max_position_embeddings", None)
    if longest is not None and config.most_tokens > longest:
        raise ValueError(
            f"{name} asks for sequences of up to {config.most_tokens} tokens (max_prompt_tokens, answer_tokens and the "
            f"chat template), but the target was made for {longest}; lower them"
        )
    if not is_text(config.prompts) and not target.tokenizer.chat_template:
        raise ValueError(
            f"{name}.prompts={config.prompts} are messages of a chat, but the target's tokenizer has no chat template; "
            "name a folder of text files, whose beginnings the target continues"
        )
    if config.as_given:
        ChatTemplate.of(target.tokenizer).check_takes_answers()
    if os.path.isdir(config.prompts) and not any(p.is_file() for p in Path(config.prompts).rglob("*")):
        raise ValueError(f"{name}.prompts={config.prompts} is a folder without files; put text files there")


def _check_head(
    config: DrafterTrainConfig,
    entry: DrafterEntry,
    target: FrozenTarget,
    made_before: set[str],
    load_base: Callable[[Path], tuple[Drafter, CheckpointInfo]],
) -> None:
    if entry.family.config_class.reads_target:
        check_host(target.model.config)
    body = body_for(target, entry.drafter, config.recipe)
    entry.draft_head.check_sizes(body.hidden_size, body.vocab_size)
    positions = entry.family.training.draft_steps(body, config.recipe)
    _check_lengths(config, positions, body.max_draft_steps)
    if entry.tree is not None:
        entry.tree.check(target.info(config.target_name, ()), positions)
    if entry.base in made_before:
        return  # which is looked at when it is there
    origin = origin_of(config, entry, target)
    if origin.base is not None:
        check_base(target, entry, *load_base(origin.base))
    else:
        entry.draft_head.check_artifacts(origin.artifacts, body.vocab_size)


def _check_lengths(config: DrafterTrainConfig, positions: int, most: int | None) -> None:
    measured = config.evaluation.draft_steps
    measured = min(measured, most or measured)
    for name, steps, setting in (
        ("answers", positions, "recipe.ttt_steps, or the drafter's positions"),
        ("held_out", measured, "evaluation.draft_steps"),
    ):
        shortest = getattr(config, name).min_prompt_tokens
        if shortest < steps + 1:
            raise ValueError(
                f"{name}.min_prompt_tokens must be at least {steps + 1} for {steps} draft positions ({setting}), got "
                f"{shortest}"
            )
