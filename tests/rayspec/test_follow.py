"""What the driver says of a sweep while it reads the journal."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sweep import FakeEngine, FakeEngines, fake_sweep
from synthetic import synthetic_request
from tqdm import tqdm

from rayspec.driver.follow import Follower
from rayspec.driver.publish import Publisher
from rayspec.farm.load import Load
from rayspec.records import Measured
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.measure.cohort import CohortRun
from rayspec.sweep.record.journal import Journal


class NeverAccepted(FakeEngine):
    def measure(self, load: Load) -> Measured:
        requests = tuple(synthetic_request(p.id, (8, 0, 0), 0.01) for p in load.prompts)
        return Measured(wall_s=1.0, requests=requests)


class OneNeverAccepted(FakeEngines):
    def use(self, candidate: Candidate | None) -> Any:
        engine = super().use(candidate)
        return NeverAccepted(1.0, 2) if candidate is not None and candidate.label == "d1" else engine


def test_a_drafter_that_is_never_accepted_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared = fake_sweep(2, ["draft_steps=[2]", "repeats=2", "concurrency=[1,2]"])
    run = CohortRun(prepared, prepared.plan.cohorts[0], OneNeverAccepted(2), Journal(tmp_path / "j"))  # type: ignore[arg-type]
    while not run.one_pass().is_done:
        pass
    publisher = Publisher(None, None, prepared.config, {})  # type: ignore[arg-type]  # nothing is written
    folder: Any = SimpleNamespace(journal=tmp_path / "j")
    with tqdm(total=prepared.plan.num_blocks, disable=True) as bar, caplog.at_level(logging.WARNING):
        Follower(folder, prepared.plan, publisher, bar)._read()
    (said,) = [r.getMessage() for r in caplog.records if "accepted" in r.getMessage()]
    assert said.startswith("d1-s2-c1: none of its drafts was accepted in its first 8 steps (tau 1.00); look whether")
