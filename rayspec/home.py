"""Where results live: `$RAYSPEC_HOME`, by default `.rayspec/` in the checkout, or in the current folder without one."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

CHECKOUT = Path(__file__).resolve().parents[1]
# Ray unpacks a job's --working-dir under such a folder on the node and deletes it after the job.
RAY_EPHEMERAL = "working_dir_files"
ELSEWHERE = "set RAYSPEC_HOME to a folder that you may write to"
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # schemes that MLflow opens without a server


def home() -> Path:
    """The absolute home folder; it is not created here."""
    named = os.environ.get("RAYSPEC_HOME")
    if named:
        try:
            return Path(named).expanduser().resolve()
        except RuntimeError as error:
            raise ValueError(f"RAYSPEC_HOME is {named!r}, but there is no such user; write the path in full") from error
    root = CHECKOUT if (CHECKOUT / "pyproject.toml").is_file() else Path.cwd()
    return (root / ".rayspec").resolve()


def prepared_home() -> Path:
    """The home folder, created. Raises ValueError where it cannot be written, and where Ray would delete it together
    with the job's working_dir."""
    folder = home()
    if RAY_EPHEMERAL in folder.parts:
        raise ValueError(
            f"RAYSPEC_HOME is {folder}, inside the working_dir that Ray deletes after the job, so every result would "
            "vanish; submit with an absolute path that the cluster keeps: ray job submit --working-dir . "
            """--runtime-env-json '{"env_vars": {"RAYSPEC_HOME": "/data/rayspec"}}' -- rayspec sweep ..."""
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"RAYSPEC_HOME cannot be {folder} ({error.strerror}); {ELSEWHERE}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"RAYSPEC_HOME is {folder}, which cannot be written to; {ELSEWHERE}")
    return folder


def tracking_uri() -> str:
    """MLflow's store: `$MLFLOW_TRACKING_URI` if set, else the SQLite file in the home folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"


def set_login_apart() -> None:
    """Move user and password of a server's address in MLFLOW_TRACKING_URI into MLflow's own variables. Raises
    ValueError for what is no address.

    MLflow prints and logs the address; what is no part of it cannot be told.
    """
    try:
        parts = urlsplit(os.environ.get("MLFLOW_TRACKING_URI", ""))
    except ValueError as error:  # without the address, which may hold a password
        raise ValueError(f"MLFLOW_TRACKING_URI is no address ({error})") from error
    if parts.scheme not in ("http", "https"):
        return
    if "@" in parts.path + parts.query + parts.fragment:  # the rest of a password would be taken for a path, and shown
        raise ValueError(
            "MLFLOW_TRACKING_URI has an @ behind its host; in a user or password, /, ?, # and @ are written as %2F, "
            "%3F, %23 and %40, or set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    login, at, host = parts.netloc.rpartition("@")
    if not at:
        return
    user, _, password = login.partition(":")
    for name, value in (("MLFLOW_TRACKING_USERNAME", user), ("MLFLOW_TRACKING_PASSWORD", password)):
        if value:
            os.environ[name] = unquote(value)
    os.environ["MLFLOW_TRACKING_URI"] = urlunsplit(parts._replace(netloc=host))


def artifact_uri() -> str | None:
    """Where a new experiment keeps its artifacts: in the home folder beside a database, else as the server decides."""
    is_database = tracking_uri().startswith(DATABASES)
    return (home() / "mlartifacts").as_uri() if is_database else None
