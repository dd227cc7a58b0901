"""Where a training run's figures go: its progress (kept in checkpoints and exported) and, unless off, MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rayspec.config import flatten
from rayspec.home import artifact_uri, prepared_home, tracking_uri
from rayspec.provenance import provenance
from rayspec.training.acceptance import Acceptance
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.group import Group
from rayspec.training.train_state import Progress

if TYPE_CHECKING:
    from rayspec.tracking import Run

EXPERIMENT = "rayspec-drafters"


class DrafterLog:
    """Open for the length of one training run; an exception inside marks the MLflow run as failed. Of several workers
    one alone writes to MLflow."""

    def __init__(self, config: DrafterTrainConfig, entry: DrafterEntry, progress: Progress, group: Group) -> None:
        self.config, self.entry, self.progress, self.group = config, entry, progress, group
        self.run: Run | None = None

    def __enter__(self) -> DrafterLog:
        if self.config.mlflow and self.group.is_writer:
            self.run = self._open_run()
        return self

    def _open_run(self) -> Run:
        from rayspec.tracking import Run, Tracker  # seconds of import, not paid where it is off

        prepared_home()
        tracker = Tracker(tracking_uri(), EXPERIMENT, artifact_uri())
        client, run_id = tracker.client, self.progress.mlflow_run_id
        if run_id is not None:  # a resumed run goes on in the same curves
            client.update_run(run_id, status="RUNNING")
            return Run(client, run_id)
        tags = {**provenance(), "draft_head": str(self.entry.draft_head), "mlflow.source.name": "rayspec"}
        created = client.create_run(tracker.experiment_id, run_name=self.entry.name, tags=tags)
        run = Run(client, created.info.run_id)
        run.log_params(flatten(self.config))
        self.progress.mlflow_run_id = run.run_id
        return run

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.run is None:
            return
        if error is None:
            self.run.finish()
        else:
            self.run.fail(f"{type(error).__name__}: {error}")

    def record(self, figures: dict[str, float]) -> None:
        """Figures of the step just done."""
        self.progress.history.append({"step": self.progress.step, **{k: round(v, 6) for k, v in figures.items()}})
        if self.run is not None:
            self.run.log_metrics(figures, step=self.progress.step)

    def tree_measured(self, figures: Mapping[str, float] | None) -> None:
        """What the drafter's own tree accepts of held-out answers; None for one without a tree."""
        if self.run is not None and figures is not None:
            named = {f"held_out.tree_{name}": float(value) for name, value in figures.items()}
            self.run.log_metrics(named, step=self.progress.step)

    def evaluated(self, acceptance: Acceptance) -> None:
        entry: dict[str, Any] = {"step": self.progress.step, **acceptance.to_dict()}
        self.progress.evaluations.append(entry)
        if self.run is not None:
            figures = {"held_out.tau_walk": acceptance.tau_walk}
            for i in range(len(acceptance.u)):
                figures[f"held_out.tau_{i + 1}"] = acceptance.tau[i]
                figures[f"held_out.accept_pos_{i + 1}"] = acceptance.u[i]
                figures[f"held_out.conditional_{i + 1}"] = acceptance.conditional[i]
                figures[f"held_out.overlap_{i + 1}"] = acceptance.overlap[i]
                figures[f"held_out.support_{i + 1}"] = acceptance.support[i]
                figures[f"held_out.mass_{i + 1}"] = acceptance.mass[i]
                figures[f"held_out.tv_on_support_{i + 1}"] = acceptance.tv_on_support[i]
            self.run.log_metrics(figures, step=self.progress.step)
