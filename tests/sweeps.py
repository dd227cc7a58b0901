"""A real sweep under fire: started, waited for, killed and resumed as a user does, and then looked at."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from fixture_models import DRAFTERS, TARGET, drafters_setting
from mlflow import MlflowClient
from mlflow.entities import Run

from rayspec.sweep.record.events import RoundMeasured, TrialFailed
from rayspec.sweep.record.folder import SweepFolder, sweep_folders
from rayspec.sweep.record.journal import read

ROOT = Path(__file__).parents[1]
JOB = "jobs/sweep.py"
PATIENCE_S = 1200  # a busy machine starts engines for minutes
TRIALS = {"plain-c1", "full-s2-c1", "slimspec-r32-s2-c1"}
SETTINGS = [f"target={TARGET}", drafters_setting(DRAFTERS["full"], DRAFTERS["slimspec"])]
SETTINGS += ["draft_steps=[2]", "block_prompts=1", "max_new_tokens=16"]
SETTINGS += ["head_latency=false", "engine.max_total_tokens=8192", "engine.num_threads=1"]


@dataclass
class Sweep:
    """A sweep under fire. `survived[victim]` are the rounds in the journal at the fault and some time after it."""

    home: Path
    uri: str
    variables: dict[str, str] = field(default_factory=dict)
    survived: dict[str, tuple[int, int]] = field(default_factory=dict)
    log: Path = field(default=Path())  # what the drivers print; beside the home without another
    orphans: list[psutil.Process] = field(default_factory=list)  # what ran below the driver when it was last looked at
    said_before: int = 0  # characters of the output, at the last start

    def __post_init__(self) -> None:
        if self.log == Path():
            self.log = self.home.parent / "output.log"

    def start(self, *arguments: str) -> None:
        """In a session of its own, as from a terminal of its own."""
        own = {"RAYSPEC_HOME": str(self.home), "MLFLOW_TRACKING_URI": self.uri, **self.variables}
        inherited = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
        self.log.touch()
        self.said_before = len(self.output)
        with self.log.open("a") as log:
            command = [sys.executable, JOB, *arguments]
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=inherited | own, stdout=log, stderr=log, start_new_session=True
            )
        signal.signal(signal.SIGINT, before)

    def interrupt(self) -> int:
        """Ctrl-C, which reaches all processes of the terminal; the driver's exit status."""
        self.note_orphans()
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(timeout=PATIENCE_S)

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def said(self) -> str:
        """The output since the last start."""
        return self.output[self.said_before :]

    @property
    def folder(self) -> SweepFolder:
        return sweep_folders(self.home)[0]

    def rounds(self) -> int:
        if not sweep_folders(self.home):
            return 0
        return sum(isinstance(e, RoundMeasured) for e in read(self.folder.journal))

    def wait_for_rounds(self, number: int) -> None:
        self.wait_until(f"{number} rounds", lambda: self.rounds() >= number)

    def descendant(self, title: str) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if title in title_of(process):
                return process
        raise AssertionError(f"no process {title!r} below the driver")

    def survive(self, victim: str, kill: Callable[[], None]) -> None:
        """Let `kill` happen, then wait for two more rounds. What is measured meanwhile does not count: the workers of a
        driver go on for a moment, on a fast machine for more than two rounds."""
        kill()
        before = self.rounds()
        self.wait_for_rounds(before + 2)
        self.survived[victim] = (before, self.rounds())

    def note_orphans(self) -> None:
        self.orphans = psutil.Process(self.process.pid).children(recursive=True)

    def kill_driver(self) -> None:
        """Returns when its workers have ended too: until then they go on measuring."""
        self.note_orphans()
        workers = [p for p in self.orphans if title_of(p).startswith("ray::")]
        self.process.kill()
        self.process.wait()
        _, left = psutil.wait_procs(workers, timeout=PATIENCE_S)
        assert left == [], "workers outlive their driver"

    def finish(self) -> None:
        assert self.process.wait(timeout=PATIENCE_S) == 0, self.output

    def wait_until(self, what: str, is_so: Callable[[], bool]) -> None:
        """Until it is so, while the driver runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert self.process.poll() is None, f"ended before {what}: {self.output}"
            assert time.monotonic() < deadline, f"not {what}: {self.output}"
            time.sleep(0.1)

    def has_descendant(self, title: str) -> bool:
        try:
            return self.descendant(title).is_running()
        except AssertionError:
            return False

    def runs(self) -> list[Run]:
        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("rayspec-sweep")
        assert experiment is not None, self.output
        return list(client.search_runs([experiment.experiment_id]))


def title_of(process: psutil.Process) -> str:
    """Empty where it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def assert_complete_and_once(sweep: Sweep, folder: SweepFolder, rounds: int) -> None:
    """Every round of every trial is in the journal and in MLflow, once, and no run is left open."""
    events = read(folder.journal)
    measured = Counter((name, e.index) for e in events if isinstance(e, RoundMeasured) for name in e.blocks)
    assert measured == Counter({(name, index): 1 for name in TRIALS for index in range(rounds)})
    assert not [e for e in events if isinstance(e, TrialFailed)]
    runs = [r for r in sweep.runs() if r.data.tags["sweep.id"] == folder.id]
    status = Counter((r.info.run_name, r.info.status) for r in runs)
    assert status == Counter({(name, "FINISHED"): 1 for name in [*TRIALS, folder.config().name]})
    client = MlflowClient(sweep.uri)
    for run in runs:
        for key in run.data.metrics:
            steps = [m.step for m in client.get_metric_history(run.info.run_id, key)]
            assert len(set(steps)) == len(steps), f"{run.info.run_name}: {key}"
            if key == "per_block/wall_s":
                assert sorted(steps) == list(range(rounds))
