"""Sampled tokens of real engines against the target's distribution by Hugging Face, for every family, head and tree, by
the rules of a drawn chain, a chain of best tokens, a tree and a drawn tree (docs/methods.md, Verification); and the
drafts of drawn chains against the head's own distribution.

`ENGINES` says what is met. `make test` leaves out the engines whose rule and worker others show (`is_slow`), and
samples most for one drafter of each engine, and filters for one engine of each rule (`is_first`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributions import (
    FILTERS,
    check_distributions,
    check_greedy_in_a_mixed_batch,
    check_seeds,
    fit,
    sample_distributions,
)
from draft_distributions import PROMPT, check_drafts
from engines import Ids, kept_engine
from faults import plant
from toy import DRAFT_STEPS, HEADS, IDS, PROMPTS, Toy, V, filtered
from toy_drafters import FEATURE_HEADS, HYDRA_PREFIX, LAST_HIDDEN, SLIM_TREES, SPECFORMER, toy_drafters
from volume import IS_FULL, volume

from sglang_ext.adapter.engine import swap_drafter

DraftersOf = Callable[[str], dict[str, Path]]


@dataclass(frozen=True)
class Engine:
    """The first of `distributions` is what it starts with, and what is sampled most in `make test`."""

    family: str
    distributions: Sequence[str] = ()  # drafters whose tokens are held against the target's distribution
    drafts: Sequence[str] = ()  # and those whose drafts are held against their head's
    mixed: Sequence[str] = ()  # and those that meet filters, seeds and greedy requests
    shape: dict[str, Any] = field(default_factory=dict)
    slow: Sequence[
        str
    ] = ()  # of `distributions` and `drafts`, what `make test-full` alone meets: others show head and rule
    is_slow: bool = False  # all of it
    is_first: bool = False  # of its rule

    @property
    def is_drawn_chain(self) -> bool:
        return "speculative_use_rejection_sampling" in self.shape and "topk" not in self.shape


DRAWN = {"speculative_use_rejection_sampling": True}
PLANTED = {"enable_custom_logit_processor": True}  # for the negative controls
TREE = {"topk": 3, "num_draft_tokens": 8}
ENGINES: dict[str, Engine] = {
    "plain": Engine("plain", ["none"], mixed=["none"], is_first=True),
    "eagle3_drawn_chain": Engine(
        "eagle3",
        ["truncated", *(head for head in HEADS if head != "truncated")],
        [head for head in HEADS if head != "dynaspec_union"],  # whose distribution is that of a batch
        ["truncated"],
        DRAWN | PLANTED,
        is_first=True,
    ),
    "eagle3_tree": Engine(
        "eagle3",
        ["truncated", *HEADS, *SLIM_TREES],
        mixed=["truncated", "slim"],
        shape=TREE,
        slow=[name for name in (*HEADS, *SLIM_TREES) if name not in ("truncated", "rdk", "dynaspec_request", "slim")],
        is_first=True,
    ),
    "eagle3_one_hot_chain": Engine("eagle3", ["truncated"], mixed=["truncated"], is_first=True),
    "eagle_drawn_chain": Engine(
        "eagle", [*FEATURE_HEADS], [*FEATURE_HEADS], ["truncated"], DRAWN | PLANTED, slow=["full"]
    ),
    "eagle_tree": Engine("eagle", [*FEATURE_HEADS], mixed=["truncated"], shape=TREE, is_slow=True),
    "independent_drawn_chain": Engine(
        "independent", [*FEATURE_HEADS], [*FEATURE_HEADS], ["truncated"], DRAWN, slow=["full"]
    ),
    "independent_tree": Engine("independent", [*FEATURE_HEADS], mixed=["truncated"], shape=TREE, is_slow=True),
    "specformer_drawn_chain": Engine("specformer", [*SPECFORMER], [*SPECFORMER], ["full"], DRAWN),
    "hydra_prefix_drawn_chain": Engine(
        "hydra_prefix", [*HYDRA_PREFIX], [*HYDRA_PREFIX], ["full"], DRAWN, slow=["truncated"]
    ),
    "hydra_prefix_drawn_tree": Engine(
        "hydra_prefix", [*HYDRA_PREFIX], mixed=["full"], shape=TREE | DRAWN | PLANTED, slow=["truncated"]
    ),
    "hydra_prefix_tree": Engine("hydra_prefix", [*HYDRA_PREFIX], mixed=["full"], shape=TREE, is_slow=True),
    "last_hidden_drawn_chain": Engine(
        "last_hidden", [*LAST_HIDDEN], [*LAST_HIDDEN], ["medusa"], DRAWN, slow=["medusa_truncated"]
    ),
    "last_hidden_drawn_tree": Engine(
        "last_hidden",
        [*LAST_HIDDEN],
        mixed=["medusa"],
        shape=TREE | DRAWN | PLANTED,
        slow=["medusa_truncated", "medusa_routed"],
        is_first=True,
    ),
    "last_hidden_tree": Engine("last_hidden", [*LAST_HIDDEN], mixed=["medusa"], shape=TREE, is_slow=True),
    "last_hidden_slim_tree": Engine("last_hidden", ["slim"], mixed=["slim"], shape=TREE, is_slow=True),
    # the likeliest token of a Medusa trained for seconds is too seldom right for the chain that proposes it alone
    "last_hidden_one_hot_chain": Engine("last_hidden", ["hydra"], mixed=["hydra"], is_slow=True),
}

LONG = 53  # tokens of an answer: fewer requests for as many pairs
PAIRS, FEWER_PAIRS = volume(100_000, 20_000), volume(20_000, 10_000)
FEW = 4_000  # in `make test`, of a drafter beside the engine's first
REQUESTS = volume(400, 60)  # of each of the settings that are mixed
ROUNDS, FEWER_ROUNDS = volume(2_000, 600), volume(2_000, 300)


def met(drafters: Callable[[Engine], Sequence[str]], *only: str, of_rules: bool = False) -> pytest.MarkDecorator:
    """Every engine (or all drafters of `only` these) with these drafters of it; `of_rules`: the first of each rule
    alone in `make test`."""

    def marks(engine: Engine, drafter: str) -> Any:
        is_slow = engine.is_slow or (drafter in engine.slow and not only) or (of_rules and not engine.is_first)
        return pytest.mark.slow if is_slow else ()

    cases = [
        pytest.param(name, drafter, marks=marks(engine, drafter), id=f"{name}-{drafter}")
        for name, engine in ENGINES.items()
        for drafter in dict.fromkeys(drafters(engine))
        if not only or name in only
    ]
    return pytest.mark.parametrize(("engine", "drafter"), cases, indirect=True)


@pytest.fixture
def asked(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.node.callspec.params["engine"]]


@pytest.fixture(scope="module")
def toy_drafters_of(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> DraftersOf:
    return cache(lambda family: toy_drafters(toy, family, tmp_path_factory.mktemp(family)))


@pytest.fixture
def engine(request: pytest.FixtureRequest, toy: Toy, toy_drafters_of: DraftersOf) -> Any:
    asked = ENGINES[request.param]
    drafter = None if asked.family == "plain" else toy_drafters_of(asked.family)[asked.distributions[0]]
    options = {"target": toy.folder, "draft_steps": DRAFT_STEPS, "max_running_requests": 128} | asked.shape
    return kept_engine(drafter, skip_tokenizer_init=True, **options)


@pytest.fixture
def drafter(request: pytest.FixtureRequest, engine: Any, toy_drafters_of: DraftersOf) -> Path | None:
    """What the engine drafts with in a test, whatever the tests before it swapped in."""
    family = ENGINES[request.node.callspec.params["engine"]].family
    if family == "plain":
        return None
    folder = toy_drafters_of(family)[request.param]
    swap_drafter(engine, str(folder))
    return folder


@met(lambda engine: engine.mixed, of_rules=True)
def test_distribution_of_filters(engine: Any, drafter: Path | None, toy: Toy) -> None:
    reports = check_distributions(engine, toy, FILTERS, requests=volume(400, 40))
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


@met(lambda engine: engine.mixed if engine.family in ("plain", "eagle3") else ())
def test_distribution_without_seeds(engine: Any, drafter: Path | None, toy: Toy) -> None:
    check_distributions(engine, toy, {"top_p": {"top_p": 0.9}}, requests=REQUESTS, seed=None)


@met(lambda engine: engine.mixed, of_rules=True)
def test_seeds(engine: Any, drafter: Path | None) -> None:
    for sampling in ({"top_p": 0.9, "min_p": 0.05}, {}):
        check_seeds(engine, volume(24, 6), **sampling)


@met(lambda engine: engine.mixed)
def test_greedy_requests_stay_greedy(engine: Any, drafter: Path | None, toy: Toy) -> None:
    check_greedy_in_a_mixed_batch(engine, toy)


@met(lambda engine: engine.distributions)
def test_distribution(
    request: pytest.FixtureRequest, engine: Any, drafter: Path | None, asked: Engine, toy: Toy
) -> None:
    name = request.node.callspec.params["drafter"]
    most = PAIRS if asked.is_drawn_chain and "routed" not in name else FEWER_PAIRS
    check_pairs(engine, toy, most if name == asked.distributions[0] else volume(most, FEW))


def check_pairs(engine: Any, toy: Toy, pairs: int, temperature: float = 1.0) -> None:
    """Also that a distribution that is only a little wrong would be seen."""
    requests = -(-pairs // (LONG - 2) // len(PROMPTS)) * len(PROMPTS)
    settings = {"alone": {"temperature": temperature}}
    report = check_distributions(engine, toy, settings, requests=requests, new_tokens=LONG)["alone"]
    assert report.num_pairs >= pairs
    other = temperature * (1.1 if pairs >= 100_000 else 1.2 if pairs >= 12_000 else 1.3)  # what so many can tell apart
    assert fit(report.samples, lambda logits: filtered(logits, temperature=other)).p_value < 1e-6


@met(lambda engine: ["rdk"], "eagle3_drawn_chain", "eagle3_tree")
def test_distribution_of_redistribution_at_another_temperature(engine: Any, drafter: Path, toy: Toy) -> None:
    check_pairs(engine, toy, FEWER_PAIRS, temperature=0.7)


@met(
    lambda engine: ["medusa" if "medusa" in engine.distributions else "full"],
    *("eagle3_drawn_chain", "eagle_drawn_chain", "last_hidden_drawn_tree", "hydra_prefix_drawn_tree"),
)
def test_verifying_with_another_distribution_than_the_drafts_is_caught(engine: Any, drafter: Path, toy: Toy) -> None:
    """The negative control of what is drawn, chains and trees."""
    plant(engine, shortlist=IDS.tolist())
    try:
        report = sample_distributions(engine, toy, {"alone": {}}, requests=REQUESTS)["alone"]
    finally:
        plant(engine, shortlist=[])
    assert report.fit.p_value < 1e-6


@met(lambda engine: engine.drafts)
def test_drafts_follow_the_distribution_of_the_head(
    request: pytest.FixtureRequest, engine: Any, drafter: Path, asked: Engine, toy: Toy
) -> None:
    is_first = request.node.callspec.params["drafter"] == asked.drafts[0]
    settings = {"warm": {}, "cold": {"temperature": 0.5}, "filters": FILTERS["all"]}
    if not (is_first or IS_FULL):
        del settings["cold"]  # which the filters are, too
    check_drafts(engine, toy, drafter, settings, requests=ROUNDS if is_first else FEWER_ROUNDS)


@met(lambda engine: ["full"], "independent_drawn_chain", "independent_tree")
def test_what_followed_a_prompt_before_is_forgotten(engine: Any, drafter: Path) -> None:
    """The drafter's cache of a prompt ends with the token after it, which is each request's own."""

    def drafts(seed: int) -> tuple[list[int], int]:
        sampling = {"temperature": 0.7, "max_new_tokens": 16, "ignore_eos": True, "sampling_seed": seed}
        answer = engine.generate(input_ids=list(PROMPT), sampling_params=sampling)
        return answer["output_ids"], answer["meta_info"]["spec_num_correct_drafts"]

    one_after_the_other = [drafts(seed) for seed in range(volume(25, 10))]
    for seed, found in enumerate(one_after_the_other):
        engine.flush_cache()
        assert drafts(seed) == found, seed


@met(lambda engine: ["dynaspec_request"], "eagle3_tree")
def test_what_a_request_drafts_does_not_depend_on_its_batch_but_on_its_beam(
    engine: Any, drafter: Path, toy_drafters_of: DraftersOf
) -> None:
    """Of a head whose rows of a request share what they have chosen, by the number of accepted drafts. A union over the
    batch, and each row its own clusters, are the controls."""
    prompts: list[Ids] = torch.randint(V, (4, 5), generator=torch.Generator().manual_seed(1)).tolist()

    def answers(*prompts: Ids) -> list[tuple[Ids, int, int]]:
        """(tokens, verify steps, accepted drafts) of greedy answers, all at once."""
        sampling = {"temperature": 0.0, "max_new_tokens": 30, "ignore_eos": True}
        found = engine.generate(input_ids=list(prompts), sampling_params=sampling)
        return [
            (a["output_ids"], *(a["meta_info"][f"spec_{what}"] for what in ("verify_ct", "num_correct_drafts")))
            for a in found
        ]

    together, alone = {}, {}
    for head in ("dynaspec_request", "dynaspec_union", "dynaspec"):
        swap_drafter(engine, str(toy_drafters_of("eagle3")[head]))
        together[head], alone[head] = answers(*prompts), [answers(prompt)[0] for prompt in prompts]
    assert together["dynaspec_request"] == alone["dynaspec_request"]
    assert alone["dynaspec_request"] == alone["dynaspec_union"], "a union over one request is the same"
    assert together["dynaspec_union"] != alone["dynaspec_union"], "a batch shares more"
    assert alone["dynaspec"] != alone["dynaspec_request"], "a row alone has less"
    for head in together:
        assert [tokens for tokens, _, _ in together[head]] == [tokens for tokens, _, _ in alone["dynaspec"]]
