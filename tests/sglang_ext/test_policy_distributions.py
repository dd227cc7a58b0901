"""Sampled tokens under a policy that changes its mind every few steps, by what was accepted, against the target's
distribution; and a policy that looks at its own drafts, which the same test finds out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributions import FILTERS, MIN_P_UNSEEDED, sample_distributions
from engines import running_engine
from faults import anticipate
from policy_cases import NERVOUS, write_policy
from toy import DRAFT_STEPS, Toy
from volume import volume

from sglang_ext.adapter.engine import policy_report

ENGINES: dict[str, dict[str, Any]] = {
    "sampled_chain": {"speculative_use_rejection_sampling": True},
    "one_hot_chain": {},
    "tree": {"topk": 3, "num_draft_tokens": 8},
    "resting_chain": {"speculative_use_rejection_sampling": True},
    "alone": {"speculative_use_rejection_sampling": True, "max_running_requests": 1},
}
STEP_MS = (10.0, 17.2, 22.0, 26.0)  # a draft is worth what it costs where 72% are accepted, as of this drafter's chain
REQUESTS = volume(2_000, 60)  # of 26 speculated tokens each
SETTINGS: dict[str, dict[str, Any]] = {"alone": {}, "all": FILTERS["all"]}


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Few requests together, so that each of them sways the choice that its own tokens are drawn by."""
    folder, shape = tmp_path_factory.mktemp("policy"), ENGINES[request.param]
    drafter: Path = toy.save_drafter(folder / "full", "full")
    lengths = [0, DRAFT_STEPS] if "topk" in shape else range(DRAFT_STEPS + 1)
    curves = [{"draft_steps": k, "requests": [1], "step_ms": [STEP_MS[k]]} for k in lengths]
    # a rest lasts as long as the requests that are running, and most steps are plain ones then
    rest_after = 1 if request.param == "resting_chain" else 1_000_000
    values = NERVOUS | {"rest_after_steps": rest_after, "curves": curves, "accepted_if_reached": [0.8] * DRAFT_STEPS}
    file = write_policy(folder / "policy.json", lengths, **values)
    options = {"target": toy.folder, "draft_steps": DRAFT_STEPS, "max_running_requests": 6} | shape
    options |= {"speculative_adaptive_config": file, "enable_custom_logit_processor": True}
    with running_engine(drafter, skip_tokenizer_init=True, **options) as engine:
        yield engine


@pytest.mark.parametrize(
    "engine",
    [
        "sampled_chain",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("one_hot_chain", "tree", "resting_chain")),
    ],
    indirect=True,
)
@pytest.mark.parametrize(
    "seed", [pytest.param(None, id="unseeded"), pytest.param(0, id="seeded", marks=pytest.mark.slow)]
)
def test_distribution(request: pytest.FixtureRequest, engine: Any, toy: Toy, seed: int | None) -> None:
    """Also with seeds the draws are others in every run: which coins a token meets, the batch's lengths decide."""
    for name, report in sample_distributions(engine, toy, SETTINGS, requests=REQUESTS, seed=seed).items():
        assert report.fit.p_value > MIN_P_UNSEEDED, f"{name}: {report.fit}"
    followed = policy_report(engine)
    assert followed is not None
    print(followed["steps"], followed["switches"])
    often = 50 if request.node.callspec.params["engine"] == "resting_chain" else 10
    assert followed["switches"] > sum(followed["steps"].values()) / often
    assert followed["steps"]["0"] > sum(followed["steps"].values()) / 10


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["alone"], indirect=True)
def test_a_policy_that_looks_at_its_own_drafts_is_found_out(engine: Any, toy: Toy) -> None:
    """The negative control, one request at a time: among several the drafts of one hardly sway the choice."""
    anticipate(engine)
    report = sample_distributions(engine, toy, {"alone": {}}, requests=240, seed=None)["alone"]
    assert report.fit.p_value < MIN_P_UNSEEDED
