"""A sweep in MLflow: one parent run, one child per trial."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rayspec.config import flatten, to_yaml
from rayspec.metrics import trial_metrics
from rayspec.records import BlockRecord
from rayspec.report.figures import write_figures
from rayspec.report.table import verdicts
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan import Plan, Trial
from rayspec.sweep.results import TrialResult
from rayspec.tracking import Run, Tracker


class Publisher:
    """Writes what the controller tells it; decides nothing."""

    def __init__(self, tracker: Tracker, parent: Run, config: SweepConfig) -> None:
        self.tracker = tracker
        self.parent = parent
        self.config = config
        self._runs: dict[Trial, Run] = {}

    def open(self, plan: Plan, description: str) -> None:
        """Parameters of the sweep and a run for each trial."""
        sweep_params = flatten(self.config)
        self.parent.log_params(sweep_params)
        self.parent.log_text(to_yaml(self.config), "config.yaml")
        self.parent.log_text(description + "\n", "plan.md")
        for trial in plan.trials:
            run = self.tracker.child(self.parent, trial.name, {"kind": "trial", "head": trial.head})
            run.log_params({**sweep_params, **trial_params(trial)})
            self._runs[trial] = run

    def engine_started(self, name: str, seconds: float) -> None:
        self.parent.log_metrics({f"engine_start_s/{name}": seconds})

    def block(self, trial: Trial, block: BlockRecord) -> None:
        """One block as a step, under `block/`, so that the pooled metrics keep their names."""
        metrics = trial_metrics([block], trial.draft_steps, self.config.slo)
        kept = (
            "output_tokens_per_s",
            "goodput_requests_per_s",
            "wall_s",
            "output_tokens",
            "tau",
            "accepted_drafts",
            "verify_steps",
        )
        self._runs[trial].log_metrics({f"block/{k}": metrics[k] for k in kept if k in metrics}, step=block.index)

    def failed(self, trial: Trial, cause: str) -> None:
        self._runs[trial].fail(cause)

    def logs(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.log")):
            self.parent.log_file(file, "logs")

    def close(
        self,
        results: Sequence[TrialResult],
        blocks: Mapping[Trial, Sequence[BlockRecord]],
        summary: str,
        machine: Mapping[str, str],
    ) -> None:
        """Pooled metrics, requests, table and figures; ends the runs of the trials that succeeded."""
        self.parent.set_tags(machine)  # the engines', which need not be the driver's
        for result in results:
            run = self._runs[result.trial]
            run.log_text(_requests_jsonl(blocks.get(result.trial, ())), "requests.jsonl")
            if result.error is None:
                run.log_metrics(result.metrics)
                run.set_tags(machine)
                run.finish()
        failed = [r.trial.name for r in results if r.error]
        self.parent.log_metrics({"trials": len(results), "failed_trials": len(failed)})
        self.parent.log_text(summary + "\n", "summary.md")
        self.parent.set_tags({f"verdict.{traffic.label}": text for traffic, text in verdicts(results).items()})
        with tempfile.TemporaryDirectory() as folder:
            for file in write_figures(results, Path(folder)):
                self.parent.log_file(file, "figures")


def trial_params(trial: Trial) -> dict[str, object]:
    """What sets a trial apart, beside the sweep's own parameters."""
    params: dict[str, object] = {
        "trial.head": trial.head,
        "trial.draft_steps": trial.draft_steps,
        "trial.concurrency": trial.traffic.concurrency,  # 0 under open-loop load
        "trial.request_rate": trial.traffic.request_rate,  # 0 in a closed loop
    }
    if trial.drafter is not None:
        params["trial.drafter_path"] = trial.drafter.path
        params |= {f"trial.draft_head.{k}": v for k, v in trial.drafter.head.items()}
    return params


def _requests_jsonl(blocks: Sequence[BlockRecord]) -> str:
    lines = [{"block": b.index, "prompt_block": b.prompt_block, **r.to_dict()} for b in blocks for r in b.requests]
    return "".join(json.dumps(line) + "\n" for line in lines)
