"""What several modules need, made once a session: answers that speculative engines are held against, and drafters."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import shared_fixtures  # noqa: F401  (defines kernels so that they can be interpreted, before others import them)
import torch
from carried_workers import asked, serves  # noqa: F401  (fixtures)
from draft_workers import spec, worker  # noqa: F401  (fixtures)
from engines import (
    NEW_TOKENS,
    NUM_PROMPTS,
    NUM_STOPS,
    Ids,
    Oracle,
    end_kept_engine,
    generate,
    kept_engine,
    output_ids,
    running_engine,
)
from fixture_models import DRAFTERS, TARGET, prompt_texts
from last_hidden_cases import as_answers
from made_once import made_once
from toy import Toy, make_toy
from trained_drafters import trained_drafters
from transformers import AutoModelForCausalLM, AutoTokenizer

from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.adapter.engine import swap_drafter


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="session")
def prompts(tokenizer: Any) -> list[Ids]:
    return [tokenizer.encode(text) for text in prompt_texts(NUM_PROMPTS)]


@pytest.fixture(scope="session")
def long_prompt(prompts: list[Ids]) -> Ids:
    """Nearly the whole context of 2048 tokens."""
    return [token for prompt in prompts for token in prompt][:2000]


@pytest.fixture(scope="session")
def oracle(prompts: list[Ids], long_prompt: Ids, request: pytest.FixtureRequest) -> Oracle:
    """What plain decoding answers; asked by the worker that needs it first."""
    _, answers = made_once(request.config, "oracle", lambda _: asdict(_ask_plain_engine(prompts, long_prompt)))
    return Oracle(**answers)


def _ask_plain_engine(prompts: list[Ids], long_prompt: Ids) -> Oracle:
    with running_engine(None) as engine:
        answers = output_ids(generate(engine, prompts))
        stop_tokens = [answer[len(answer) // 2] for answer in answers]
        stopped = [
            generate(engine, [prompt], stop_token_ids=[stop])[0]["output_ids"]
            for prompt, stop in zip(prompts[:NUM_STOPS], stop_tokens[:NUM_STOPS], strict=True)
        ]
        return Oracle(answers, stop_tokens, stopped, generate(engine, [long_prompt], 24)[0]["output_ids"])


@pytest.fixture(scope="session")
def demo_target() -> FrozenTarget:
    return FrozenTarget.load(TARGET, torch.float32)


@pytest.fixture(scope="session")
def drafters_of(
    demo_target: FrozenTarget, prompts: list[Ids], oracle: Oracle, request: pytest.FixtureRequest
) -> Callable[[str], dict[str, Path]]:
    """The drafters of a family, made when they are first asked for."""
    answers = as_answers(prompts, oracle.answers)

    def make(family: str, folder: Path) -> dict[str, str]:
        made = trained_drafters(family, demo_target, answers, folder)
        return {name: os.path.relpath(path, folder) for name, path in made.items()}

    @cache
    def drafters(family: str) -> dict[str, Path]:
        folder, made = made_once(request.config, family, lambda folder: make(family, folder))
        return {name: folder / path for name, path in made.items()}

    return drafters


@pytest.fixture
def eagle3_chain(oracle: Oracle) -> Any:
    """An engine with a chain of four drafts by the full head, which was made after the plain one of the oracle."""
    engine = kept_engine(DRAFTERS["full"], draft_steps=4, enable_custom_logit_processor=True)
    swap_drafter(engine, str(DRAFTERS["full"]))
    return engine


@pytest.fixture(scope="module", autouse=True)
def _no_engine_is_left() -> Iterator[None]:
    """An idle one looks around every second, which adds up while other modules run."""
    yield
    end_kept_engine()


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy") / "target")


@pytest.fixture(scope="session")
def hf_answers(prompts: list[Ids]) -> list[Ids]:
    """Hugging Face's greedy answers, one prompt at a time: an oracle that shares no code with SGLang."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers
