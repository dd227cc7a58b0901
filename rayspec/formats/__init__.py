"""Formats of drafters and token lists that other projects publish (`rayspec convert`).

    source.py    what is read: a folder's config.json and tensors, or a list of tokens
    result.py    what comes of it: a drafter of ours or a list of tokens, and how each is written
    eagle3.py    what the formats of EAGLE-3 have in common: one Llama layer over tapped states
    <format>.py  one each, with the same functions:

        recognise(source)                  whether a source is of this format; looks at config.json and names alone
        read(source, target)               the drafter or the tokens; ValueError for what we cannot hold
        write(result, target, provenance)  (config.json, tensors), of the formats in `WRITES`

A format is a module here and a line in `FORMATS`, in the order in which they are tried.
"""

from importlib import import_module
from types import ModuleType

from rayspec.formats.source import Source

FORMATS = {
    "rayspec": "a drafter of ours",
    "speculators": "EAGLE-3 of vLLM's speculators",
    "modelopt": "EAGLE-3 as NVIDIA ModelOpt exports it",
    "specforge": "EAGLE-3 of SpecForge, which is SGLang's own form",
    "safeailab": "EAGLE-3 as SafeAILab publishes it",
    "eagle": "EAGLE-1 and 2 as SafeAILab publishes them",
    "medusa": "Medusa's heads",
    "hydra": "Hydra's heads",
    "frspec": "FR-Spec's token lists",
}
WRITES = {"rayspec": "rayspec", "sglang": "specforge", "speculators": "speculators"}  # --to: the format


def format_module(name: str) -> ModuleType:
    """Raises ValueError for an unknown name."""
    if name not in FORMATS:
        raise ValueError(f"unknown --format {name!r}; known: auto, {', '.join(FORMATS)}")
    return import_module(f"rayspec.formats.{name}")


def recognised(source: Source) -> str:
    """The name of a source's format. Raises ValueError for one that none recognises."""
    found = next((name for name in FORMATS if format_module(name).recognise(source)), None)
    if found is None:
        raise ValueError(
            f"{source.path} is of no format that we know (its architectures are "
            f"{source.config.get('architectures')}); name one: --format {'|'.join(FORMATS)}"
        )
    return found
