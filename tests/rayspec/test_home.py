"""Where results go."""

from pathlib import Path

import pytest
from disks import small_disk

from rayspec.home import CHECKOUT, artifact_uri, home, prepared_home, set_login_apart, tracking_uri


def test_default_is_in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYSPEC_HOME", raising=False)
    assert home() == CHECKOUT / ".rayspec"


def test_store_and_artifacts_follow_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "h"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert prepared_home().is_dir()
    assert tracking_uri() == f"sqlite:///{tmp_path}/h/mlflow.db"
    assert artifact_uri() == f"file://{tmp_path}/h/mlartifacts"


def test_a_tracking_server_keeps_its_own_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert tracking_uri() == "http://mlflow:5000"
    assert artifact_uri() is None


def test_a_database_without_a_server_has_its_artifacts_in_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "h"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql+psycopg://db/mlflow")
    assert artifact_uri() == f"file://{tmp_path}/h/mlartifacts"


def test_a_home_that_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "home"):
        monkeypatch.setenv("RAYSPEC_HOME", str(folder))
        with pytest.raises(ValueError, match=rf"RAYSPEC_HOME cannot be {folder} \(.*\); set RAYSPEC_HOME to"):
            prepared_home()
    with small_disk(tmp_path / "disk", 1, "ro") as disk:
        monkeypatch.setenv("RAYSPEC_HOME", str(disk))
        with pytest.raises(ValueError, match=rf"RAYSPEC_HOME is {disk}, which cannot be written to; set RAYSPEC_HOME"):
            prepared_home()
        monkeypatch.setenv("RAYSPEC_HOME", str(disk / "home"))
        with pytest.raises(ValueError, match="Read-only file system"):
            prepared_home()


def test_a_home_of_nobody_and_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", "~nobody-of-this-name/x")
    with pytest.raises(ValueError, match=r"RAYSPEC_HOME is '~nobody-of-this-name/x', but there is no such user"):
        prepared_home()
    for address, message in (("[bad:correct-horse@h", "is no address"), ("u:p/correct-horse@h:1", "has an @ behind")):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{address}")
        with pytest.raises(ValueError, match=f"MLFLOW_TRACKING_URI {message}") as error:
            set_login_apart()
        assert "correct-horse" not in str(error.value)


def test_a_home_that_ray_deletes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1" / ".rayspec"
    monkeypatch.setenv("RAYSPEC_HOME", str(folder))
    with pytest.raises(ValueError, match=r"RAYSPEC_HOME is .*runtime-env-json"):
        prepared_home()
    assert not folder.exists()
