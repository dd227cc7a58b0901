"""The winner of a sweep in MLflow's model registry: its checkpoint, complete in itself, with the evidence."""

import logging
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_ALREADY_EXISTS, ErrorCode

from rayspec.champion_fields import NOT_OF_A_RECORD
from rayspec.logged_models import MODEL_ID_TAG, add_version, find_models
from rayspec.messages import quoted
from rayspec.report.decision import choices, decision, ratio
from rayspec.serving.champion import ARTIFACT, PINNED
from rayspec.serving.flags import engine_config, serve_command, serving_flags
from rayspec.serving.policy import measured_policy, policy_text
from rayspec.serving.record import ServingRecord, files_sha256
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.record.folder import (
    DRAFTER_SHA256,
    TARGET_SHA256,
    WHOLE_SHA256,
    drafter_sha256,
    whole_drafter_sha256,
)
from rayspec.sweep.record.results import TrialResult
from rayspec.sweep.record.stored import StoredSweep
from rayspec.tracking import TrackingError, redacted
from sglang_ext.drafters.complete import check_complete, write_complete
from sglang_ext.folder_kinds import POLICY
from sglang_ext.whole import write_whole

logger = logging.getLogger(__name__)
ALIAS = "champion"
RESERVED = re.compile(r"latest|v\d+", re.IGNORECASE)  # aliases that MLflow keeps for itself
REPORT = "report"  # folder of the sweep's artifacts
EVIDENCE = ("tau", "speedup_vs_plain", "speedup_vs_baseline", "output_tokens_per_s", "output_mismatches")


class PromotionRefused(ValueError):
    """No candidate has earned promotion; the message holds the decision."""


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """A version of a registered model; `alias`: what names it, None for its number alone."""

    model: str
    version: str
    alias: str | None
    winner: TrialResult

    @property
    def uri(self) -> str:
        return self.pinned if self.alias is None else f"models:/{self.model}@{self.alias}"

    @property
    def pinned(self) -> str:
        return f"models:/{self.model}/{self.version}"


def winner(results: Sequence[TrialResult], traffic: str | None = None, force: bool = False) -> TrialResult:
    """The chosen trial of the traffic (or of that with this label) under which speculation gains most.

    Raises PromotionRefused where none is clearly faster than plain decoding; with `force`, only where none was
    measured.
    """
    made = choices(results)
    if traffic is not None:
        known = ", ".join(c.traffic.label for c in made)
        made = [c for c in made if c.traffic.label == traffic]
        if not made:
            raise ValueError(f"--traffic must be one that the sweep measured ({known}), got {traffic!r}")
    candidates = [c for c in made if c.pays] or ([c for c in made if c.best] if force else [])
    gains = [(c.speedup.value, c.best) for c in candidates if c.speedup and c.best]
    if not gains:
        raise PromotionRefused(
            f"no candidate is clearly faster than plain decoding, so none is promoted: {decision(results)} Measure "
            "longer (repeats=...), or promote the best all the same with --force"
        )
    return max(gains, key=lambda pair: pair[0])[1]


