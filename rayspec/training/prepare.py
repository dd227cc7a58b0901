"""What drafters are trained on, made before training: the target's answers and, where they are stored, its states.

`rayspec prepare` does this alone, `rayspec train` as its first part. Answers come from SGLang engines, hidden states
from the target as training loads it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rayspec.training.checks import check_answers
from rayspec.training.data.answer_engines import answer_engines
from rayspec.training.data.answers import (
    AnswersConfig,
    AnswerSet,
    TargetName,
    check_index,
    make_answers,
    missing_shards,
    read_answers,
)
from rayspec.training.data.chat import ChatTemplate
from rayspec.training.data.prompts import check_source, evaluation_hashes, prompts_of
from rayspec.training.data.self_prompts import prompt_hash
from rayspec.training.data.shards import PATTERN
from rayspec.training.drafter_config import DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget, target_sha256
from rayspec.training.hidden_states import plan_states, with_states

SETS = ("answers", "held_out")


def plan_sets(config: DrafterTrainConfig, sha256: str) -> list[str]:
    """A line for each set of answers, and one for stored hidden states. Raises ValueError for what would be refused."""
    lines = []
    for name in SETS:
        settings: AnswersConfig = getattr(config, name)
        check_source(settings, name)
        folder = config.work_folder / name
        check_index(folder, sha256, settings)
        missing, engines = len(missing_shards(folder, settings)), config.engines.count
        state = "complete" if not missing else f"{missing} of {settings.num_shards} shards to generate"
        if 0 < missing < engines:
            state += f", for {engines} engines (lower {name}.batch_size to give each one)"
        source = f"{settings.prompts} as given" if settings.as_given else settings.prompts
        lines.append(f"{name}: {settings.count} sequences from {source} in {folder}: {state}")
    return lines + plan_states(config, sha256)


def plan_prepare(config: DrafterTrainConfig) -> list[str]:
    """What `prepare` would do, one line each; nothing is written. Raises ValueError for what it would refuse."""
    sha256 = target_sha256(config.target_folder)
    check_answers(config)
    return [f"target {config.target_folder} (sha256 {sha256[:12]})", *plan_sets(config, sha256)]


def prepare(config: DrafterTrainConfig) -> None:
    """Make what is missing. Raises ValueError, and EngineFailed where engines cannot answer."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    check_answers(config)
    sha256 = target_sha256(config.target_folder)
    # engines hold the weights meanwhile
    sets = prepared_answers(config, replace(FrozenTarget.without_weights(config.target_folder), sha256=sha256))
    if config.hidden_states == "offline":
        with_states(config, load_target(config, sha256), sets)


def load_target(config: DrafterTrainConfig, sha256: str) -> FrozenTarget:
    """As this process trains with it; `sha256` is the folder's. Raises ValueError."""
    return FrozenTarget.load(config.target_folder, config.recipe.target_dtype, device=own_device(config), sha256=sha256)


def own_device(config: DrafterTrainConfig) -> torch.device:
    """Where this process computes: it trains, or, beside workers that do, no more than checks what was trained."""
    if config.workers is not None or config.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda" if config.device == "cuda" or torch.cuda.is_available() else "cpu")


def prepared_answers(config: DrafterTrainConfig, target: FrozenTarget) -> tuple[AnswerSet, AnswerSet]:
    """The answers to train on and the held-out ones, made where shards are missing; of the target its tokenizer is
    used alone. Raises ValueError, EngineFailed."""
    make_all_answers(config, target)
    answers, held_out = (read_answers(config.work_folder / name) for name in SETS)
    print(f"{answers.num_answer_tokens} answer tokens to train on, {held_out.num_answer_tokens} held out", flush=True)
    return answers, held_out


def make_all_answers(config: DrafterTrainConfig, target: FrozenTarget) -> None:
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
    made = len([*config.work_folder.glob(f"*/{PATTERN}"), *config.work_folder.glob("*/prompts-*")])
    seed = 1000 * config.answers.seed + made  # a resumed run must not draw again what it has
    with answer_engines(config.engines, config.target_folder, longest, target.eos_ids, logs, seed) as pool:
        for name, settings in todo.items():
            prompts = prompts_of(settings, name, config.work_folder, config.corpus, target.tokenizer, chat, pool, avoid)
            make_answers(
                config.work_folder / name,
                TargetName(config.target_name, target.sha256),
                settings,
                prompts,
                pool,
                chat,
            )
            avoid |= {prompt_hash(prompt.text) for prompt in prompts}
