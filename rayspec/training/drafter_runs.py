"""All of one configuration: answers where they are missing, then every head, each skipped once it is exported."""

from __future__ import annotations

from typing import Any

import torch

from rayspec.identity import differences
from rayspec.training.acceptance import Acceptance
from rayspec.training.checks import check_config
from rayspec.training.data.answer_engines import answer_engines
from rayspec.training.data.answers import (
    AnswersConfig,
    TargetName,
    check_index,
    make_answers,
    missing_shards,
    read_answers,
)
from rayspec.training.data.chat import ChatTemplate
from rayspec.training.data.prompts import check_source, evaluation_hashes, prompts_of
from rayspec.training.data.self_prompts import prompt_hash
from rayspec.training.drafter import summary, train_drafter
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget, target_sha256
from rayspec.training.reckoning import reckon
from rayspec.training.served import check_served
from sglang_ext.artefacts import DRAFTER, WEIGHTS
from sglang_ext.drafters import DEFAULT
from sglang_ext.drafters.checkpoint_config import read_config
from sglang_ext.fingerprints import weights_sha256
from sglang_ext.folders import check_place
from sglang_ext.heads import head_config

SETS = ("answers", "held_out")
ANSWERS_SHA256 = "trained_on.sha256 (the answers)"


def plan(config: DrafterTrainConfig) -> list[str]:
    """What `train_all` would do, one line each; nothing is written. Raises ValueError for what it would refuse."""
    sha256 = target_sha256(config.target_folder)
    check_config(config)
    lines = [f"target {config.target_folder} (sha256 {sha256[:12]})"]
    for name in SETS:
        settings: AnswersConfig = getattr(config, name)
        check_source(settings, name)
        folder = config.work_folder / name
        check_index(folder, sha256, settings)
        missing = len(missing_shards(folder, settings))
        state = "complete" if not missing else f"{missing} of {settings.num_shards} shards to generate"
        source = f"{settings.prompts} as given" if settings.as_given else settings.prompts
        lines.append(f"{name}: {settings.count} sequences from {source} in {folder}: {state}")
    r = config.recipe
    lines.append(
        f"recipe: {r.num_steps} steps of {r.batch_size} sequences "
        f"({r.num_steps * r.batch_size / config.answers.count:.2f} passes), {r.ttt_steps} rollout steps, {r.optimizer}"
        + (f", CSRA {r.csra_weight} at temperature {r.csra_temperature}" if r.csra_weight else "")
    )
    for head in config.drafters:
        folder = config.output_folder / head.name
        unfinished = sorted((config.work_folder / "unfinished" / head.name).glob("step-*"))
        if is_exported(config, head, sha256):
            state = "already exported"
        elif unfinished:
            state = f"to resume at {unfinished[-1].name}"
        else:
            state = "to train"
        drafter = "" if head.drafter == {"kind": DEFAULT} else f"{dict(head.drafter)} "
        lines.append(f"{head.name} {drafter}{dict(head.draft_head)} -> {folder}: {state}")
    return lines + reckon(config)


