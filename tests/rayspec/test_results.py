"""A trial's standing against the baselines, worked out by hand."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from fixture_models import DRAFTERS, TARGET
from synthetic import SyntheticSweep, synthetic_request

from rayspec.costs import ModelCosts, drafter_cost, target_cost
from rayspec.farm.load import Traffic
from rayspec.records import BlockRecord, Measured, RequestRecord
from rayspec.sweep.candidate import Candidate, Head
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.trials import Trial
from rayspec.sweep.record.results import score
from rayspec.sweep.shape import DraftShape

LOAD = Traffic(concurrency=1)
PLAIN = Trial(candidate=None, traffic=LOAD)
TREE = Trial(
    candidate=Candidate(
        label="full",
        path=str(DRAFTERS["full"]),
        head=Head(kind="full"),
        draft_steps=3,
        shape=DraftShape(topk=4, num_draft_tokens=9),
    ),
    traffic=LOAD,
)


@pytest.fixture(scope="module")
def costs() -> ModelCosts:
    drafters = {label: drafter_cost(str(DRAFTERS[label])) for label in ("full", "slimspec")}
    return ModelCosts(target=target_cost(str(TARGET)), drafters=drafters)


def block(request: RequestRecord, wall_s: float) -> list[BlockRecord]:
    return [BlockRecord(index=0, prompt_block=0, measured=Measured(wall_s=wall_s, requests=(request,)))]


DRAFTED = synthetic_request("a", (0, 4, 4, 0), 0.1)  # 21 tokens, 12 of them drafts that 8 steps accepted
BLOCKS = {PLAIN: block(synthetic_request("a", (), 0.1), 3.2), TREE: block(DRAFTED, 1.05)}  # 10 and 20 tokens a second


def metrics_of(
    costs: ModelCosts | None, blocks: Mapping[Trial, list[BlockRecord]], errors: Mapping[Trial, str] | None = None
) -> dict[Trial, Mapping[str, float]]:
    return {r.trial: r.metrics for r in score(SweepConfig(), blocks, errors or {}, {}, costs)}


def test_theta_is_the_budget_s_kappa_over_the_speedup(costs: ModelCosts) -> None:
    """SpecFormer's kappa: 2.5 tokens a step, three drafts asked for and eight verified; twice as fast as plain."""
    found = metrics_of(costs, BLOCKS)
    assert found[TREE]["tau"] == 2.5
    assert found[TREE]["budget_kappa"] == pytest.approx(2.5 * 3 / 8)
    assert found[TREE]["speedup_vs_plain"] == pytest.approx(2)
    assert found[TREE]["theta"] == pytest.approx(2.5 * 3 / 8 / 2)
    assert not {"budget_kappa", "theta"} & set(found[PLAIN])


def test_every_chain_of_a_sweep_has_its_own_theta(synthetic_sweep: SyntheticSweep, costs: ModelCosts) -> None:
    """A chain's kappa is its tau."""
    blocks = {t: b for t, b in synthetic_sweep.blocks.items() if t.label in ("plain", "full")}
    results = [r for r in score(synthetic_sweep.config, blocks, {}, {}, costs) if r.trial.candidate]
    assert len(results) == 4  # two lengths at two loads
    for m in (r.metrics for r in results):
        assert m["theta"] == pytest.approx(m["tau"] / m["speedup_vs_plain"])
    assert len({r.metrics["theta"] for r in results}) == 4


def test_theta_is_absent_where_a_part_is(costs: ModelCosts) -> None:
    assert "theta" not in metrics_of(None, BLOCKS)[TREE], "the target could not be counted"
    assert "theta" not in metrics_of(costs, {TREE: BLOCKS[TREE]})[TREE], "plain decoding was not measured"
    assert "theta" not in metrics_of(costs, BLOCKS, {PLAIN: "it died"})[TREE]
    of_one_token = replace(DRAFTED, verify_steps=0, accepted_drafts=0, accepted_histogram=())
    found = metrics_of(costs, {**BLOCKS, TREE: block(of_one_token, 1.05)})[TREE]
    assert "speedup_vs_plain" in found
    assert not {"tau", "budget_kappa", "theta"} & set(found), "no step was ever verified"
