"""MEDUSA, BPD, HYDRA and SLIM in real engines: token-identical to plain decoding for chains and trees, and live
swap."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ids, Oracle, running_engine
from fixture_models import DRAFTERS, TARGET
from last_hidden_cases import DEMO, as_answers, demo_drafters, slim_on
from lossless import Lossless, check_counts, check_greedy_identity, check_swap_and_its_refusals, with_weights_of

from rayspec.training.frozen_target import FrozenTarget

STEPS = 3
ENGINES: dict[str, dict[str, Any]] = {
    "chain": {"drafter": "medusa", "draft_steps": STEPS},  # BPD
    "tree": {"drafter": "hydra", "draft_steps": STEPS, "topk": 4, "num_draft_tokens": 12},
    "slim": {"drafter": "slim", "draft_steps": STEPS, "topk": 8, "num_draft_tokens": 20},
}
NAMES = [*DEMO, "slim", "slim_zero"]


@pytest.fixture(scope="module")
def drafters(prompts: list[Ids], oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    target, answers = FrozenTarget.load(TARGET, torch.float32), as_answers(prompts, oracle.answers)
    folder = tmp_path_factory.mktemp("drafters")
    made = demo_drafters(folder, target, answers)
    made["slim"] = slim_on(folder / "slim", made["medusa"], answers, hypotheses=8)
    # steps of another width: often nothing but the root is left to verify
    made["slim_zero"] = slim_on(folder / "slim_zero", made["medusa"], answers, hypotheses=12, unseen="zero")
    return made


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, drafters: dict[str, Path]) -> Iterator[Any]:
    options = dict(ENGINES[request.param])
    with running_engine(drafters[options.pop("drafter")], **options) as engine:
        yield engine


@pytest.mark.parametrize("name", NAMES)
def test_greedy_identity(
    request: pytest.FixtureRequest,
    engine: Any,
    name: str,
    drafters: dict[str, Path],
    prompts: list[Ids],
    oracle: Oracle,
) -> None:
    shape = request.node.callspec.params["engine"]
    if shape == "chain" and name.startswith("slim"):
        pytest.skip("a chain takes no notice of a tree")
    is_first = name == ENGINES[shape]["drafter"]
    answers = check_greedy_identity(engine, drafters[name], prompts, oracle, is_first=is_first)
    if name != "medusa_routed":
        check_counts(answers, STEPS)


class TestLossless(Lossless):
    drafter = "hydra"


def test_swap_and_its_refusals(
    engine: Any, drafters: dict[str, Path], tmp_path: Path, prompts: list[Ids], oracle: Oracle
) -> None:
    faulty = {
        r"missing lm_head\.0\.down": with_weights_of(
            drafters["hydra"], drafters["medusa_truncated"], tmp_path / "faulty"
        ),
        "a drafter of kind eagle3 needs another worker": DRAFTERS["full"],
    }
    check_swap_and_its_refusals(engine, drafters, "medusa", "hydra", faulty, prompts, oracle)
