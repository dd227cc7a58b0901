"""Trees (topk > 1): token-identical to plain decoding for every head."""

from collections.abc import Iterator
from typing import Any

import pytest
from engines import DRAFTERS, Ids, Oracle, running_engine
from lossless import (
    check_counts,
    check_greedy_identity,
    check_long_and_one_token_prompts,
    check_sampling_path,
    check_stop_inside_of_a_block,
)

STEPS, TOPK, NODES = 4, 4, 12


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with running_engine(DRAFTERS["full"], draft_steps=STEPS, topk=TOPK, num_draft_tokens=NODES) as engine:
        yield engine


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_identity(engine: Any, kind: str, prompts: list[Ids], oracle: Oracle) -> None:
    check_counts(check_greedy_identity(engine, kind, prompts, oracle), STEPS)


def test_stop_inside_of_a_block(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    check_stop_inside_of_a_block(engine, prompts, oracle)


def test_long_and_one_token_prompts(engine: Any, long_prompt: Ids, prompts: list[Ids], oracle: Oracle) -> None:
    check_long_and_one_token_prompts(engine, long_prompt, prompts, oracle)


def test_sampling_path(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    check_sampling_path(engine, prompts, oracle)
