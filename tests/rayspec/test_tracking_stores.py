"""MLflow stores that cannot be opened: said at once, with the way out."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rayspec.cli import main
from rayspec.new_store import make_sqlite_store
from rayspec.tracking import TrackingError, connect

AT_ONCE_S = 30.0  # MLflow itself tries for a minute and a half; this is what a busy machine may take


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    connect(f"sqlite:///{file}")
    return file


def schema(file: Path, *changes: str) -> None:
    with sqlite3.connect(file) as database:
        for change in changes:
            database.execute(change)
    database.close()


NEWER = "update alembic_version set version_num = 'abcdef012345'"
STORES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (lambda f: (f.unlink(), f.mkdir()), "unable to open database file"),
    "no database": (lambda f: f.write_text("shopping list\n" * 1000), "file is not a database"),
    "half of one": (lambda f: f.write_bytes(f.read_bytes()[:5000]), "database disk image is malformed"),
    "a newer one": (lambda f: schema(f, NEWER), "has the schema abcdef012345, which the installed MLflow"),
    "a much newer one": (lambda f: schema(f, NEWER, "drop table trace_tags"), "has the schema abcdef012345"),
}


@pytest.mark.parametrize("name", STORES)
def test_a_store_that_cannot_be_opened(name: str, tmp_path: Path, store: Path) -> None:
    damage, message = STORES[name]
    shutil.copy(store, tmp_path / "mlflow.db")
    damage(tmp_path / "mlflow.db")
    start = time.monotonic()
    with pytest.raises(TrackingError, match=f"(?s)sqlite:///{tmp_path}/mlflow.db.*{message}.*MLFLOW_TRACKING_URI"):
        connect(f"sqlite:///{tmp_path}/mlflow.db")
    assert time.monotonic() - start < AT_ONCE_S


def test_a_store_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrackingError, match=r"does not answer: .*(Not a directory|File exists)"):
        connect(f"sqlite:///{tmp_path}/file/mlflow.db")


@pytest.mark.parametrize("uri", ["sqlite:///{}/home/mlflow.db", "{}/mlruns"])
def test_who_only_reads_makes_no_store(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"there is no MLflow store at .* yet.*set MLFLOW_TRACKING_URI"):
        connect(uri.format(tmp_path), create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mlflow.db").touch()
    with pytest.raises(TrackingError, match="there is no MLflow store"):
        connect(f"sqlite:///{tmp_path}/home/mlflow.db", create=False)
    assert (tmp_path / "home" / "mlflow.db").stat().st_size == 0


def test_who_only_reads_reads_what_is_there(store: Path) -> None:
    assert connect(f"sqlite:///{store}", create=False).search_experiments() != []


@pytest.mark.parametrize("words", [["serve", "models:/m@champion"], ["gate", "models:/m@champion", "other"]])
def test_a_plan_makes_no_store(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main([*words, "--plan"]) == 2
    assert "error: there is no MLflow store at sqlite:///" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


HALF_MADE = "pragma foreign_keys = off", "drop table alembic_version", "drop table metrics"


def test_a_store_whose_making_was_interrupted(tmp_path: Path, store: Path) -> None:
    shutil.copy(store, tmp_path / "mlflow.db")
    schema(tmp_path / "mlflow.db", *HALF_MADE)
    with pytest.raises(TrackingError, match=r"already exists.*was interrupted: move it aside"):
        connect(f"sqlite:///{tmp_path}/mlflow.db")


KILLED = """
import os, signal, sys
from pathlib import Path
import rayspec.new_store as new_store
from mlflow.store.db.utils import InitialBase as Base

def killed(engine):  # after the first tables
    Base.metadata.create_all(engine)
    os.kill(os.getpid(), signal.SIGKILL)

new_store._initialize_tables = killed
from rayspec.tracking import connect
connect("sqlite:///" + sys.argv[1])
"""


def test_a_new_store_is_made_whole(tmp_path: Path) -> None:
    """Whoever is killed while making it leaves none, and the next one makes it."""
    file = tmp_path / "mlflow.db"
    died = subprocess.run([sys.executable, "-c", KILLED, str(file)], env=os.environ, check=False)
    assert died.returncode == -signal.SIGKILL
    assert not file.exists()
    connect(f"sqlite:///{file}")
    assert file.exists()


def test_a_store_that_another_process_has_made_stays(tmp_path: Path, store: Path) -> None:
    shutil.copy(store, tmp_path / "mlflow.db")
    before = (tmp_path / "mlflow.db").read_bytes()
    make_sqlite_store(tmp_path / "mlflow.db")
    assert (tmp_path / "mlflow.db").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["mlflow.db"]
