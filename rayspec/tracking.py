"""MLflow by explicit run ids, from one process: a parent run and its children, none of which is ever left running.

Everything can be written twice without harm: runs are found again by their tags, parameters, tags and artifacts
replace themselves, and MLflow's stores keep a metric of the same key, step, time and value once. So whoever does not
know whether a write arrived, because the server or this process died meanwhile, writes again.
"""

import contextlib
import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

os.environ.setdefault("MLFLOW_DISABLE_AGENT_HINTS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # a line for every run that ends

import mlflow
import sqlalchemy
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from mlflow import MlflowClient, entities
from mlflow.data.dataset import Dataset
from mlflow.entities import DatasetInput, InputTag, LoggedModelInput, Metric, Param, RunTag
from mlflow.environment_variables import (
    MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING,
    MLFLOW_HTTP_REQUEST_MAX_RETRIES,
    MLFLOW_HTTP_REQUEST_TIMEOUT,
)
from mlflow.exceptions import MlflowException
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor
from mlflow.utils.mlflow_tags import (
    MLFLOW_DATASET_CONTEXT,
    MLFLOW_GIT_COMMIT,
    MLFLOW_PARENT_RUN_ID,
    MLFLOW_SOURCE_NAME,
    MLFLOW_USER,
)
from requests import RequestException
from sqlalchemy.exc import SQLAlchemyError

from rayspec.disk import is_full
from rayspec.home import DATABASES
from rayspec.logged_models import RESUME_TAG, TAG_VALUE_LIMIT, Model, create_model, find_models
from rayspec.messages import first_line
from rayspec.new_store import make_sqlite_store

PARAM_VALUE_LIMIT = 6000  # MLflow's own
BATCH_LIMIT = 100  # parameters in one call
METRICS_LIMIT = 1000
RETRY_S = 5.0
SYSTEM_METRICS_INTERVAL_S = 10


UNREACHABLE = (MlflowException, SQLAlchemyError, OSError)  # what a store that is gone or full raises, and others


class TrackingError(ValueError):
    """The MLflow store cannot be used; the message says why and what to do, without any password."""


class ArtifactsAway(TrackingError):
    """The store of artifacts failed in a way of its own: it may be away, or want keys that this process lacks."""


def is_outage(error: BaseException) -> bool:
    """Whether the store may be back later, as opposed to having refused."""
    if isinstance(error, MlflowException):
        return error.get_http_status_code() >= 500
    return isinstance(error, (SQLAlchemyError, RequestException)) or is_full(error)


def is_refusal(error: BaseException) -> bool:
    """Whether MLflow has answered, and would say no again: what is asked for is gone, say, or not allowed."""
    return isinstance(error, MlflowException) and not is_outage(error)


def persistently(write: Callable[[], None], patience_s: float) -> None:
    """Call `write`, which may be called twice, until the store takes it. Raises its error after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return write()
        except UNREACHABLE as error:
            if not is_outage(error) or time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


class Run:
    """One MLflow run. It is RUNNING until `finish` or `fail`; both may be called again without effect."""

    def __init__(self, client: MlflowClient, run_id: str, status: str = "RUNNING") -> None:
        self.client = client
        self.run_id = run_id
        self.status = status

    @property
    def is_open(self) -> bool:
        return self.status == "RUNNING"

    def reopen(self) -> None:
        """Set it RUNNING again, and forget why it had ended."""
        tags = self.client.get_run(self.run_id).data.tags
        for tag in ("error", RESUME_TAG):
            if tag in tags:
                self.client.delete_tag(self.run_id, tag)
        self.client.update_run(self.run_id, status="RUNNING")
        self.status = "RUNNING"

    def steps(self, key: str) -> set[int]:
        """The steps at which a metric has been logged."""
        return {m.step for m in self.client.get_metric_history(self.run_id, key)}

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log parameters. A value longer than MLflow keeps is cut, and lies whole in long_parameters/KEY.txt."""
        items = [Param(key, self._kept(key, str(value))) for key, value in params.items()]
        for i in range(0, len(items), BATCH_LIMIT):
            self.client.log_batch(self.run_id, params=items[i : i + BATCH_LIMIT])

    def _kept(self, key: str, value: str) -> str:
        if len(value) <= PARAM_VALUE_LIMIT:
            return value
        whole = f"long_parameters/{key}.txt"
        self.log_text(value, whole)
        note = f"… ({len(value):,} characters, whole in {whole})"
        return value[: PARAM_VALUE_LIMIT - len(note)] + note

    def log_metrics(
        self,
        metrics: Mapping[str, float],
        step: int = 0,
        time_s: float | None = None,
        *,
        model: Model | None = None,
        dataset: Dataset | None = None,
    ) -> None:
        """Log values, also as those of a logged model on a dataset. With the time when they were measured (Unix
        seconds), logging again has no effect."""
        at = int(1000 * (time.time() if time_s is None else time_s))
        links = {"model_id": model.model_id} if model else {}
        links |= {"dataset_name": dataset.name, "dataset_digest": dataset.digest} if model and dataset else {}
        entries = [Metric(k, float(v), at, step, **links) for k, v in metrics.items()]
        for i in range(0, len(entries), METRICS_LIMIT):
            self.client.log_batch(self.run_id, metrics=entries[i : i + METRICS_LIMIT])

    def set_tags(self, tags: Mapping[str, str]) -> None:
        self.client.log_batch(self.run_id, tags=[RunTag(k, v[:TAG_VALUE_LIMIT]) for k, v in tags.items()])

    def log_dataset(self, dataset: Dataset, context: str) -> None:
        """Record what the run was measured on, under `context` ("eval", "training")."""
        tags = [InputTag(MLFLOW_DATASET_CONTEXT, context)]
        self.client.log_inputs(self.run_id, [DatasetInput(entities.Dataset(**dataset.to_dict()), tags)])

    def use_model(self, model: Model) -> None:
        """Record which logged model the run has measured."""
        self.client.log_inputs(self.run_id, models=[LoggedModelInput(model.model_id)])

    def log_text(self, text: str, artifact_file: str) -> None:
        """Store `text` as the artifact `artifact_file` (a path with folders)."""
        self.client.log_text(self.run_id, text, artifact_file)

    def log_file(self, path: Path, folder: str | None = None) -> None:
        self.client.log_artifact(self.run_id, str(path), folder)

    def finish(self) -> None:
        self._end("FINISHED")

    def fail(self, cause: str) -> None:
        """End as FAILED, with the cause as the tag `error` and the artifact error.txt."""
        if self.is_open:
            self.set_tags({"error": cause})
            self.log_text(cause + "\n", "error.txt")
        self._end("FAILED")

    def cut_off(self, resume: str) -> None:
        """End as KILLED, with the command that goes on as the tag `resume`."""
        if self.is_open:
            self.set_tags({RESUME_TAG: resume})
        self._end("KILLED")

    def _end(self, status: str) -> None:
        if self.is_open:
            self.client.set_terminated(self.run_id, status)
            self.status = status


class Tracker:
    """A parent run and its children in one experiment of one store."""

    def __init__(self, uri: str, experiment: str, artifact_uri: str | None = None) -> None:
        self.uri = uri
        self.client = connect(uri)
        self.experiment_id = self._experiment(experiment, artifact_uri)
        self._children: list[Run] = []
        self._models: dict[str, Model] = {}  # by label
        self._known_models: dict[str, entities.LoggedModel] | None = None  # of the parent
        self._known: dict[str, entities.Run] | None = None  # children of the parent, as far as they are known by name

    @contextlib.contextmanager
    def parent(
        self, name: str, tags: Mapping[str, str], *, run_id: str | None = None, resume: str | None = None
    ) -> Iterator[Run]:
        """A parent run, or that of `run_id` again: FINISHED at the end of the block; with any exception (Ctrl-C too) it
        and its open children are FAILED with the traceback, and the exception goes on. `resume` is the command with
        which the user goes on then. The run carries this machine's system metrics."""
        run = Run(self.client, run_id, "KILLED") if run_id else self._create(name, tags)
        if run_id:
            run.reopen()
        try:
            with _system_metrics(self.uri, run.run_id, resume=run_id is not None):
                yield run
        except BaseException as error:
            cause = "interrupted" if isinstance(error, KeyboardInterrupt | SystemExit) else traceback.format_exc()
            with contextlib.suppress(*UNREACHABLE):  # a store that is gone must not hide the error
                for part in self._parts():
                    if resume and part.is_open:
                        part.set_tags({RESUME_TAG: resume})
                    part.fail(f"the sweep ended before this did: {type(error).__name__}: {error}")
                run.set_tags({RESUME_TAG: resume} if resume else {})
                run.fail(cause)
            raise
        for part in self._parts():
            part.finish()
        run.finish()

    def _parts(self) -> list[Run | Model]:
        return [*self._children, *self._models.values()]

    def child(self, parent: Run, name: str, tags: Mapping[str, str]) -> Run:
        """A run under `parent`, or the one that has this name there; ended by whoever opened it, at the latest with the
        parent."""
        if self._known is None:
            self._known = {
                r.info.run_name: r for r in self.search(f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent.run_id}'")
            }
        if name in self._known:
            found = self._known[name]
            run = Run(self.client, found.info.run_id, found.info.status)
            if RESUME_TAG in found.data.tags:
                run.reopen()
        else:
            # the answer may be lost although the run was made
            self._known, known = None, self._known
            run = self._create(name, {**tags, MLFLOW_PARENT_RUN_ID: parent.run_id})
            self._known = known
        self._children.append(run)
        return run

    def model(self, parent: Run, label: str, tags: Mapping[str, str], params: Mapping[str, object]) -> Model:
        """The logged model of this label that `parent` has made, or a new one; PENDING until the parent ends, unless it
        was ended before."""
        if label in self._models:
            return self._models[label]
        if self._known_models is None:
            self._known_models = find_models(self.client, self.experiment_id, parent.run_id)
        if label in self._known_models:
            found = self._known_models[label]
        else:
            # as above
            self._known_models, known = None, self._known_models
            found = create_model(self.client, self.experiment_id, parent.run_id, label, tags, params)
            self._known_models = known
        model = Model(self.client, found)
        if RESUME_TAG in found.tags:
            model.reopen()
        self._models[label] = model
        return model

    def search(self, condition: str) -> list[entities.Run]:
        """All runs of the experiment for which it holds."""
        runs: list[entities.Run] = []
        token: str | None = None
        while token is None or token:
            page = self.client.search_runs([self.experiment_id], condition, max_results=1000, page_token=token)
            runs += page
            token = page.token or ""
        return runs

    def _experiment(self, name: str, artifact_uri: str | None) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                location = f"{artifact_uri}/{name}" if artifact_uri else None
                return self.client.create_experiment(name, artifact_location=location)
            except MlflowException:  # another process was faster
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise TrackingError(
                f"MLflow experiment {name!r} in {redacted(self.uri)} is deleted; restore it or set experiment=..."
            )
        return found.experiment_id

    def _create(self, name: str, tags: Mapping[str, str]) -> Run:
        own = {MLFLOW_SOURCE_NAME: "rayspec", MLFLOW_USER: os.environ.get("USER", "unknown")}
        if tags.get("git.commit", "unknown") != "unknown":
            own[MLFLOW_GIT_COMMIT] = tags["git.commit"]  # what MLflow's own pages show as the version
        run = self.client.create_run(self.experiment_id, run_name=name, tags={**own, **tags})
        return Run(self.client, run.info.run_id)


def connect(uri: str, *, create: bool = True) -> MlflowClient:
    """A client of the store, once it has answered. `create`: make it where there is none. Raises TrackingError.

    Who may log in is MLflow's own business: MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN.
    """
    try:
        with _quiet_migrations(), few_retries():
            _try_database(uri, create)
            client = MlflowClient(tracking_uri=uri)
            client.search_experiments(max_results=1)
    except (MlflowException, SQLAlchemyError, ImportError, OSError) as error:
        cause = said(error, uri)
        way_out = (
            "Whatever made or upgraded its tables was interrupted: move it aside, or restore it from a copy"
            if "already exists" in cause
            else "Check MLFLOW_TRACKING_URI, and for a server with a login MLFLOW_TRACKING_USERNAME and _PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN"
        )
        raise TrackingError(
            f"MLflow at {redacted(uri)} does not answer: {cause}. {way_out}"
        ) from None  # a driver's own message may repeat the password
    return client


def _try_database(uri: str, create: bool) -> None:
    """Connect once where MLflow would try for minutes, with warnings. Raises TrackingError for a store that a newer
    MLflow has written, and for none unless it may `create` one."""
    none = TrackingError(
        f"there is no MLflow store at {redacted(uri)} yet, so nothing is registered there; set MLFLOW_TRACKING_URI, or "
        "RAYSPEC_HOME, to the one that a sweep or rayspec report --promote has written"
    )
    if not uri.startswith(DATABASES):
        if not create and "://" not in uri and not os.path.isdir(uri):  # a folder, which MLflow would make
            raise none
        return
    engine = sqlalchemy.create_engine(uri)
    if engine.dialect.name == "sqlite" and engine.url.database:
        file = Path(engine.url.database)
        is_missing = file.name != ":memory:" and not file.exists()
        if is_missing and not create:
            raise none
        file.parent.mkdir(parents=True, exist_ok=True)  # as MLflow does
        if is_missing:
            make_sqlite_store(file)
    with engine.connect() as connection:
        found = MigrationContext.configure(connection).get_current_revision()  # reads: a file may be no database
    engine.dispose()
    if found is None:  # a new store
        if not create:
            raise none
        return
    try:
        ScriptDirectory(str(Path(mlflow.__file__).parent / "store" / "db_migrations")).get_revision(found)
    except CommandError:
        raise TrackingError(
            f"MLflow's store {redacted(uri)} has the schema {found}, which the installed MLflow {mlflow.__version__} "
            "does not know: a newer one has written it. Install that one, or set MLFLOW_TRACKING_URI (or RAYSPEC_HOME) "
            "to another store"
        ) from None


def redacted(uri: str) -> str:
    """The address without its user, password and query, for whatever is printed or logged."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc and not parts.query:
        return uri
    user, at, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{'***' if user else ''}{at}{host}", query=""))


def said(error: BaseException, uri: str) -> str:
    """The first line of what the store at `uri` says of an error, without its password."""
    text = first_line(error)
    password = urlsplit(uri).password or ""
    text = text.replace(uri, redacted(uri))
    for form in {password, unquote(password)} - {""}:
        text = text.replace(form, "***")
    return text


def how_to_look(uri: str) -> str:
    """Where a person finds the runs of a store."""
    return redacted(uri) if uri.startswith("http") else f"mlflow ui --backend-store-uri {redacted(uri)}"


@contextlib.contextmanager
def few_retries(timeout_s: int | None = None) -> Iterator[None]:
    """MLflow tries for minutes; who mistyped an address should not wait for that. `timeout_s` of each try; None:
    MLflow's own two minutes. What the user has set, stays."""
    wanted = ((MLFLOW_HTTP_REQUEST_MAX_RETRIES, 1), (MLFLOW_HTTP_REQUEST_TIMEOUT, timeout_s))
    ours = [(variable, value) for variable, value in wanted if value is not None and not variable.is_set()]
    for variable, value in ours:
        variable.set(value)
    try:
        yield
    finally:
        for variable, _ in ours:
            variable.unset()


@contextlib.contextmanager
def _system_metrics(uri: str, run_id: str, *, resume: bool) -> Iterator[None]:
    """Sample this machine for the length of the block, unless MLflow's own switch says no.

    The names carry the host: on a cluster the engines may run elsewhere.
    """
    if MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.is_set() and not MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
        yield
        return
    # both log pages of traceback when a disk is full for a while, which whoever records results says in a line
    logging.getLogger(SystemMetricsMonitor.__module__).setLevel(logging.ERROR)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    monitor = SystemMetricsMonitor(
        run_id,
        sampling_interval=SYSTEM_METRICS_INTERVAL_S,
        resume_logging=resume,  # at the next step
        node_id=socket.gethostname(),
        tracking_uri=uri,
    )
    monitor.start()
    try:
        yield
    finally:
        monitor.finish()


@contextlib.contextmanager
def _quiet_migrations() -> Iterator[None]:
    """A new SQLite store logs some fifty lines of Alembic migrations, which say nothing to a user."""
    loggers = [logging.getLogger(name) for name in ("alembic", "mlflow.store.db.utils")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