def promote(
    sweep: StoredSweep, report: Path, best: TrialResult, model: str | None = None, alias: str | None = ALIAS
) -> Promotion:
    """Register the checkpoint of `best` as a new version of `model` and point `alias` at it; None: no alias moves.

    `report` is the folder of write_report; it becomes an artifact of the sweep. Raises ValueError as check_promotion.
    """
    client, trial = sweep.client, best.trial
    model = model or default_model(sweep.params["target"])
    record = check_promotion(sweep, best, model, alias)
    run_id = sweep.run_ids[trial]
    run = client.get_run(run_id)
    with TemporaryDirectory() as folder:
        copy = Path(folder) / ARTIFACT
        write_complete(trial.drafted.path, copy)
        policy = measured_policy(sweep, best)
        if policy is not None:
            write_whole(copy / POLICY, policy_text(policy))
        pinned = replace(record, files=files_sha256(copy)).write(copy)
        place = f"{ARTIFACT}-{pinned[:12]}"  # named by these very files: those of an earlier version stay as they are
        for name in ("report.md", "report.html"):
            client.log_artifact(sweep.run_id, str(report / name), REPORT)
        client.log_artifacts(sweep.run_id, str(report / "figures"), f"{REPORT}/figures")
        client.log_artifacts(run_id, str(copy), place)
    # sweeps had no logged models before, and a user may have deleted one
    logged = find_models(client, run.info.experiment_id, sweep.run_id).get(trial.label)
    try:
        _register(client, model)
        # MLflow's stores have no column for the model's id, and its server takes one for the files of a model alone;
        # those of a version lie with its run, since trials of one drafter differ in what they are served with
        version = client.create_model_version(
            model,
            f"{run.info.artifact_uri}/{place}",
            run_id,
            tags=evidence(sweep, best) | {PINNED: pinned} | ({MODEL_ID_TAG: logged.model_id} if logged else {}),
            description=_description(sweep, best, model, alias, place),
        )
        if logged is not None:
            add_version(client, logged.model_id, model, str(version.version))
        if alias is not None:
            client.set_registered_model_alias(model, alias, version.version)
    except MlflowException as error:
        raise TrackingError(f"model {model!r} could not be registered: {error.message}") from error
    return Promotion(model=model, version=str(version.version), alias=alias, winner=best)


def check_promotion(sweep: StoredSweep, best: TrialResult, model: str, alias: str | None = ALIAS) -> ServingRecord:
    """What a promotion of `best` would record, but for the files. Nothing is written.

    Raises ValueError where the drafter is gone, has changed since it was measured or cannot be copied, where the sweep
    lacks what a record needs or has settings that none may hold, and for names that MLflow allows no model or alias.
    """
    if re.search("[/:]", model) or not model.strip():
        raise ValueError(f"--model must be a name without / and :, which MLflow allows in no model's, got {model!r}")
    if alias is not None and (RESERVED.fullmatch(alias) or not re.fullmatch(r"[\w-]{1,255}", alias)):
        raise ValueError(
            "--alias must be at most 255 letters, digits, _ and -, and neither latest nor v and a number, which MLflow "
            f"keeps for itself, got {quoted(alias)}"
        )
    trial = best.trial
    _check_measured(trial.drafted, trial.name, sweep.client.get_run(sweep.run_ids[trial]).data.tags)
    check_complete(trial.drafted.path)
    return _record(sweep, best)


def _check_measured(candidate: Candidate, trial: str, tags: Mapping[str, str]) -> None:
    """Raise ValueError where the drafter is not the one that a trial measured."""
    changed = None
    if drafter_sha256(candidate) != tags.get(DRAFTER_SHA256):
        changed = "its weights have"
    elif WHOLE_SHA256 in tags and whole_drafter_sha256(candidate) != tags[WHOLE_SHA256]:
        changed = "its config.json, or the weights of a drafter that it shares tensors with, have"
    if changed is not None:
        raise ValueError(
            f"the drafter at {candidate.path} is not the one that trial {trial} measured ({changed} changed or are "
            "gone); put the measured folder back there, or sweep again"
        )
    if WHOLE_SHA256 not in tags:
        logger.warning(
            "trial %s was measured by an earlier release, which noted the fingerprint of its drafter's own weights "
            "alone: it cannot be checked whether the config.json of %s, or tensors that it shares with other drafters, "
            "have changed since; sweep again if they may have",
            trial,
            candidate.path,
        )


def champion_of(
    sweep: StoredSweep, best: TrialResult, model: str | None = None, alias: str = ALIAS
) -> Promotion | None:
    """What the alias names, where it is the checkpoint of this very trial."""
    model = model or default_model(sweep.params["target"])
    try:
        version = sweep.client.get_model_version_by_alias(model, alias)
    except MlflowException:  # there is none; a store that is gone says so to whoever writes
        return None
    is_same = version.run_id == sweep.run_ids[best.trial]
    return Promotion(model=model, version=str(version.version), alias=alias, winner=best) if is_same else None


def default_model(target: str) -> str:
    """The registered model of a target's drafters; MLflow allows neither / nor : in it."""
    return "drafter-" + re.sub(r"[/:]+", "-", target.strip("/"))


