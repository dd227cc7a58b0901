"""What drafters are trained on, made before training: the target's answers and, where they are stored, its states.

`rayspec prepare` does this alone, `rayspec train` as its first part. Answers come from SGLang engines, hidden states
from the target as training loads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from rayspec.lock import held
from rayspec.training.checks import check_answers, checked_target
from rayspec.training.data.answer_engines import answer_engines
from rayspec.training.data.answers import (
    AnswersConfig,
    AnswerSet,
    Prompt,
    TargetName,
    check_index,
    make_answers,
    missing_shards,
    read_answers,
)
from rayspec.training.data.asking import Pool
from rayspec.training.data.chat import ChatTemplate
from rayspec.training.data.corpus import CORPUS
from rayspec.training.data.prompts import (
    SELF,
    check_source,
    given_prompts,
    is_text,
    own_prompts,
)
from rayspec.training.data.self_prompts import written_prompts
from rayspec.training.data.shards import PATTERN
from rayspec.training.drafter_config import SETS, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.hidden_states import are_stored, plan_states, with_states
from rayspec.workloads.prompt_hashes import evaluation_hashes, prompt_hash


class WorkFolderInUse(ValueError):
    """Another process prepares or trains in it; the message says which."""


@contextmanager
def work_folder_of_our_own(config: DrafterTrainConfig) -> Iterator[None]:
    """Keep other processes from writing into work_dir, which is made if it is missing, during the block. Raises
    WorkFolderInUse where one does."""

    def refusal(holder: str) -> WorkFolderInUse:
        return WorkFolderInUse(
            f"work_dir={config.work_folder} is in use by another rayspec train or prepare (process {holder}); wait for "
            "it, end it, or name another folder with work_dir=..."
        )

    config.work_folder.mkdir(parents=True, exist_ok=True)
    with held(config.work_folder / "lock", refusal):
        yield


def plan_sets(config: DrafterTrainConfig, target: FrozenTarget) -> list[str]:
    """A line for each set of answers, and one for stored hidden states. Raises ValueError for what would be refused."""
    lines = []
    for name in SETS:
        settings: AnswersConfig = getattr(config, name)
        check_source(settings, name)
        folder = config.work_folder / name
        check_index(folder, target.sha256, settings)
        missing, engines = len(missing_shards(folder, settings)), config.engines.count
        state = "complete" if not missing else f"{missing} of {settings.num_shards} shards to generate"
        if 0 < missing < engines:
            state += f", for {engines} engines (lower {name}.batch_size to give each one)"
        source = f"{settings.prompts} as given" if settings.as_given else settings.prompts
        lines.append(f"{name}: {settings.count} sequences from {source} in {folder}: {state}")
    if _missing_sets(config):
        # but the corpus, which it would take long to read
        given_sets(config, target.tokenizer, _chat(target.tokenizer), skip=CORPUS)
    return lines + plan_states(config, target)


def plan_prepare(config: DrafterTrainConfig) -> list[str]:
    """What `prepare` would do, one line each; nothing is written. Raises ValueError for what it would refuse."""
    target = checked_target(config)
    check_answers(config, target)
    return [f"target {config.target_folder} (sha256 {target.sha256[:12]})", *plan_sets(config, target)]


def prepare(config: DrafterTrainConfig) -> None:
    """Make what is missing. Raises ValueError, and EngineFailed where engines cannot answer."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    target = checked_target(config)
    check_answers(config, target)
    config = config.resolved()  # engines and workers may have another current folder
    with work_folder_of_our_own(config):
        sets = prepared_answers(config, target)  # engines hold the weights meanwhile
        if config.workers is not None:
            store_by_workers(config, target, sets)
        elif not are_stored(config, target, sets):
            with_states(config, load_target(config, target.sha256), sets)


def target_with_states(config: DrafterTrainConfig, target: FrozenTarget, sets: Collection[AnswerSet]) -> FrozenTarget:
    """The target as this process trains with it, of one that may be without weights. Hidden states that are asked for
    and not stored yet are computed by who has the device: this process, or the workers, beside whom it keeps the target
    to check what was trained. Raises ValueError, and as `states_by_workers`."""
    if config.workers is None:
        return with_states(config, load_target(config, target.sha256), sets)
    store_by_workers(config, target, sets)
    return load_target(config, target.sha256)


def store_by_workers(config: DrafterTrainConfig, target: FrozenTarget, sets: Collection[AnswerSet]) -> None:
    """The hidden states that are asked for and not stored yet. Raises as `states_by_workers`."""
    if not are_stored(config, target, sets):
        from rayspec.training.ray_train import states_by_workers  # with Ray, some seconds

        states_by_workers(config, target.sha256)


