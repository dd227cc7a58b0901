"""Sampled tokens under EAGLE against the target's law by Hugging Face, by the rules that EAGLE-3's tests hold to
account (test_laws.py): drawn chain, and tree; and the drafts of a drawn chain against the head's own law."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_laws import check_drafts
from eagle_cases import trained_eagle
from engines import running_engine
from faults import plant
from independent_cases import save_with_heads
from last_hidden_cases import as_answers
from laws import check_greedy_in_a_mixed_batch, check_laws, check_seeds, sample_laws
from test_laws import FEWER, FILTERS, PAIRS, REQUESTS, ROUNDS, check_pairs
from toy import CLUSTERS, DRAFT_STEPS, DYNASPEC, IDS, TRUNCATED, Toy, V, make_toy

from sglang_ext.adapter.engine import swap_drafter

HEADS: dict[str, dict[str, Any]] = {"full": {"kind": "full"}, "truncated": TRUNCATED, "routed": DYNASPEC}
ENGINES: dict[str, dict[str, Any]] = {
    "sampled_chain": {"speculative_use_rejection_sampling": True, "enable_custom_logit_processor": True},
    "tree": {"topk": 3, "num_draft_tokens": 8},
}
sampled_chain = pytest.mark.parametrize("engine", ["sampled_chain"], indirect=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy") / "target")


@pytest.fixture(scope="module")
def drafters(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    generator = torch.Generator().manual_seed(0)
    prompts, continued = (torch.randint(V, (256, n), generator=generator).tolist() for n in (4, 12))
    drafter = trained_eagle(toy.target, as_answers(prompts, continued), steps=80, batch_size=64)
    artifacts = {"ids": IDS, "cluster_of": CLUSTERS}
    return save_with_heads(tmp_path_factory.mktemp("drafters"), drafter, toy.target, HEADS, artifacts)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, toy: Toy, drafters: dict[str, Path]) -> Iterator[Any]:
    options = {"target": toy.folder, "draft_steps": DRAFT_STEPS, "max_running_requests": 128} | ENGINES[request.param]
    with running_engine(drafters["truncated"], skip_tokenizer_init=True, **options) as engine:
        yield engine


def test_law_of_filters(engine: Any, toy: Toy) -> None:
    check_laws(engine, toy, FILTERS, requests=REQUESTS)


def test_seeds(engine: Any) -> None:
    check_seeds(engine, top_p=0.9, min_p=0.05)


def test_greedy_requests_stay_greedy(engine: Any, toy: Toy) -> None:
    check_greedy_in_a_mixed_batch(engine, toy)


@pytest.mark.parametrize("name", HEADS)
def test_law_with_every_head(
    request: pytest.FixtureRequest, engine: Any, toy: Toy, drafters: dict[str, Path], name: str
) -> None:
    swap_drafter(engine, str(drafters[name]))
    is_chain = request.node.callspec.params["engine"] == "sampled_chain"
    check_pairs(engine, toy, PAIRS if is_chain and name != "routed" else FEWER)


@sampled_chain
def test_verifying_with_another_law_than_the_drafts_is_caught(engine: Any, toy: Toy, drafters: dict[str, Path]) -> None:
    """The negative control of drawn chains."""
    swap_drafter(engine, str(drafters["full"]))
    plant(engine, shortlist=IDS.tolist())
    try:
        report = sample_laws(engine, toy, {"alone": {}}, requests=REQUESTS)["alone"]
    finally:
        plant(engine, shortlist=[])
    assert report.fit.p_value < 1e-6


@sampled_chain
@pytest.mark.parametrize("name", HEADS)
def test_drafts_follow_the_law_of_the_head(engine: Any, toy: Toy, drafters: dict[str, Path], name: str) -> None:
    check_drafts(engine, toy, drafters[name], FILTERS["all"], requests=ROUNDS)
