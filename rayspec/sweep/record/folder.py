"""A sweep on disk, `$RAYSPEC_HOME/sweeps/<id>/`: all that is needed to go on after anything.

`config.yaml` as resolved, `manifest.json` (command, fingerprints of what is measured, the MLflow run), `journal.jsonl`,
`logs/` of the engines, `ended` once nothing is left to do. Its driver holds a lock on `lock`, which the kernel takes
away with the process, however it ends.
"""

import contextlib
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rayspec.config import load_config, to_yaml
from rayspec.identity import differences
from rayspec.lock import held
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.prepare import Prepared
from rayspec.sweep.record.measured import read_state
from rayspec.target import cached_snapshot
from sglang_ext.drafters.checkpoint_config import read_config, read_info
from sglang_ext.fingerprints import combined_sha256, file_sha256, weights_sha256
from sglang_ext.folder_kinds import WEIGHTS
from sglang_ext.whole import draft_folder, write_whole

logger = logging.getLogger(__name__)
TARGET_FILES = (".json", ".safetensors", ".bin", ".model", ".jinja", ".py")
HASHED_AT_ONCE = 8


class SweepRuns(ValueError):
    """Another process has the sweep; the message says which."""


class SweepFolder:
    """The folder of one sweep; `path.name` is the sweep's id."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, home: Path, prepared: Prepared, command: str) -> "SweepFolder":
        """A new one, complete before it is there."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", prepared.config.name)
        folder = cls(home / "sweeps" / f"{name}-{secrets.token_hex(4)}")
        with draft_folder(folder.path) as draft:
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
        """Raises ValueError where it is missing or damaged."""
        file = self.path / "manifest.json"
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"sweep {self.id} cannot go on: {file} cannot be read ({error})") from error
        if not isinstance(found, dict):
            raise ValueError(f"sweep {self.id} cannot go on: {file} must hold a JSON object")
        return found

    def set_run_id(self, run_id: str) -> None:
        """Remember the MLflow run, so that the sweep is found by it."""
        write_whole(self.path / "manifest.json", json.dumps({**self.manifest(), "run_id": run_id}, indent=1))

    def drafter_tags(self) -> dict[str, dict[str, str]]:
        """The fingerprints of the drafters that are measured, by label, as tags of their runs."""
        stored = self.manifest()
        return {
            label: {DRAFTER_SHA256: own} | ({WHOLE_SHA256: stored[WHOLE][label]} if WHOLE in stored else {})
            for label, own in stored["drafters"].items()
        }

    def config(self) -> SweepConfig:
        """Raises ValueError where it is missing, damaged, or of a release with other settings."""
        try:
            return load_config(SweepConfig, self.path / "config.yaml")
        except ValueError as error:
            raise ValueError(f"sweep {self.id} cannot go on: {error}") from error

    def check(self, prepared: Prepared) -> None:
        """Raises ValueError where what was measured has changed since, or the journal is damaged."""
        read_state(prepared.plan, self.journal)
        stored = self.manifest()
        for what, now in fingerprints(prepared).items():
            if what not in stored:
                logger.warning("sweep %s began before the %s had a fingerprint, so it is not checked", self.id, what)
            was = stored.get(what, {})
            changed = [found.key for found in differences(was, now, keys=was)]
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
        except SweepRuns:
            return True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from running the sweep. Raises SweepRuns where one does."""

        def refusal(holder: str) -> SweepRuns:
            return SweepRuns(
                f"sweep {self.id} is running (process {holder}), so there is nothing to resume; wait for it, or end it "
                "first"
            )

        with held(self.path / "lock", refusal):
            yield


def find_resumable(home: Path, wanted: str | None = None) -> SweepFolder:
    """The sweep with this id, MLflow run id or name, else the newest that has not ended and does not run.

    Folders that cannot be read are left out, with a warning, unless the id names one. Raises ValueError, naming those
    that are there, and SweepRuns.
    """
    folders = sweep_folders(home)
    if wanted is None:
        matching = [f for f in folders if not f.is_ended and _names(f)]
    else:
        matching = [f for f in folders if f.id == wanted] or [f for f in folders if wanted in _names(f)]
    free = [f for f in matching if not f.is_ended and not f.is_running]
    if free:
        return free[0]
    unfinished = [f for f in matching if not f.is_ended]
    if unfinished:
        with unfinished[0].locked():  # says who runs it
            return unfinished[0]
    known = ", ".join(f.id for f in folders if not f.is_ended) or "none"
    what = "no sweep" if not matching else f"sweep {matching[0].id} has ended, so nothing"
    which = f" with id, run id or name {wanted!r}" if wanted and not matching else ""
    raise ValueError(
        f"{what} to resume{which} in {home / 'sweeps'}; sweeps there that did not end, newest first: {known}"
    )


def find_same(home: Path, config: SweepConfig) -> SweepFolder | None:
    """The newest sweep of this very config, ended or not. Folders that cannot be read are left out, with a warning."""
    for folder in sweep_folders(home):
        try:
            if folder.config() == config:
                return folder
        except ValueError as error:
            logger.warning("sweep folder left out because it cannot be read: %s", error)
    return None


def _names(folder: SweepFolder) -> set[str]:
    """What a sweep may be called besides its id; nothing, with a warning, where its folder cannot be read."""
    try:
        return {folder.config().name, folder.manifest().get("run_id", folder.id)}
    except ValueError as error:
        logger.warning("sweep folder left out because it cannot be read: %s", error)
        return set()


def sweep_folders(home: Path) -> list[SweepFolder]:
    """Newest first."""
    found = [f for f in (home / "sweeps").glob("*/") if not f.name.startswith(".")]
    return [SweepFolder(f) for f in sorted(found, key=_begun, reverse=True)]


def _begun(folder: Path) -> float:
    config = folder / "config.yaml"  # never written again
    return (config if config.is_file() else folder).stat().st_mtime


TARGET_SHA256 = "target.sha256"  # tag of a sweep's runs
DRAFTER_SHA256, WHOLE_SHA256 = "drafter.sha256", "drafter.whole_sha256"  # tags of those of one drafter
WHOLE = "drafter folders"  # in the manifest; sweeps of before it was noted have only "drafters", the own weights


def fingerprints(prepared: Prepared) -> dict[str, dict[str, str]]:
    """SHA-256 of the target's files, of the drafters (their own weights, and all that they are) and of the prompts."""
    prompts = json.dumps([asdict(p) for p in prepared.prompts]).encode()
    return {
        "target": target_files_sha256(prepared.target),
        "drafters": {c.label: drafter_sha256(c) for c in prepared.plan.candidates},
        WHOLE: {c.label: whole_drafter_sha256(c) for c in prepared.plan.candidates},
        "prompts": {prepared.config.workload: hashlib.sha256(prompts).hexdigest()},
    }


