"""A sweep on disk, `$RAYSPEC_HOME/sweeps/<id>/`: all that is needed to go on after anything.

`config.yaml` as resolved, `manifest.json` (command, fingerprints of what is measured, the MLflow run), `journal.jsonl`,
`logs/` of the engines, `ended` once nothing is left to do. Its driver holds a lock on `lock`, which the kernel takes
away with the process, however it ends.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rayspec.config import load_config, to_yaml
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan import Drafter
from rayspec.sweep.prepare import Prepared
from sglang_ext.drafters.checkpoint import WEIGHTS, weights_sha256


class SweepFolder:
    """The folder of one sweep; `path.name` is the sweep's id."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, home: Path, prepared: Prepared, command: str) -> "SweepFolder":
        """A new one, complete before it is there."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", prepared.config.name)
        folder = cls(home / "sweeps" / f"{name}-{secrets.token_hex(4)}")
        draft = folder.path.with_name(f".{folder.id}")
        draft.mkdir(parents=True)
        (draft / "config.yaml").write_text(to_yaml(prepared.config))
        (draft / "manifest.json").write_text(json.dumps({"command": command, **fingerprints(prepared)}, indent=1))
        (draft / "lock").touch()
        (draft / "logs").mkdir()
        draft.rename(folder.path)
        return folder

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def is_ended(self) -> bool:
        return (self.path / "ended").is_file()

    def set_ended(self) -> None:
        (self.path / "ended").touch()

    def manifest(self) -> dict[str, Any]:
        return json.loads((self.path / "manifest.json").read_text())

    def set_run_id(self, run_id: str) -> None:
        """Remember the MLflow run, so that the sweep is found by it."""
        draft = self.path / "manifest.json.new"
        draft.write_text(json.dumps({**self.manifest(), "run_id": run_id}, indent=1))
        draft.rename(self.path / "manifest.json")

    def config(self) -> SweepConfig:
        return load_config(SweepConfig, self.path / "config.yaml")

    def check(self, prepared: Prepared) -> None:
        """Raises ValueError where what was measured has changed since."""
        stored = self.manifest()
        for what, now in fingerprints(prepared).items():
            changed = [name for name in stored[what] if stored[what][name] != now.get(name)]
            if changed:
                raise ValueError(
                    f"sweep {self.id} cannot go on: the {what} {', '.join(changed)} changed since it began, and what "
                    "was measured before would be mixed with something else; put back what was there, or start a new "
                    "sweep"
                )

    @property
    def is_running(self) -> bool:
        """Whether a driver on this machine (or of a file system that shares locks) holds it."""
        try:
            with self.locked():
                return False
        except ValueError:
            return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from running the sweep. Raises ValueError where one does."""
        with open(self.path / "lock", "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"sweep {self.id} is running (process {file.read() or 'unknown'})") from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def find_resumable(home: Path, wanted: str | None = None) -> SweepFolder:
    """The sweep with this id, MLflow run id or name, else the newest that has not ended and does not run.

    Raises ValueError, naming those that are there.
    """
    found = [f for f in sweep_folders(home) if not f.is_ended]
    if wanted is None:
        matching = [f for f in found if not f.is_running]
    else:
        matching = [f for f in sweep_folders(home) if wanted in (f.id, f.manifest().get("run_id"), f.config().name)]
    if matching and not matching[0].is_ended:
        return matching[0]
    known = ", ".join(f.id for f in found[:10]) or "none"
    what = "no sweep" if not matching else f"sweep {matching[0].id} has ended, so nothing"
    which = f" with id, run id or name {wanted!r}" if wanted and not matching else ""
    raise ValueError(
        f"{what} to resume{which} in {home / 'sweeps'}; sweeps there that did not end, newest first: {known}"
    )


def sweep_folders(home: Path) -> list[SweepFolder]:
    """Newest first."""
    files = [f for f in (home / "sweeps").glob("*/config.yaml") if not f.parent.name.startswith(".")]
    return [SweepFolder(f.parent) for f in sorted(files, key=lambda f: f.stat().st_mtime, reverse=True)]


def fingerprints(prepared: Prepared) -> dict[str, dict[str, str]]:
    """SHA-256 of the drafters' weights and of the prompts."""
    prompts = json.dumps([asdict(p) for p in prepared.prompts]).encode()
    return {
        "drafters": {d.label: drafter_sha256(d) for d in prepared.drafters},
        "prompts": {prepared.config.workload: hashlib.sha256(prompts).hexdigest()},
    }


def drafter_sha256(drafter: Drafter) -> str:
    """The fingerprint of a drafter's weights, `unknown` for one without."""
    file = Path(drafter.path) / WEIGHTS
    return weights_sha256(file) if file.is_file() else "unknown"
