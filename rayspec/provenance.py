"""What a run was made with: code, versions, machine. Recorded with every run, so that its numbers can be traced."""

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path

import psutil
import torch

import rayspec

PACKAGES = ("sglang", "torch", "ray", "mlflow", "transformers", "optuna")


def provenance() -> dict[str, str]:
    """Tags of this process and its machine; an unknown value is the word `unknown`, never left out."""
    commit, is_dirty = git_state()
    tags = {"git.commit": commit, "git.dirty": is_dirty}
    tags |= {f"version.{name}": version for name, version in releases().items()}
    return tags | machine()


def releases() -> dict[str, str]:
    """Of this package, of those that its results depend on, and of Python."""
    found = {"rayspec": rayspec.__version__} | {name: _version(name) for name in PACKAGES}
    return found | {"python": platform.python_version()}


def git_state() -> tuple[str, str]:
    """(commit, "true" | "false" | "unknown") of the checkout that holds this package.

    A copy without .git (Ray leaves it out of a job's working_dir) takes the commit from $RAYSPEC_COMMIT.
    """
    root = Path(__file__).resolve().parents[1]
    try:
        if not (root / ".git").exists():
            raise FileNotFoundError
        commit = _git(root, "rev-parse", "HEAD")
        return commit, str(bool(_git(root, "status", "--porcelain"))).lower()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return os.environ.get("RAYSPEC_COMMIT", "unknown"), "unknown"


def machine() -> dict[str, str]:
    """Host, CPU, memory and GPU of this machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "host.name": socket.gethostname(),
        "host.cpu": _cpu_name(),
        "host.cores": str(psutil.cpu_count(logical=True)),
        "host.memory_gib": f"{psutil.virtual_memory().total / 2**30:.0f}",
        "host.gpu": gpu,
        "host.load_1m": f"{psutil.getloadavg()[0]:.2f}",
    }


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    if file.is_file():
        for line in file.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(root), *args], check=True, capture_output=True, text=True).stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