def target_files_sha256(target: str) -> dict[str, str]:
    """The fingerprint of each file that says what the target answers. Of a Hugging Face name the commit that lies in
    this machine's cache; nothing is known before the first download."""
    if not Path(target).is_dir():
        snapshot = cached_snapshot(target)
        return {} if snapshot is None else {target: snapshot.name}
    files = sorted(f for f in Path(target).iterdir() if f.suffix in TARGET_FILES)
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:  # a large target is many files, and hashing lets others run
        return dict(zip([f.name for f in files], pool.map(weights_sha256, files), strict=True))


def drafter_sha256(candidate: Candidate) -> str:
    """The fingerprint of a drafter's own weights, `unknown` for one without."""
    file = Path(candidate.path) / WEIGHTS
    return weights_sha256(file) if file.is_file() else "unknown"


def whole_drafter_sha256(candidate: Candidate) -> str:
    """One fingerprint of all that decides what a drafter drafts: its config.json but for where it comes from, its own
    weights, and those of the drafters that it shares tensors with. `unknown` for one that cannot be read."""
    folder = Path(candidate.path)
    try:
        config, info = read_config(folder), read_info(folder)
    except ValueError:
        return "unknown"
    # a drafter that is made again has another commit there, and is the same
    config["rayspec"] = {k: v for k, v in (config.get("rayspec") or {}).items() if k not in info.provenance}
    said = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    weights = [WEIGHTS, *(f"{shares.drafter}/{WEIGHTS}" for shares in info.shares)]
    found = {name: file_sha256(folder / name) for name in weights if (folder / name).is_file()}
    return combined_sha256({"config.json": said, **found})