def evidence(sweep: StoredSweep, best: TrialResult) -> dict[str, str]:
    """Tags of the version: what was measured, how surely, and where it can be looked up."""
    trial, tags = best.trial, sweep.tags
    plain = best.speedup("plain")
    assert plain is not None, "chosen by its speed-up"
    claim = {True: "yes", False: "no"}[any(c.best is best and c.pays for c in choices(sweep.results))]
    values = {f"{k}{end}": best.metrics.get(f"{k}{end}") for k in EVIDENCE for end in ("", "_ci_low", "_ci_high")}
    return {
        "head": trial.label,
        "draft_steps": str(trial.draft_steps),
        "traffic": str(trial.traffic),
        "clearly_faster_than_plain": claim,
        **{k: f"{v:.4g}" for k, v in values.items() if v is not None},
        "sweep_run_id": sweep.run_id,
        "trial_run_id": sweep.run_ids[trial],
        "report": f"runs:/{sweep.run_id}/{REPORT}/report.html",
        **{k: sweep.params[k] for k in ("target", "workload")},
        "temperature": str(sweep.temperature(trial)),
        **{k: v for k, v in tags.items() if k.startswith(("git.", "version.", "host."))},
    }


def _record(sweep: StoredSweep, best: TrialResult) -> ServingRecord:
    """All but the files. Raises ValueError for a sweep that did not say which target it measured, and for settings that
    no record may hold."""
    target_sha256 = sweep.tags.get(TARGET_SHA256)
    if target_sha256 is None:
        raise ValueError(
            f"sweep {sweep.name} ({sweep.run_id}) was made by an earlier release, which did not note the fingerprint "
            "of its target, so it cannot be checked what its winner is served with; sweep again"
        )
    engine, canary = engine_config(sweep), sweep.canary(best.trial)
    if not canary and sweep.params.get("canary") == "True":
        logger.warning(
            "trial %s was not asked the canary prompts (its cohort was given up, another was faster in it, or its "
            "engine did not answer), so a canary holds its tau against that of a running version alone",
            best.trial.name,
        )
    return ServingRecord(
        head=best.trial.label,
        target=sweep.params["target"],
        target_sha256=target_sha256,
        files={},
        # a sweep that ran with code of the target's authors may be promoted; who serves it says so again
        flags={k: v for k, v in serving_flags(engine, best.trial).items() if k not in NOT_OF_A_RECORD},
        canary=canary,
        num_threads=engine.get("num_threads"),
        nodes=engine.get("nodes", 1),
        evidence=evidence(sweep, best),
    )


def _description(sweep: StoredSweep, best: TrialResult, model: str, alias: str | None, place: str) -> str:
    """`place`: the folder of the trial's artifacts that holds the drafter."""
    trial, p = best.trial, sweep.params
    served = sweep.run_ids[trial] if alias is None else f"models:/{model}@{alias}"
    gain = f"{ratio(best.speedup('plain'))} over plain decoding at {trial.traffic} on {p['workload']}"
    source = f"runs:/{sweep.run_ids[trial]}/{place}"
    store = f"MLFLOW_TRACKING_URI={shlex.quote(redacted(sweep.client.tracking_uri))}"
    fetch = f"{store} mlflow artifacts download --artifact-uri {source} --dst-path {ALIAS}"
    serve = serve_command(sweep, trial, f"{ALIAS}/{place}")
    checked = f"{store} rayspec serve {served}"
    parts = [
        f"{trial.label} at {trial.draft_steps} draft steps: {gain}.",
        f"The whole decision: {decision(sweep.results)}",
        f"Serve it, once its evidence and its files have been checked:\n```\n{checked}\n```",
        f"Or by hand, where rayspec is SGLang's plugin:\n```\n{fetch}\n{serve}\n```",
        f"Report: run {sweep.run_id}, artifact {REPORT}/report.html",
    ]
    return "\n\n".join(parts)


def _register(client: MlflowClient, model: str) -> None:
    try:
        client.create_registered_model(model, description="Draft heads that won a rayspec sweep.")
    except MlflowException as error:
        if error.error_code != ErrorCode.Name(RESOURCE_ALREADY_EXISTS):
            raise
