"""SpecFormer in a real engine: token-identical to plain decoding, its cache against recomputing everything, and live
swap."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ids, Oracle, generate, running_engine
from fixture_models import CALIBRATIONS, DRAFTERS, TARGET
from last_hidden_cases import as_answers, save, train
from lossless import Lossless, check_counts, check_greedy_identity, check_swap_and_its_refusals, with_weights_of
from small_world import untrained

from rayspec.artifacts import load_artifacts
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.adapter.engine import swap_drafter
from sglang_ext.drafters import family
from sglang_ext.drafters.checkpoint import load_drafter

STEPS, POSITIONS = 3, 4  # fewer are drafted than it was made for
SLIM = {"kind": "slimspec", "rank": 32}
SPECS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "specformer": ({}, SLIM),
    "truncated": ({}, {"kind": "truncated", "size": 1024}),
    "routed": (
        {},
        {"kind": "dynaspec", "clusters": 128, "first": 32, "later": 16, "rule": "fixed", "router_width": 64},
    ),
}
OTHER_BODY = ({"causal": True}, SLIM)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget.load(TARGET, torch.float32)


@pytest.fixture(scope="module")
def drafters(
    target: FrozenTarget, prompts: list[Ids], oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Trained for seconds, on the very answers that they are to draft."""
    folder, answers = tmp_path_factory.mktemp("drafters"), as_answers(prompts, oracle.answers)
    artifacts = {
        "ids": load_artifacts(CALIBRATIONS / "vocabtrim-2048")[0]["ids"],
        "cluster_of": load_artifacts(CALIBRATIONS / "clusters-128")[0]["cluster_of"],
    }
    made = {}
    for name, (options, head) in (SPECS | {"causal": OTHER_BODY}).items():
        torch.manual_seed(0)
        drafter = untrained(target, "specformer", {"positions": POSITIONS, **options}, head, artifacts)
        train(drafter, target, answers, steps=8 if name in ("specformer", "truncated") else 1, batch_size=16, lr=1e-3)
        made[name] = save(folder / name, drafter, target, None)
    return made


@pytest.fixture(scope="module")
def engine(drafters: dict[str, Path]) -> Iterator[Any]:
    with running_engine(drafters["specformer"], draft_steps=STEPS) as engine:
        yield engine


@pytest.mark.parametrize("name", SPECS)
def test_greedy_identity(engine: Any, name: str, drafters: dict[str, Path], prompts: list[Ids], oracle: Oracle) -> None:
    answers = check_greedy_identity(engine, drafters[name], prompts, oracle, is_first=name == "specformer")
    if name != "routed":  # its own loss trains the router alone
        check_counts(answers, STEPS)


def test_the_cache_holds_what_recomputing_gives(
    engine: Any, drafters: dict[str, Path], target: FrozenTarget, prompts: list[Ids], oracle: Oracle
) -> None:
    """Every draft is that of the whole context without a cache, after any number of rejected tokens and with a prefix
    of another request's: as many verify steps, as many accepted drafts."""
    swap_drafter(engine, str(drafters["specformer"]))
    drafter, _ = load_drafter(drafters["specformer"])
    for prompt, answer in zip(prompts[:12], oracle.answers, strict=False):
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            slots_TKH = drafter.begin(family("specformer").training.carried(drafter, target, ids)[0][0], STEPS)
            drafts_TK = torch.stack([drafter.lm_head.best(slots_TKH[:, i], i)[:, 0] for i in range(STEPS)], dim=1)
        place, steps, accepted = len(prompt), 0, 0  # the root, which the prompt's own pass has named
        while place < ids.shape[1] - 1:
            right = 0
            while (
                right < STEPS
                and place + right + 1 < ids.shape[1]
                and (int(drafts_TK[place - 1, right]) == int(ids[0, place + right + 1]))
            ):
                right += 1
            place, steps, accepted = place + 1 + right, steps + 1, accepted + right
        info = generate(engine, [prompt])[0]["meta_info"]
        assert info["spec_verify_ct"] == steps
        assert 0 <= info["spec_num_correct_drafts"] - accepted <= STEPS  # the last block may go past the known answer


class TestLossless(Lossless):
    drafter = "specformer"


def test_swap_and_its_refusals(
    engine: Any, drafters: dict[str, Path], tmp_path: Path, prompts: list[Ids], oracle: Oracle
) -> None:
    faulty = {
        r"missing lm_head\.down": with_weights_of(drafters["specformer"], drafters["truncated"], tmp_path / "faulty"),
        r"its body .* differs": drafters["causal"],
        "a drafter of kind eagle3 needs another worker": DRAFTERS["full"],
    }
    check_swap_and_its_refusals(engine, drafters, "specformer", "truncated", faulty, prompts, oracle)
