"""A candidate from its checkpoint to MLflow and back, and what of it a search looks along."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from fixture_models import DRAFTERS, TARGET, drafter_folder
from mlflow import MlflowClient
from published import publish
from synthetic import SyntheticSweep

from rayspec.sweep.candidate import Candidate, Head, option_of, text_of
from rayspec.sweep.config import SearchConfig, SweepConfig
from rayspec.sweep.measure.optuna_search import OptunaCohorts, SearchSpace
from rayspec.sweep.plan.drafters import inspect_drafter
from rayspec.sweep.plan.trials import make_plan
from rayspec.sweep.record.stored import find_sweep
from rayspec.sweep.shape import DraftShape
from rayspec.tracking import Tracker

CONFIG = SweepConfig(target=str(TARGET), draft_steps=[2])


def candidate(label: str = "a", steps: int = 2, **fields: object) -> Candidate:
    return Candidate(label=label, path=f"/{label}", draft_steps=steps, **fields)  # type: ignore[arg-type]


def slim(rank: int, steps: int = 2, **fields: object) -> Candidate:
    return candidate(f"s{rank}", steps, head=Head(kind="slimspec", options={"rank": rank}), **fields)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_drafters_candidate_comes_back_from_its_parameters(kind: str) -> None:
    (found,) = inspect_drafter(str(DRAFTERS[kind]), CONFIG)
    assert found.problem is None
    params = {name: str(value) for name, value in found.params().items()}
    assert Candidate.from_params(found.label, params) == replace(found, body=None)


@pytest.mark.parametrize(
    ("name", "family", "algorithm"), [("medusa@4x8", "medusa", "MEDUSA"), ("hydra", "hydra", "HYDRA")]
)
def test_so_does_one_of_another_family_and_shape(name: str, family: str, algorithm: str) -> None:
    (found,) = inspect_drafter(str(drafter_folder(name)), CONFIG)
    assert (found.family, found.algorithm, found.drafter) == (family, algorithm, family)
    params = {key: str(value) for key, value in found.params().items()}
    assert Candidate.from_params(found.label, params) == replace(found, body=None)
    assert params["speculative_num_draft_tokens"] == str(found.num_draft_tokens)


def test_numbers_are_plain_text_and_a_head_in_a_head_has_its_path() -> None:
    (rdk,) = inspect_drafter(str(DRAFTERS["rdk"]), CONFIG)
    params = rdk.params()
    assert (params["head.base.kind"], params["head.base.size"], params["head.neighbours"]) == ("truncated", "512", "8")
    assert rdk.head.numbers == {"base.size": 512, "neighbours": 8, "self_weight": 0.9}
    assert rdk.head.words == {"base.kind": "truncated"}
    (by_step,) = inspect_drafter(str(DRAFTERS["truncated_by_step"]), CONFIG)
    assert by_step.head.options["step_sizes"] == (1024, 1024, 341, 256)
    assert "step_sizes" not in by_step.head.numbers
    assert (by_step.base, by_step.calibration) == ("full", "vocabtrim-2048")


@pytest.mark.parametrize("value", [32, 0.5, True, False, "int8", (1024, 341), "a b", "3x"])
def test_an_options_text_says_what_it_was(value: object) -> None:
    back = option_of(text_of(value))  # type: ignore[arg-type]
    assert Head.of({"kind": "x", "o": back}).options["o"] == value
    assert type(Head.of({"kind": "x", "o": back}).options["o"]) is type(value)


def test_runs_of_earlier_releases_are_read() -> None:
    """A mapping as one text, None for what was unset, neither algorithm nor shape of the trial's own."""
    params = {"head.checkpoint": "/r", "head.kind": "rdk", "draft_steps": "4", "sweep.topk": "8"}
    params |= {"head.base": "{'kind': 'truncated', 'size': 512, 'step_sizes': None}", "head.share": "0.5"}
    found = Candidate.from_params("rdk", {**params, "sweep.num_draft_tokens": "32"})
    assert found.head == Head(kind="rdk", options={"base.kind": "truncated", "base.size": 512, "share": 0.5})
    assert found.shape == DraftShape(topk=8, num_draft_tokens=32)
    assert (found.algorithm, found.family, found.base) == ("EAGLE3", "eagle3", None)


