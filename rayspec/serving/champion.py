"""Where a champion comes from, and whether it may take traffic."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow.artifacts
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from requests import RequestException
from safetensors import SafetensorError, safe_open

from rayspec.champion_fields import SHAPE
from rayspec.home import home
from rayspec.serving.canary import promised_tau
from rayspec.serving.record import RECORD, ServingRecord, files_sha256, read_record
from rayspec.shipped import target_path
from rayspec.sweep.record.folder import target_files_sha256
from rayspec.target import cached_snapshot
from rayspec.tracking import ArtifactsAway, TrackingError, redacted, said
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.fingerprints import combined_sha256, file_sha256
from sglang_ext.folder_kinds import POLICY
from sglang_ext.folders import check_name
from sglang_ext.policy.table import PolicyTable, read_table
from sglang_ext.whole import whole_folder

ARTIFACT = "drafter"  # folder of a promoted trial's artifacts: by itself of earlier releases, drafter-<of PINNED> since
PINNED = "serving.sha256"  # tag of a version: the fingerprint of its record, which holds those of all files
MODEL = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")
RUN = re.compile(r"(?:runs:/)?(?P<run>[0-9a-f]{32})")


@dataclass(frozen=True, kw_only=True)
class Champion:
    """A drafter that was checked, and the target that it was measured on."""

    name: str
    folder: Path
    target: str  # folder; of a Hugging Face name the one in the cache, since SGLang would ask the hub for newer files
    served_name: str  # of the model, in requests
    record: ServingRecord
    policy: PolicyTable | None = None  # draft length by load, where it was measured


def is_folder(source: str) -> bool:
    """Whether it lies here, so that MLflow is not asked for it."""
    return bool(source) and Path(source).is_dir()


def find_champion(
    source: str, client: MlflowClient | None, *, target: str | None = None, force: bool = False
) -> Champion:
    """The champion that `source` names: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, the id of the run that was
    promoted, or a folder that was downloaded from one of them. Files come into the home folder, once, and are checked
    before anything is loaded.

    Args:
        client: not needed for a folder.
        target: where the target lies here; None for where the sweep found it.
        force: take one that was not clearly faster than plain decoding.

    Raises ValueError where it may not take traffic, each cause with words of its own; TrackingError where MLflow does
    not have it.
    """
    if is_folder(source):
        name, folder = source, Path(source)
    else:
        assert client is not None, "only a folder is found without MLflow"
        name, folder = _downloaded(source, client)
    record = read_record(folder)
    found = files_sha256(folder)
    changes = [
        f"{n} {_change(folder / n, record.files.get(n))}"
        for n in sorted({*record.files, *found})
        if record.files.get(n) != found.get(n)
    ]
    if changes:
        raise ValueError(
            f"{name} is not what was promoted: {', '.join(changes)}; download it again, or promote a champion again"
        )
    missing = [flag for flag in SHAPE if flag not in record.flags]
    if missing:
        raise ValueError(
            f"{name}: its record does not say {', '.join(missing)}, so how it drafted is unknown; promote a champion "
            "again"
        )
    served = target_path(record.target if target is None else target)
    place = _on_this_machine(served)
    if combined_sha256(target_files_sha256(served)) != record.target_sha256:
        raise ValueError(
            f"{name} was measured on target {record.target}, and the files of {served} are others; name the right one "
            "with --target, or sweep on this one"
        )
    if record.evidence.get("clearly_faster_than_plain") != "yes" and not force:
        raise ValueError(
            f"{name} was not clearly faster than plain decoding when it was measured (speed-up "
            f"{record.evidence.get('speedup_vs_plain', 'unknown')}); serve the target without it, or take it all the "
            "same with --force"
        )
    if promised_tau(record.evidence) is None and not force:
        raise ValueError(
            f"{name} carries no evidence of what it accepts (its record holds no tau of at least 1), so its drafts "
            "cannot be held against any; promote a champion again, or take it all the same with --force"
        )
    if record.nodes > 1:
        raise ValueError(
            f"{name} was measured with engines over {record.nodes} nodes each, and this starts one server on one "
            "machine; start SGLang's on every node with the line that the version's description names"
        )
    load_drafter(folder)  # raises ValueError for numbers that are not finite and for tensors that do not fit
    policy = read_table(folder / POLICY) if (folder / POLICY).is_file() else None
    return Champion(name=name, folder=folder.resolve(), target=place, served_name=served, record=record, policy=policy)


def _on_this_machine(target: str) -> str:
    """The folder of a target's files. Raises ValueError for a Hugging Face name whose files are not here."""
    if Path(target).is_dir():
        return target
    folder = cached_snapshot(target)
    if folder is None or not (folder / "config.json").is_file():
        raise ValueError(
            f"the target {target} is not in this machine's Hugging Face cache; bring the revision there that was "
            f"measured (hf download {target})"
        )
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"the target {target} lies in {folder} without its weights as *.safetensors; bring them there (hf download "
            f"{target}), or name a folder that has them with --target"
        )
    return str(folder)


def _change(file: Path, promoted: str | None) -> str:
    """What became of one of a champion's files."""
    if promoted is None:
        return "was added"
    if not file.exists():
        return "is gone"
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt"):
                pass
        except SafetensorError:
            return "was cut short or damaged"
    return "was changed"


