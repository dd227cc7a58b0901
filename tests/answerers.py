"""A target's answers without an engine: Hugging Face's own `generate`, one request at a time."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from rayspec.training.data.answers import AnswersConfig, AnswerSet, Prompt, TargetName, make_answers, read_answers
from rayspec.training.data.asking import Asking, Request
from rayspec.training.frozen_target import FrozenTarget

T = TypeVar("T")


class InTurn:
    """A pool of one that answers by `answer`, piece after piece."""

    def __init__(self, answer: Callable[[Sequence[Request]], list[list[int]]]) -> None:
        self.answer = answer

    def run(self, pieces: Mapping[int, Callable[[], Asking[T]]]) -> Iterator[tuple[int, T]]:
        for number in sorted(pieces):
            yield number, self.finish(pieces[number]())

    def finish(self, asking: Asking[T]) -> T:
        try:
            requests = next(asking)
            while True:
                requests = asking.send(self.answer(requests))
        except StopIteration as end:
            return end.value


def answerer(target: FrozenTarget) -> InTurn:
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

    return InTurn(lambda requests: [one(request) for request in requests])


def answer_in_process(
    folder: Path, target: FrozenTarget, config: AnswersConfig, prompts: Sequence[Sequence[int]]
) -> None:
    """`make_answers` to prompts that are ids already."""
    make_answers(folder, name_of(target), config, as_prompts(prompts), answerer(target))


def short_answers(folder: Path, target: FrozenTarget, count: int, **options: Any) -> AnswerSet:
    """Answers of 14 tokens to prompts of 8, 9, 10, ... tokens that are drawn from the tiny target's vocabulary."""
    sizes = {"min_prompt_tokens": 8, "max_prompt_tokens": 20, "answer_tokens": 14, "batch_size": count}
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 257, (8 + n,), generator=generator).tolist() for n in range(count)]
    answer_in_process(folder, target, AnswersConfig(count=count, **sizes, **options), prompts)
    return read_answers(folder)


def as_prompts(prompts: Sequence[Sequence[int]]) -> list[Prompt]:
    return [Prompt(str(ids), ids) for ids in prompts]


def name_of(target: FrozenTarget) -> TargetName:
    return TargetName(Path(target.folder).name, target.sha256)