def test_the_store_gives_back_what_the_plan_had(synthetic_sweep: SyntheticSweep, tmp_path: Path) -> None:
    tracker = Tracker(f"sqlite:///{tmp_path}/mlflow.db", "test", (tmp_path / "artifacts").as_uri())
    results = [r for r in synthetic_sweep.results if r.trial.traffic.concurrency == 1]
    blocks = {r.trial: synthetic_sweep.blocks[r.trial] for r in results}
    run_id = publish(tracker, replace(synthetic_sweep, blocks=blocks, results=results))
    stored = find_sweep(MlflowClient(tracker.uri), run_id)
    assert {r.trial for r in stored.results if r.error is None} == set(blocks)
    runs = {t: stored.client.get_run(id_).data for t, id_ in stored.run_ids.items()}
    ranks = {t.label: data.params.get("head.rank") for t, data in runs.items()}
    assert ranks == {
        "plain": None, "full": None, "broken": None,
        "slimspec-r128": "128", "slimspec-r64": "64", "slimspec-r32": "32",
    }  # fmt: skip


def test_a_series_is_all_but_the_numbers() -> None:
    one, other = slim(32), slim(64)
    assert one.series == other.series == "slimspec"
    assert slim(32, base="full", calibration="c").series == "slimspec by c on full"
    assert slim(32, shape=DraftShape(topk=8, num_draft_tokens=32)).series == "slimspec @8x32"
    quantised = candidate(head=Head(kind="slimspec", options={"rank": 32, "weight_format": "int8", "group_size": 64}))
    assert quantised.series == "slimspec, int8"
    assert slim(32, base="full", is_made=True).series == "slimspec made on full"
    assert candidate(head=Head(kind="full"), algorithm="BPD").series == "BPD full"


def test_numbers_are_dimensions_of_the_search_and_steps_too() -> None:
    pairs = (
        Head(kind="specvocab", options={"rank": 16, "size": 64}),
        Head(kind="specvocab", options={"rank": 16, "size": 512}),
    )
    candidates = [slim(rank, steps) for rank in (128, 32, 64) for steps in (2, 4)]
    candidates += [candidate(f"v{i}", 2, head=head) for i, head in enumerate(pairs)]
    space = SearchSpace(candidates)
    assert space.point(slim(64, 4)) == {"series": "slimspec", "draft_steps": 1, "rank of slimspec": 1}
    assert space.point(slim(128, 2)) == {"series": "slimspec", "draft_steps": 0, "rank of slimspec": 2}
    assert space.point(candidates[-1]) == {"series": "specvocab", "draft_steps": 0, "size of specvocab": 1}
    assert len({tuple(space.point(c).items()) for c in candidates}) == len(candidates)


def test_drafters_that_their_numbers_do_not_tell_apart_have_their_names() -> None:
    tuned = replace(slim(32), label="tuned")
    space = SearchSpace([slim(32), tuned, slim(64)])
    assert [space.point(c)["series"] for c in (slim(32), tuned, slim(64))] == ["s32", "tuned", "s64"]
    more = candidate("more", head=Head(kind="slimspec", options={"rank": 16, "other": 1}))
    assert SearchSpace([slim(32), more]).point(more) == {"series": "more", "draft_steps": 0}


RANKS = [2**n for n in range(3, 11)] + [3 * 2**n for n in range(3, 9)]


def searched(seed: int) -> Iterator[int]:
    """Ranks by their place, in the order in which Optuna asks for them, where a larger rank is always faster."""
    config = SweepConfig(draft_steps=[2, 3, 4], search=SearchConfig(algorithm="optuna", samples=1))
    full = [candidate("full", s, head=Head(kind="full")) for s in (2, 3, 4)]
    plan = make_plan(config, 4, [*full, *(slim(rank, steps) for rank in RANKS for steps in (2, 3, 4))])
    ranks = {c.name: sorted(RANKS).index(int(c.candidates[1].head.numbers["rank"])) for c in plan.cohorts}
    search = OptunaCohorts(plan.cohorts, [], "full", seed, "gain")
    for i in range(22):
        place = ranks[(search.suggest(str(i)) or {})["cohort"]]
        yield place
        search.on_trial_complete(str(i), {"gain": float(place)})


def test_the_search_learns_along_the_rank() -> None:
    """After its first ten, which TPE draws at random, it asks for larger ranks than those of what is left."""
    found = [list(searched(seed)) for seed in range(4)]
    early, late = (fmean(p for one in found for p in part(one)) for part in (lambda x: x[:10], lambda x: x[10:]))
    assert late > early + 1  # places of 0..13, of which the best are taken first
