"""A sweep in MLflow: one parent run, one child per trial. `rayspec.sweep.record.stored` reads it back.

Every call may be repeated, with the same result: what is written follows from the journal alone, times included.

Names are chosen for MLflow's comparison page, which sorts them and draws the first: a child's own parameters (bare:
concurrency, draft_steps, head, head.*) come before the sweep's (sweep.*), and the metrics that answer the question
(bare: output_tokens_per_s, speedup_vs_*, tau) before the rest, which sits in groups.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlflow.data
import pandas as pd
from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.data.dataset import Dataset
from mlflow.tracing.client import TracingClient
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from rayspec.config import flatten, to_yaml
from rayspec.driver.traces import log_traces
from rayspec.logged_models import Model
from rayspec.metrics import trial_metrics
from rayspec.names import safe_name, short_names
from rayspec.records import BlockRecord, CanaryAnswer
from rayspec.report.decision import choices, decision, ratio, verdicts
from rayspec.report.figures import write_figures
from rayspec.report.table import busy
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.trials import PLAIN, Trial
from rayspec.sweep.record.metric_names import metric_key
from rayspec.sweep.record.results import TrialResult
from rayspec.sweep.record.stored import CANARY
from rayspec.tracking import Run, Tracker
from rayspec.workloads import Conversation

DATASET_NAME_LIMIT = 500  # MLflow's
OF_A_TRIAL = ("draft_steps", "speculative_num_draft_tokens")  # parameters that differ between trials of one drafter
BLOCK_METRICS = (
    "output_tokens_per_s",
    "goodput_requests_per_s",
    "wall_s",
    "output_tokens",
    "tau",
    "accepted_drafts",
    "verify_steps",
)


class Publisher:
    """Writes what it is told; decides nothing. `tags` (provenance) go to every run."""

    def __init__(self, tracker: Tracker, parent: Run, config: SweepConfig, tags: Mapping[str, str]) -> None:
        self.tracker = tracker
        self.parent = parent
        self.config = config
        self.tags = tags
        self._sweep_params = {f"sweep.{key}": value for key, value in flatten(config).items()}
        self._short: Mapping[str, str] = {}  # names of heads that fit on an axis
        self._drafters: Mapping[str, Mapping[str, str]] = {}
        self._dataset: Dataset | None = None
        self._runs: dict[Trial, Run] = {}
        self._logged: dict[Trial, set[int]] = {}  # blocks that an earlier process has written

    def open(
        self, description: str, prompts: Sequence[Conversation], drafters: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Parameters of the sweep and what it is measured on; `drafters`: tags with the fingerprints of each."""
        self._drafters = drafters
        self._short = short_names([PLAIN, *drafters])
        self._dataset = workload_dataset(self.config, prompts)
        self.parent.log_params(self._sweep_params)
        self.parent.log_dataset(self._dataset, "eval")
        self.parent.log_text(to_yaml(self.config), "config.yaml")
        self.parent.log_text(self.tags["command"] + "\n", "command.txt")
        self.parent.log_text(description + "\n", "plan.md")

    def engine_started(self, name: str, seconds: float, number: int, time_s: float) -> None:
        """The `number`th start of this engine."""
        self.parent.log_metrics({f"engine_start_s/{safe_name(name)}": seconds}, number, time_s)

    def block(self, trial: Trial, blocks: Sequence[BlockRecord], time_s: float) -> None:
        """The last of a trial's blocks as a step, under `per_block/`, and its throughput over all of them so far."""
        run = self._run(trial)
        if blocks[-1].index in self._logged[trial]:
            return
        self._log_traces(trial, blocks, time_s)  # before what says that this block is written
        so_far = trial_metrics(blocks, trial.draft_steps, self.config.slo)
        last = trial_metrics(blocks[-1:], trial.draft_steps, self.config.slo)
        # MLflow's page of a run shows metrics in the order in which they first came
        metrics: dict[str, float] = {k: so_far[k] for k in ("output_tokens_per_s", "tau") if k in so_far}
        metrics |= {f"per_block/{k}": last[k] for k in BLOCK_METRICS if k in last}
        run.log_metrics(metrics, blocks[-1].index, time_s)

    def canary(self, trial: Trial, answers: Sequence[CanaryAnswer]) -> None:
        """What a promoted one is held against before it takes traffic."""
        self._run(trial).log_text(json.dumps([asdict(a) for a in answers], indent=1) + "\n", CANARY)

    def failed(self, trial: Trial, cause: str) -> None:
        self._run(trial).fail(cause)

    def given_up(self, trial: Trial, reason: str) -> None:
        """Fewer passes than the others, since nothing better was to be expected."""
        self._run(trial).set_tags({"given_up": reason})

    def logs(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.log")):
            self.parent.log_file(file, "logs")

    def close(
        self,
        results: Sequence[TrialResult],
        blocks: Mapping[Trial, Sequence[BlockRecord]],
        summary: str,
        machine: Mapping[str, str],
        time_s: float,
    ) -> None:
        """Pooled metrics, requests, table and figures; ends all runs but the parent's. `time_s` is that of the last
        measurement."""
        self.parent.set_tags(machine)  # the engines', which need not be the driver's
        stands_for_drafter = representatives(results)
        for result in results:
            run, own_blocks = self._run(result.trial), blocks.get(result.trial, ())
            model = self._model(result.trial)
            best = stands_for_drafter.get(result.trial.label)
            if model is not None and best is None:
                model.fail(result.error or "never measured")
            run.log_text(_requests_jsonl(own_blocks, self.config.keep_output_ids), "requests.jsonl")
            if result.error is not None:
                run.fail(result.error)
                continue
            if run.status == "FAILED":  # in one cohort, but not in another
                run.reopen()
            step = 1 + max(b.index for b in own_blocks)  # the last value of a name is the trial's
            keys = {metric_key(k): v for k, v in result.metrics.items()}
            in_order = dict(sorted(keys.items(), key=lambda pair: "/" in pair[0]))
            linked = model if best is result else None
            run.log_metrics(in_order, step, time_s, model=linked, dataset=self._dataset)
            run.set_tags({**machine, MLFLOW_RUN_NOTE: standing(result)})
            run.finish()
            if linked is not None:
                self._close_model(linked, result, run)
        failed = [r.trial.name for r in results if r.error]
        counts = {"trials": len(results), "failed_trials": len(failed)}
        self.parent.log_metrics({**best_metrics(results), **counts}, time_s=time_s)
        self.parent.log_text(summary + "\n", "summary.md")
        text = verdicts(results)
        bullets = "\n".join(f"- {line}" for line in text.values())
        note = "\n\n".join(part for part in (decision(results), busy(results), bullets) if part)
        self.parent.set_tags({"decision": decision(results), MLFLOW_RUN_NOTE: note})
        self.parent.set_tags({f"verdict.{safe_name(traffic.label)}": line for traffic, line in text.items()})
        with tempfile.TemporaryDirectory() as folder:
            for file in write_figures(results, Path(folder), lambda t: _requests(blocks.get(t, ()))):
                self.parent.log_file(file, "figures")

    def _log_traces(self, trial: Trial, blocks: Sequence[BlockRecord], time_s: float) -> None:
        if sum(len(b.requests) for b in blocks[:-1]) >= self.config.traces:
            return
        model = self._model(trial)
        log_traces(
            TracingClient(self.tracker.uri),
            self.tracker.experiment_id,
            self._run(trial).run_id,
            model.model_id if model else None,
            blocks,
            self.config.traces,
            time_s,
            with_output_ids=self.config.keep_output_ids,
        )

    def _close_model(self, model: Model, best: TrialResult, run: Run) -> None:
        trial = best.trial
        if model.is_failed:  # cut off, or failed in an earlier attempt
            model.reopen()
        own = {"trial": trial.name, "trial_run_id": run.run_id, "traffic": str(trial.traffic)}
        model.set_tags({**own, "draft_steps": str(trial.draft_steps), MLFLOW_RUN_NOTE: standing(best)})
        model.finish()

    def _model(self, trial: Trial) -> Model | None:
        """The logged model of the trial's drafter, made when it is first asked for; None for plain decoding."""
        if trial.candidate is None:
            return None
        own = {k: v for k, v in trial.candidate.params().items() if k not in OF_A_TRIAL}
        context = {name: getattr(self.config, name) for name in ("target", "workload", "temperature", "max_new_tokens")}
        tags = {**self.tags, "kind": "drafter", **self._drafters.get(trial.label, {})}
        return self.tracker.model(self.parent, trial.label, tags, {**own, **context})

    def _run(self, trial: Trial) -> Run:
        """The trial's run, made with its parameters when it is first asked for."""
        if trial not in self._runs:
            tags = {**self.tags, "kind": "trial", "head": trial.label}
            tags |= self._drafters.get(trial.label, {})
            run = self.tracker.child(self.parent, trial.name, tags)
            short = self._short.get(trial.label, trial.label)
            run.log_params({**trial_params(trial, self.config), "head": short, **self._sweep_params})
            if self._dataset is not None:
                run.log_dataset(self._dataset, "eval")
            model = self._model(trial)
            if model is not None:
                run.use_model(model)
            self._logged[trial] = run.steps("per_block/wall_s")
            self._runs[trial] = run
        return self._runs[trial]


def standing(result: TrialResult) -> str:
    """A trial in a line: throughput, tau, and its speed-ups with their intervals."""
    parts = [f"{result.metrics['output_tokens_per_s']:.1f} tokens/s"]
    parts += [f"tau {result.metrics['tau']:.2f}"] if "tau" in result.metrics else []
    for name, words in (("plain", "plain decoding"), ("baseline", f"the baseline {result.baseline}")):
        interval = result.speedup(name)
        if interval is not None and not (name == "baseline" and result.is_baseline):
            parts.append(f"{ratio(interval)} of {words}")
    return ", ".join(parts) + "."


def representatives(results: Sequence[TrialResult]) -> dict[str, TrialResult]:
    """For each drafter that was measured, the trial with the largest speed-up over plain decoding; where none has a
    speed-up, the one with the highest throughput."""

    def rank(result: TrialResult) -> tuple[float, float]:
        gain = result.speedup("plain")
        return (gain.value if gain else 0.0, result.metrics["output_tokens_per_s"])

    found: dict[str, TrialResult] = {}
    for result in results:
        if result.error is None and result.trial.candidate is not None:
            label = result.trial.label
            found[label] = max(found.get(label, result), result, key=rank)
    return found


def best_metrics(results: Sequence[TrialResult]) -> dict[str, float]:
    """`best_` speed-up over plain decoding, with its interval, and tau of the trial that is chosen where speculation
    gains most; empty where no speed-up could be measured."""
    best = max(choices(results), key=lambda c: (c.pays is True, c.speedup.value if c.speedup else 0.0), default=None)
    if best is None or best.best is None:
        return {}
    names = ("speedup_vs_plain", "speedup_vs_plain_ci_low", "speedup_vs_plain_ci_high", "tau")
    return {f"best_{name}": best.best.metrics[name] for name in names if name in best.best.metrics}


def trial_params(trial: Trial, config: SweepConfig) -> dict[str, object]:
    """What sets a trial apart, beside the sweep's own parameters."""
    own = trial.candidate.params() if trial.candidate else {"speculative_algorithm": PLAIN, "draft_steps": 0}
    load = {
        "concurrency": trial.traffic.concurrency,  # 0 under open-loop load
        "request_rate": trial.traffic.request_rate,  # 0 in a closed loop, and for a trace
        **({"trace_speed": trial.traffic.trace_speed} if trial.traffic.is_trace else {}),
        "temperature": config.temperature_of(trial.traffic),
    }
    return {**own, **load}


def workload_dataset(config: SweepConfig, prompts: Sequence[Conversation]) -> Dataset:
    """The prompts in their order, as MLflow describes a dataset: digest, columns and size, not the text itself."""
    asked = [{name: value for name, value in asdict(p).items() if name != "answers"} for p in prompts]
    frame = pd.DataFrame([{"id": p["id"], "category": p["category"], "turns": json.dumps(p)} for p in asked])
    trace = {} if config.trace is None else {"trace": config.trace.path}
    source = CodeDatasetSource({"workload": config.workload, "seed": str(config.seed), **trace})
    return mlflow.data.from_pandas(frame, source=source, name=config.workload[:DATASET_NAME_LIMIT])


def _requests_jsonl(blocks: Sequence[BlockRecord], keep_output_ids: bool) -> str:
    left_out = () if keep_output_ids else ("output_ids",)
    lines = [{k: v for k, v in line.items() if k not in left_out} for line in _requests(blocks)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _requests(blocks: Sequence[BlockRecord]) -> list[dict[str, Any]]:
    return [
        {"block": b.index, "prompt_block": b.prompt_block, "output_tokens": r.output_tokens, **asdict(r)}
        for b in blocks
        for r in b.requests
    ]
