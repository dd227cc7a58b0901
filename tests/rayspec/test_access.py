"""Who may ask the server, and how it is told."""

import os
import stat
from pathlib import Path

import pytest
import yaml
from versions import champion

from rayspec.serving.access import Access, api_key
from rayspec.serving.launch import described, serve


def test_what_is_told_of_a_server_names_no_password() -> None:
    told = described(champion("1"), ["python", "--ssl-keyfile-password", "of my own", "--port", "1"])
    assert told.endswith("python --ssl-keyfile-password '<redacted>' --port 1")


def test_the_key_is_of_a_file_or_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYSPEC_API_KEY", raising=False)
    assert api_key(None) is None
    monkeypatch.setenv("RAYSPEC_API_KEY", "from-there")
    assert api_key(None) == "from-there"
    (tmp_path / "key").write_text("from-a-file\n")
    assert api_key(str(tmp_path / "key")) == "from-a-file"
    for text in ("", "two words", "\x07", "schlüssel", "-begins-like-an-option"):
        (tmp_path / "key").write_text(text)
        with pytest.raises(ValueError, match="must be one word of printable ASCII characters"):
            api_key(str(tmp_path / "key"))
    with pytest.raises(ValueError, match="cannot be read"):
        api_key(str(tmp_path / "nothing"))


def test_who_asks_has_another_key_than_who_changes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSPEC_API_KEY", "correct-horse")
    monkeypatch.setenv("RAYSPEC_ADMIN_KEY", "correct-horse")
    with pytest.raises(ValueError, match="RAYSPEC_ADMIN_KEY must be another key") as caught:
        Access.given(None, 5)
    assert "horse" not in str(caught.value)


def test_the_server_finds_the_key_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSPEC_API_KEY", "correct-horse")
    monkeypatch.setenv("RAYSPEC_ADMIN_KEY", "battery-staple")
    out = tmp_path / "out"
    script = tmp_path / "server.sh"
    lines = [
        f'env > "{out}.env"',
        f'cat "$2" > "{out}"',
        f'stat -c %a "$2" > "{out}.mode"',
        f'echo "$2" > "{out}.path"',
    ]
    script.write_text("\n".join(["#!/bin/sh", *lines, "exit 7\n"]))
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    assert serve([str(script)], Access.given(None, 5), num_threads=3) == 7
    assert yaml.safe_load(out.read_text()) == {"api-key": "correct-horse", "admin-api-key": "battery-staple"}
    assert Path(f"{out}.mode").read_text().strip() == "600"
    variables = Path(f"{out}.env").read_text()
    assert "OMP_NUM_THREADS=3" in variables
    assert "RAYSPEC_MAX_BODY_MIB=5" in variables
    assert not any(key in variables for key in ("correct-horse", "battery-staple"))
    assert not os.path.exists(Path(f"{out}.path").read_text().strip())


def test_without_an_administrators_key_nobody_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would leave the routes that exchange weights open to whoever may ask for completions."""
    monkeypatch.delenv("RAYSPEC_ADMIN_KEY", raising=False)
    script, found = tmp_path / "server.sh", []
    script.write_text(f'#!/bin/sh\ncat "$2" > "{tmp_path}/out"\n')
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    for _ in range(2):
        assert serve([str(script)], Access(), num_threads=None) == 0
        found.append(yaml.safe_load((tmp_path / "out").read_text()))
    keys = [entry.pop("admin-api-key") for entry in found]
    assert found == [{}, {}]
    assert keys[0] != keys[1]
    assert min(map(len, keys)) >= 32
