"""Temperature as an axis of a sweep: what is compared has one temperature."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import FakeEngine, FakeEngines, fake_sweep
from fixture_models import DRAFTERS, PROMPTS, TARGET
from published import publish, undrawn
from synthetic import SyntheticSweep, few_trials, make_synthetic_sweep

from rayspec.commands.sweep import main
from rayspec.config import load_config, to_yaml
from rayspec.farm.load import Traffic
from rayspec.report.decision import decision, enumeration
from rayspec.report.page import write_report
from rayspec.report.promote import winner
from rayspec.report.ready_files import acceptance
from rayspec.report.speed_figures import load_figure, pareto_figure
from rayspec.serving.policy import measured_policy
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.measure.cohort import CohortRun
from rayspec.sweep.measure.engines import Engines
from rayspec.sweep.plan.placement import Placement
from rayspec.sweep.plan.prepare import prepare
from rayspec.sweep.plan.trials import Trial
from rayspec.sweep.record.events import HeadsTimed
from rayspec.sweep.record.journal import Journal, read
from rayspec.sweep.record.results import score
from rayspec.sweep.record.stored import find_sweep
from rayspec.tracking import Tracker
from sglang_ext.drafters.counting import StepShape

DRAWS = "engine.extra.speculative_use_rejection_sampling"


def asked(*more: str, drafter: str = "") -> list[str]:
    return [f"target={TARGET}", f"drafters=[{DRAFTERS['full']}{drafter}]", f"workload={PROMPTS}:4", *more]


@pytest.fixture(scope="module")
def at_two_temperatures() -> SyntheticSweep:
    """The synthetic sweep at temperature 0; at 1 plain decoding takes twice as long, and answers other tokens."""
    cold = make_synthetic_sweep()
    config = replace(cold.config, temperature=[0.0, 1.0])
    blocks = {}
    for temperature in config.temperatures():
        for trial, own in cold.blocks.items():
            here = replace(trial, traffic=replace(trial.traffic, temperature=temperature))
            scale = 2.0 if temperature and trial.candidate is None else 1.0
            blocks[here] = [
                replace(b, index=b.index + 1000 * int(temperature), measured=_slower(b.measured, scale)) for b in own
            ]
    return SyntheticSweep(config=config, blocks=blocks, results=score(config, blocks, {}, {}))


def _slower(measured: Any, scale: float) -> Any:
    requests = tuple(replace(r, e2e_s=scale * r.e2e_s) for r in measured.requests)
    return replace(measured, wall_s=scale * measured.wall_s, requests=requests)


def test_every_load_is_measured_at_every_temperature() -> None:
    prepared = fake_sweep(1, ["temperature=[0,1]", "draft_steps=[2]", "concurrency=[1,4]"])
    assert [t.name for t in prepared.plan.trials if t.candidate is None] == [
        "plain-c1-t0",
        "plain-c4-t0",
        "plain-c1-t1",
        "plain-c4-t1",
    ]
    assert len(prepared.plan.trials) == 2 * 2 * 3
    (cohort,) = prepared.plan.cohorts
    rounds = prepared.plan.rounds(cohort, 0)
    assert all(len({t.traffic for t in r.trials}) == 1 for r in rounds), "a round has one temperature"
    assert {r.traffic.temperature for r in rounds} == {0.0, 1.0}
    assert "4 streams, temperature 1" in prepared.describe()


@pytest.mark.parametrize("given", ["temperature=1.0", "temperature=[1.0]"])
def test_one_temperature_leaves_names_as_they_were(given: str) -> None:
    prepared = fake_sweep(1, [given, "draft_steps=[2]", "concurrency=[4]"])
    assert [t.name for t in prepared.plan.trials] == ["plain-c4", "full-s2-c4", "d1-s2-c4"]
    assert prepared.config.temperature_of(prepared.plan.trials[0].traffic) == 1.0


def test_configs_from_before_are_read(tmp_path: Path) -> None:
    for config in (SweepConfig(temperature=1.0), SweepConfig(temperature=[0, 0.7])):
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load_config(SweepConfig, tmp_path / "config.yaml") == config


@pytest.mark.parametrize("given", ["[]", "[0,-1]", "[0,0]", "[1.0,1.00000001]", "[0,hot]", "101"])
def test_temperatures_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match="temperature"):
        load_config(SweepConfig, None, [f"temperature={given}"])


def test_requests_ask_for_the_temperature_of_their_trial(tmp_path: Path) -> None:
    prepared = fake_sweep(1, ["temperature=[0,0.7]"])
    engines = Engines(prepared.config, Placement(num_cpus=1, num_gpus=0), prepared.target, tmp_path)
    assert [engines.load(prepared.prompts, t).temperature for t in prepared.plan.traffic] == [0.0, 0.7]


@pytest.mark.parametrize(("draws", "temperatures"), [(False, (0, 1)), (True, (0, 1)), (True, (1,))])
def test_heads_are_timed_once_for_all_temperatures(draws: bool, temperatures: tuple[int, ...], tmp_path: Path) -> None:
    """Where drafts are drawn a head is asked for its distribution, which is not what is timed."""
    timed = []

    class Clocked(FakeEngine):
        def head_latencies(self, paths: dict[str, str], requests: int, shape: StepShape) -> dict[str, float]:
            timed.append(requests)
            return dict.fromkeys(paths, 0.001 * requests)

    class Timing(FakeEngines):
        def start_speculative(self, cohort: Any, candidate: Any) -> dict[str, Any]:
            started = super().start_speculative(cohort, candidate)
            self.speculative = Clocked(1.0, cohort.draft_steps)
            return started

    drawn = f"engine.extra.speculative_use_rejection_sampling={str(draws).lower()}"
    settings = [f"temperature={list(temperatures)}", "concurrency=[1,4]", "draft_steps=[2]", "head_latency=true", drawn]
    prepared = fake_sweep(1, settings)
    CohortRun(prepared, prepared.plan.cohorts[0], Timing(1), Journal(tmp_path / "j")).one_pass()  # type: ignore[arg-type]
    events = [e for e in read(tmp_path / "j") if isinstance(e, HeadsTimed)]
    wanted = [f"c{c}-t{t}" for c in (1, 4) for t in temperatures if not (draws and t)]
    assert timed == ([1, 4] if wanted else [])
    assert [{k: v["full"] for k, v in event.latency_s.items()} for event in events] == (
        [{name: {"1": 0.001, "4": 0.004}[name[1]] for name in wanted}] if wanted else []
    )


def test_a_speed_up_is_over_plain_decoding_at_the_same_temperature(at_two_temperatures: SyntheticSweep) -> None:
    by_name = {r.trial.name: r.metrics for r in at_two_temperatures.results}
    cold, hot = (by_name[f"slimspec-r64-s4-c4-t{t}"] for t in (0, 1))
    assert hot["speedup_vs_plain"] == pytest.approx(2 * cold["speedup_vs_plain"])
    assert hot["speedup_vs_baseline"] == pytest.approx(cold["speedup_vs_baseline"])
    assert "output_mismatches" in cold
    assert "output_mismatches" not in hot, "drawn answers differ by themselves"


def test_a_stored_sweep_comes_back_with_its_temperatures(at_two_temperatures: SyntheticSweep, tmp_path: Path) -> None:
    tracker = Tracker(f"sqlite:///{tmp_path}/mlflow.db", "tests", (tmp_path / "artifacts").as_uri())
    results = [r for r in at_two_temperatures.results if r.trial.label in ("plain", "full", "slimspec-r64")]
    blocks = {r.trial: at_two_temperatures.blocks[r.trial] for r in results}
    few = replace(at_two_temperatures, blocks=blocks, results=results)
    sweep = find_sweep(tracker.client, publish(tracker, few))
    assert {r.trial.name for r in sweep.results} >= {r.trial.name for r in results}
    best = winner(sweep.results, "c4-t1")
    run = tracker.client.get_run(sweep.run_ids[best.trial])
    assert run.data.params["temperature"] == "1.0"
    assert acceptance(sweep, best)["temperature"] == 1.0
    policy = measured_policy(sweep, best)
    assert policy is not None
    assert policy.about["temperature"] == "1.0"
    cold = measured_policy(sweep, winner(sweep.results, "c4-t0"))
    assert cold is not None
    assert policy.curves[0].step_ms[0] > 1.5 * cold.curves[0].step_ms[0], "plain decoding of its own temperature"
    with undrawn():
        text = write_report(sweep, tmp_path)[0].read_text()
    assert "at temperature 0.0, 1.0; " in text
    assert re.search(r"- 4 streams, temperature 1: ", text)
    assert "at 1 and 4 streams (temperature 1)" in decision(sweep.results) or "(temperature 1)" in text


def test_figures_mix_no_temperatures(at_two_temperatures: SyntheticSweep) -> None:
    results = list(at_two_temperatures.results)
    for r in at_two_temperatures.results:  # a third load, as the figure by load wants
        if r.trial.traffic.concurrency == 4:
            results.append(replace(r, trial=replace(r.trial, traffic=replace(r.trial.traffic, concurrency=16))))
    by_load, pareto = load_figure(results), pareto_figure(results)
    assert by_load is not None
    assert pareto is not None
    titles = [axis.get_title() for axis in by_load.axes]
    assert titles == [f"{n} draft steps, temperature {t}" for t in (0, 1) for n in (2, 4)]
    assert len(pareto.axes) == 2, "a panel per temperature"
    assert all(len(line.get_xdata()) == 3 for axis in by_load.axes for line in axis.lines if len(line.get_xdata()) > 2)


def test_a_sweep_of_one_temperature_is_read_as_before(synthetic_sweep: SyntheticSweep, tmp_path: Path) -> None:
    tracker = Tracker(f"sqlite:///{tmp_path}/mlflow.db", "tests", (tmp_path / "artifacts").as_uri())
    sweep = find_sweep(tracker.client, publish(tracker, few_trials(synthetic_sweep, temperature=1.0)))
    assert {r.trial.traffic.temperature for r in sweep.results} == {None}
    assert sweep.temperature(sweep.results[0].trial) == 1.0


def test_loads_are_told_by_temperature() -> None:
    loads = [Traffic(concurrency=c, temperature=t) for t in (0.0, 1.0) for c in (1, 4)]
    assert enumeration(loads) == "1 and 4 streams (temperature 0) and 1 and 4 streams (temperature 1)"
    assert sorted([*loads[::-1]]) == loads


@pytest.mark.parametrize("drawn", ["true", "false"])
def test_a_plan_wants_to_know_whether_drafts_are_drawn(drawn: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan", *asked("temperature=[0,1]")]) == 2
    refusal = capsys.readouterr().err
    assert f"temperature 1 draws answers, but {DRAWS} is not set" in refusal
    assert main(["--plan", *asked("temperature=[0,1]", f"{DRAWS}={drawn}")]) == 0
    assert main(["--plan", *asked("temperature=0")]) == 0
    assert main(["--plan", *asked("temperature=1", "baseline=full@4x8", drafter="@4x8")]) == 0, "a tree has no choice"


def test_drafts_of_trees_are_not_drawn() -> None:
    own = load_config(
        SweepConfig, None, asked(f"{DRAWS}=true", f"drafters=[{DRAFTERS['full']},{DRAFTERS['full']}@4x8]")
    )
    problems = {c.label: c.problem for c in prepare(own).plan.candidates}
    assert problems["full"] is None
    assert "whether a draw is verified must not depend on what was drawn" in str(problems["full@4x8"])


def test_plain_decoding_of_another_temperature_is_another_trial() -> None:
    one, other = (Trial(candidate=None, traffic=Traffic(concurrency=1, temperature=t)) for t in (0.0, 1.0))
    assert one != other
    assert one.name != other.name
