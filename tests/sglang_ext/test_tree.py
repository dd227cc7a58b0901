"""Trees (topk > 1): token-identical to plain decoding for every head."""

from collections.abc import Iterator
from typing import Any

import pytest
from engines import Ids, Oracle, running_engine
from fixture_models import DRAFTERS
from lossless import Lossless, check_counts, check_greedy_identity

STEPS, TOPK, NODES = 4, 4, 12


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with running_engine(DRAFTERS["full"], draft_steps=STEPS, topk=TOPK, num_draft_tokens=NODES) as engine:
        yield engine


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_identity(engine: Any, kind: str, prompts: list[Ids], oracle: Oracle) -> None:
    answers = check_greedy_identity(engine, DRAFTERS[kind], prompts, oracle, is_first=kind == "full")
    check_counts(answers, STEPS)


class TestLossless(Lossless):
    """Of the drafter that the engine begins with."""
