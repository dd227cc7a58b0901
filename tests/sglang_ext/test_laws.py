"""Sampled tokens of real engines against the target's law by Hugging Face: plain decoding and the rules of a drawn
chain, a chain of best tokens and a tree (docs/methods.md, Verification), the latter with every kind of head; and the
drafts of a sampled chain against the head's own law."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_laws import check_drafts
from engines import running_engine
from faults import plant
from laws import check_greedy_in_a_mixed_batch, check_laws, check_seeds, fit, sample_laws
from toy import DRAFT_STEPS, HEADS, IDS, PROMPTS, Toy, V, filtered, make_toy
from volume import IS_FULL, volume

from sglang_ext.adapter.engine import swap_drafter

# pytest groups tests by the place of a parameter in its list: the engines that fewer tests need come first
ENGINES: dict[str, dict[str, Any]] = {
    "sampled_chain": {"speculative_use_rejection_sampling": True, "enable_custom_logit_processor": True},
    "tree": {"topk": 3, "num_draft_tokens": 8},
    "one_hot_chain": {},
    "plain": {},
}
every_engine = pytest.mark.parametrize("engine", ENGINES, indirect=True)
chain_and_tree = pytest.mark.parametrize("engine", ["sampled_chain", "tree"], indirect=True)
sampled_chain = pytest.mark.parametrize("engine", ["sampled_chain"], indirect=True)

FILTERS: dict[str, dict[str, Any]] = {
    "top_k_and_top_p": {"top_k": 5, "top_p": 0.7},
    "min_p": {"min_p": 0.12},
    "all": {"temperature": 0.8, "top_k": 8, "top_p": 0.85, "min_p": 0.05},
    "logit_bias": {"logit_bias": {"3": 1.5, "5": -1000.0, "9": -0.5}, "top_k": 6, "top_p": 0.9},
}

LONG = 53  # tokens of an answer: fewer requests for as many pairs
PAIRS = volume(100_000, 20_000)
FEWER = volume(20_000, 10_000)  # pairs, where other tests see more of the same rule
REQUESTS = volume(400, 100)  # where settings are mixed
ROUNDS = volume(2_000, 800)
OTHER_TEMPERATURE = 1.1 if IS_FULL else 1.2  # that must be told from the right one


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy") / "target")


@pytest.fixture(scope="module")
def drafters(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafters")
    return {head: toy.save_drafter(folder / head, head) for head in HEADS}


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, toy: Toy, drafters: dict[str, Path]) -> Iterator[Any]:
    options = {"target": toy.folder, "draft_steps": DRAFT_STEPS, "max_running_requests": 128} | ENGINES[request.param]
    drafter = None if request.param == "plain" else drafters["truncated"]
    with running_engine(drafter, skip_tokenizer_init=True, **options) as engine:
        yield engine


@every_engine
def test_law_of_filters(engine: Any, toy: Toy) -> None:
    reports = check_laws(engine, toy, FILTERS, requests=REQUESTS)
    # SGLang's own verification would never emit some of the tokens that plain decoding does
    assert any(
        (
            np.take_along_axis(top_p_of_top_k(sample.logits_RJV, 5, 0.7), sample.answers_RJ[..., None], axis=-1) == 0
        ).any()
        for sample in reports["top_k_and_top_p"].samples
    )


def top_p_of_top_k(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    least = np.sort(logits, axis=-1)[..., V - top_k, None]
    return filtered(np.where(logits < least, -1e9, logits), top_p=top_p)


@every_engine
def test_law_without_seeds(engine: Any, toy: Toy) -> None:
    check_laws(engine, toy, {"top_p": {"top_p": 0.9}}, requests=REQUESTS, seed=None)


@every_engine
def test_seeds(engine: Any) -> None:
    check_seeds(engine)
    check_seeds(engine, top_p=0.9, min_p=0.05)


@every_engine
def test_greedy_requests_stay_greedy(engine: Any, toy: Toy) -> None:
    check_greedy_in_a_mixed_batch(engine, toy)


@every_engine
def test_law(engine: Any, toy: Toy) -> None:
    check_pairs(engine, toy, FEWER)


@chain_and_tree
@pytest.mark.parametrize("head", HEADS)
def test_law_with_every_head(
    request: pytest.FixtureRequest, engine: Any, toy: Toy, drafters: dict[str, Path], head: str
) -> None:
    swap_drafter(engine, str(drafters[head]))
    check_pairs(engine, toy, PAIRS if request.node.callspec.params["engine"] == "sampled_chain" else FEWER)


@chain_and_tree
def test_law_of_redistribution_at_another_temperature(engine: Any, toy: Toy, drafters: dict[str, Path]) -> None:
    swap_drafter(engine, str(drafters["rdk"]))
    check_pairs(engine, toy, FEWER, temperature=0.7)


def check_pairs(engine: Any, toy: Toy, pairs: int, temperature: float = 1.0) -> None:
    """Also that a law that is only a little wrong would be seen."""
    requests = -(-pairs // (LONG - 2) // len(PROMPTS)) * len(PROMPTS)
    settings = {"alone": {"temperature": temperature}}
    report = check_laws(engine, toy, settings, requests=requests, new_tokens=LONG)["alone"]
    assert report.num_pairs >= pairs
    other = OTHER_TEMPERATURE * temperature
    assert fit(report.samples, lambda logits: filtered(logits, temperature=other)).p_value < 1e-6


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
@pytest.mark.parametrize("head", [head for head in HEADS if head != "dynaspec_union"])  # its law is that of a batch
def test_drafts_follow_the_law_of_the_head(engine: Any, toy: Toy, drafters: dict[str, Path], head: str) -> None:
    check_drafts(engine, toy, drafters[head], FILTERS["all"], requests=volume(1_200, 600))