def train_all(config: DrafterTrainConfig) -> dict[str, Acceptance | None]:
    """Run the configuration; {name: held-out acceptance, None where it was already exported}. Raises ValueError."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    target = FrozenTarget.load(config.target_folder, torch.bfloat16 if config.recipe.bfloat16 else torch.float32)
    check_config(config)
    results: dict[str, Acceptance | None] = {}
    todo = []
    for head in config.drafters:
        if is_exported(config, head, target.sha256):
            print(f"{head.name}: already exported to {config.output_folder / head.name}, skipped")
            results[head.name] = None
        else:
            todo.append(head)
    if not todo:
        return results
    _make_answers(config, target)
    answers, held_out = (read_answers(config.work_folder / name) for name in SETS)
    print(f"{answers.num_answer_tokens} answer tokens to train on, {held_out.num_answer_tokens} held out", flush=True)
    for head in todo:
        results[head.name] = acceptance = train_drafter(config, head, target, answers, held_out)
        print(f"{head.name}: {summary(acceptance)}", flush=True)
        served = check_served(config, head, target, held_out)
        if served is not None:
            print(f"{head.name}: {served}", flush=True)
    return results


def is_exported(config: DrafterTrainConfig, head: DrafterEntry, target_sha256: str) -> bool:
    """Whether this very drafter lies in the output folder. Raises ValueError if anything else does.

    Answers that are gone are not compared: a shipped drafter is finished on a machine that never made any.
    """
    folder = config.output_folder / head.name
    if not DRAFTER.is_ours(folder):
        check_place(folder, DRAFTER)
        return False
    found = read_config(folder)
    ours = found.get("rayspec")
    trained_on = ours.get("trained_on") if isinstance(ours, dict) else None
    sizes: list[Any] = [found.get(name) for name in ("hidden_size", "vocab_size")]
    if not isinstance(ours, dict) or not isinstance(trained_on, dict) or not all(type(n) is int for n in sizes):
        raise ValueError(f"{folder} is no drafter that training has made; choose another output_dir or name")
    cls, options = head_config(head.draft_head, hidden_size=sizes[0], vocab_size=sizes[1])
    stored: dict[str, Any] = {
        **ours,
        "draft_head": found.get("draft_head"),
        "trained_on.target_sha256": trained_on.get("target_sha256"),
        "base.sha256": (ours.get("base") or {}).get("sha256"),
        ANSWERS_SHA256: trained_on.get("sha256"),
    }
    wanted: dict[str, Any] = {
        # with the options that were left at their defaults: the checkpoint spells them out
        "draft_head": {"kind": cls.kind, **options.options()},
        "recipe": config.recipe.to_dict(),
        **dict.fromkeys(("tree", "freeze_head", "train_body")),  # also where they are not asked for
        **head.asked(),
        "trained_on.target_sha256": target_sha256,
    }
    base = config.base_folder(head)
    if base is not None:
        wanted["base.sha256"] = weights_sha256(base / WEIGHTS)
    if not missing_shards(config.work_folder / "answers", config.answers):
        wanted[ANSWERS_SHA256] = read_answers(config.work_folder / "answers").sha256
    for key, was, now in differences(stored, wanted, keys=wanted):
        raise ValueError(
            f"{folder} holds a drafter with {key} {was}, this run has {now}; delete that folder to train it again, or "
            "choose another output_dir"
        )
    return True


def _make_answers(config: DrafterTrainConfig, target: FrozenTarget) -> None:
    """The answers of both sets where shards are missing, the held-out ones first: no prompt of theirs is trained on."""
    todo: dict[str, AnswersConfig] = {name: getattr(config, name) for name in SETS[::-1]}
    for name, settings in todo.items():
        check_index(config.work_folder / name, target.sha256, settings)
    if not any(missing_shards(config.work_folder / name, settings) for name, settings in todo.items()):
        return
    chat = ChatTemplate.of(target.tokenizer) if target.tokenizer.chat_template else None
    longest = max(settings.most_tokens for settings in todo.values())
    logs = config.work_folder / "logs"
    print(f"starting {config.engines.count} engine(s) for the answers; log in {logs}", flush=True)
    avoid = evaluation_hashes()
    made = len([*config.work_folder.glob("*/answers-*"), *config.work_folder.glob("*/prompts-*")])
    seed = 1000 * config.answers.seed + made  # a resumed run must not draw again what it has
    with answer_engines(config.engines, config.target_folder, longest, target.eos_ids, logs, seed) as answer:
        for name, settings in todo.items():
            prompts = prompts_of(
                settings, name, config.work_folder, config.corpus, target.tokenizer, chat, answer, avoid
            )
            make_answers(
                config.work_folder / name,
                TargetName(config.target_name, target.sha256),
                settings,
                prompts,
                answer,
                chat,
            )
            avoid |= {prompt_hash(prompt.text) for prompt in prompts}