def load_target(config: DrafterTrainConfig, sha256: str) -> FrozenTarget:
    """The target as this process trains with it; `sha256` is the folder's. Raises ValueError."""
    return FrozenTarget.load(config.target_folder, config.target_dtype, device=own_device(config), sha256=sha256)


def own_device(config: DrafterTrainConfig) -> torch.device:
    """Where this process computes: it trains, or, beside workers that do, no more than checks what was trained."""
    return torch.device("cpu") if config.workers is not None else config.training_device


def prepared_answers(config: DrafterTrainConfig, target: FrozenTarget) -> tuple[AnswerSet, AnswerSet]:
    """The answers to train on and the held-out ones, made where shards are missing; of the target its tokenizer is
    used alone. Raises ValueError, EngineFailed."""
    make_all_answers(config, target)
    answers, held_out = (read_answers(config.work_folder / name) for name in SETS)
    print(f"{answers.num_answer_tokens} answer tokens to train on, {held_out.num_answer_tokens} held out", flush=True)
    return answers, held_out


def make_all_answers(config: DrafterTrainConfig, target: FrozenTarget) -> None:
    """The answers of both sets where shards are missing, the held-out ones first: no prompt of theirs is trained on.
    Engines are started where somebody has to answer. Raises ValueError, of too few prompts before any is answered."""
    for name in SETS:
        check_index(config.work_folder / name, target.sha256, getattr(config, name))
    missing = _missing_sets(config)
    if not missing:
        return
    chat = _chat(target.tokenizer)
    given, avoid = given_sets(config, target.tokenizer, chat)
    evaluated = evaluation_hashes()
    with _answerers(config, target) if any(not s.as_given for s in missing.values()) else nullcontext() as pool:
        for name, settings in missing.items():
            prompts = given.get(name)
            if prompts is None:
                assert pool is not None, "of answers as given the prompts are there"
                folder = config.work_folder / f"{name}_prompts"
                prompts = own_prompts(settings, name, folder, chat, pool, avoid)
                avoid |= _hashes(prompts)
            made_by = TargetName(config.target_name, target.sha256)
            make_answers(config.work_folder / name, made_by, settings, prompts, pool, chat, evaluated)


def given_sets(
    config: DrafterTrainConfig, tokenizer: Any, chat: ChatTemplate | None, skip: Collection[str] = ()
) -> tuple[dict[str, list[Prompt]], set[str]]:
    """({set: prompts} of those with shards missing whose prompts nobody has to write, hashes that no prompt to be
    written may have). `skip`: sources that are left out. Raises ValueError where there are too few."""
    avoid, given = evaluation_hashes(), {}
    for name in SETS:
        if getattr(config, name).prompts == SELF:
            there = written_prompts(config.work_folder / f"{name}_prompts", getattr(config, name).count)
            avoid |= {prompt_hash(text) for text in there}
    missing = _missing_sets(config)
    for name in SETS[::-1]:
        settings: AnswersConfig = getattr(config, name)
        if settings.prompts in (SELF, *skip) or (is_text(settings.prompts) and name not in missing):
            continue
        prompts = given_prompts(settings, name, config.corpus, tokenizer, chat, avoid)
        avoid |= _hashes(prompts)
        if name in missing:
            given[name] = prompts
    return given, avoid


def _hashes(prompts: Iterable[Prompt]) -> set[str]:
    return {prompt_hash(prompt.text) for prompt in prompts}


def _missing_sets(config: DrafterTrainConfig) -> dict[str, AnswersConfig]:
    """Those with shards missing, in the order in which they are made."""
    sets: dict[str, AnswersConfig] = {name: getattr(config, name) for name in SETS[::-1]}
    return {name: settings for name, settings in sets.items() if missing_shards(config.work_folder / name, settings)}


def _chat(tokenizer: Any) -> ChatTemplate | None:
    return ChatTemplate.of(tokenizer) if tokenizer.chat_template else None


def _answerers(config: DrafterTrainConfig, target: FrozenTarget) -> AbstractContextManager[Pool]:
    longest = max(config.answers.most_tokens, config.held_out.most_tokens)
    logs = config.work_folder / "logs"
    print(f"starting {config.engines.count} engine(s) for the answers; log in {logs}", flush=True)
    made = len([*config.work_folder.glob(f"*/{PATTERN}"), *config.work_folder.glob("*/prompts-*")])
    seed = 1000 * config.answers.seed + made  # a resumed run must not draw again what it has
    return answer_engines(config.engines, config.target_folder, longest, target.eos_ids, logs, seed)