def _downloaded(source: str, client: MlflowClient) -> tuple[str, Path]:
    """(its name with the version, where it lies in the home folder)."""
    model, run = MODEL.fullmatch(source), RUN.fullmatch(source)
    if model is None and run is None:
        raise ValueError(
            f"{redacted(source)!r} is neither a folder nor models:/NAME@ALIAS, models:/NAME/VERSION or the id of a run"
        )
    try:
        if run is not None:
            version = version_of(run["run"], client)
            if version is None:
                return f"run {run['run']}", _fetch(client, _unregistered(run["run"], client), run["run"], None)
        else:
            assert model is not None, "one of both"
            version = (
                client.get_model_version_by_alias(model["name"], model["alias"])
                if model["alias"]
                else client.get_model_version(model["name"], model["version"])
            )
        pinned = version.tags.get(PINNED)
        if pinned is None or not re.fullmatch("[0-9a-f]{64}", pinned):
            wrong = "is missing" if pinned is None else "is no SHA-256"
            raise ValueError(
                f"{source} (version {version.version}) carries no evidence of what it was measured to be (its tag "
                f"{PINNED} {wrong}); rayspec report --promote registers a champion with it"
            )
        address = client.get_model_version_download_uri(version.name, version.version)
        folder = _fetch(client, address, f"{version.name}-{version.version}-{pinned[:12]}", pinned)
        return f"{version.name} version {version.version}", folder
    except MlflowException as error:
        raise TrackingError(
            f"MLflow at {redacted(client.tracking_uri)} has no {source}: {said(error, client.tracking_uri)}"
        ) from error


def version_of(run: str, client: MlflowClient) -> ModelVersion | None:
    """The newest that was promoted from a run; None where it is registered no longer."""
    found = [v for v in client.search_model_versions(f"run_id = '{run}'") if PINNED in v.tags]
    return max(found, key=lambda v: (v.creation_timestamp, int(v.version)), default=None)


def _unregistered(run: str, client: MlflowClient) -> str:
    """Where the drafter of a run lies that an earlier release has promoted and that is registered no longer."""
    if not client.list_artifacts(run, ARTIFACT):
        raise ValueError(
            f"no version is registered that was promoted from run {run}; rayspec report --promote registers one"
        )
    return f"runs:/{run}/{ARTIFACT}"


def fetched(name: str, pinned: str) -> Path | None:
    """Where in the home folder a champion lies whole as pinned; None where it has to be fetched."""
    folder = _place(name)
    return folder if _is_whole(folder, pinned) else None


def _is_whole(folder: Path, pinned: str) -> bool:
    """Whether a version lies there as it was promoted; our own copy is fetched again where it does not."""
    try:
        return file_sha256(folder / RECORD) == pinned and files_sha256(folder) == read_record(folder).files
    except (ValueError, OSError):
        return False


def _artifacts(address: str, place: str, client: MlflowClient) -> str:
    """Where the artifacts lie now. Raises ValueError for a source that is no folder that MLflow can fetch here,
    ArtifactsAway where the store fails."""
    try:
        got = mlflow.artifacts.download_artifacts(address, dst_path=place, tracking_uri=client.tracking_uri)
    except (ImportError, TypeError, ValueError) as error:  # what its stores raise for addresses that they cannot read
        raise ValueError(
            f"the files of the version at {redacted(address)} cannot be fetched ({error}); promote a champion again, "
            "or install what MLflow needs for that store"
        ) from error
    except Exception as error:
        if isinstance(error, (MlflowException, OSError)) and not isinstance(error, RequestException):
            raise
        raise ArtifactsAway(  # the message of a store may hold a password, and so is not shown
            f"the files of the version at {redacted(address)} cannot be fetched now ({type(error).__name__} of the "
            "store); see whether it answers, and whether this process has the keys that it wants"
        ) from error
    if not Path(got).is_dir():
        raise ValueError(f"{redacted(address)} is no folder of a drafter; promote a champion again")
    return got


def _place(name: str) -> Path:
    """Where in the home folder what is fetched comes to lie. Raises ValueError for what is no folder there."""
    check_name(name, "the name of what is fetched")
    folder = home() / "champions" / name
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(
            f"{folder} is a link or a file, and a champion that was fetched is a folder there: remove it, and it is "
            "fetched again"
        )
    return folder


def _fetch(client: MlflowClient, address: str, name: str, pinned: str | None) -> Path:
    """Into the home folder, whole or not at all. What is pinned and there is not fetched again; anything else in its
    place is a copy that we have made, and is replaced."""
    folder = _place(name)
    if pinned is not None and _is_whole(folder, pinned):
        return folder
    with TemporaryDirectory() as place, whole_folder(folder) as draft:
        shutil.copytree(_artifacts(address, place, client), draft, dirs_exist_ok=True)
        if pinned is not None and (draft / RECORD).is_file() and file_sha256(draft / RECORD) != pinned:
            raise ValueError(
                f"the record of {name} is not the one that was promoted ({RECORD} at {redacted(address)} has another "
                f"fingerprint than MLflow's tag {PINNED}); promote a champion again"
            )
    return folder
