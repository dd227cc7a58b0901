"""One draft step (gamma = 1): no draft decode pass exists, the one draft comes from the extend after verification."""

from engines import Ids, Oracle, running_engine
from fixture_models import DRAFTERS
from lossless import check_counts, check_greedy_identity


def test_greedy_identity(prompts: list[Ids], oracle: Oracle) -> None:
    with running_engine(DRAFTERS["slimspec"], draft_steps=1) as engine:
        check_counts(check_greedy_identity(engine, DRAFTERS["slimspec"], prompts, oracle, is_first=True), 1)
