"""Two tensor-parallel ranks, of target and drafter: token-identical to plain decoding on one, swaps included."""

import pytest
from engines import Ids, Oracle, generate, output_ids, running_engine
from fixture_models import DRAFTERS
from lossless import check_counts

from sglang_ext.adapter.engine import swap_drafter


@pytest.mark.parametrize("tree", [{}, {"topk": 4, "num_draft_tokens": 12}], ids=["chain", "tree"])
def test_greedy_identity(tree: dict[str, int], prompts: list[Ids], oracle: Oracle) -> None:
    with running_engine(DRAFTERS["full"], draft_steps=4, tp_size=2, **tree) as engine:
        for kind in ("full", "specvocab"):
            swap_drafter(engine, str(DRAFTERS[kind]))
            answers = generate(engine, prompts[:24])
            assert output_ids(answers) == oracle.answers[:24]
            check_counts(answers, 4)
