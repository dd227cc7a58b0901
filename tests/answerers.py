"""A target's answers without an engine: Hugging Face's own `generate`, one request at a time."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from rayspec.training.data.answers import Answerer, AnswersConfig, Prompt, Request, TargetName, make_answers
from rayspec.training.frozen_target import FrozenTarget


def answerer(target: FrozenTarget) -> Answerer:
    """What is drawn depends on nothing but the number of requests before it."""
    seeds = itertools.count()

    def one(request: Request) -> list[int]:
        ids = torch.tensor([list(request.prompt_ids)])
        drawn = {"do_sample": True, "temperature": request.temperature, "top_p": 1.0, "top_k": 0}
        with torch.random.fork_rng():
            torch.manual_seed(next(seeds))
            whole = target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.max_new_tokens,
                eos_token_id=[*target.eos_ids, *request.stop_ids],
                pad_token_id=0,
                **(drawn if request.temperature else {"do_sample": False}),
            )
        return whole[0, ids.shape[1] :].tolist()

    return lambda requests: [one(request) for request in requests]


def answer_in_process(
    folder: Path, target: FrozenTarget, config: AnswersConfig, prompts: Sequence[Sequence[int]]
) -> None:
    """`make_answers` to prompts that are ids already."""
    make_answers(folder, name_of(target), config, as_prompts(prompts), answerer(target))


def as_prompts(prompts: Sequence[Sequence[int]]) -> list[Prompt]:
    return [Prompt(str(ids), ids) for ids in prompts]


def name_of(target: FrozenTarget) -> TargetName:
    return TargetName(Path(target.folder).name, target.sha256)
