"""Drafters (plain torch) and their checkpoint format. A new drafter is one module, one line here and one test."""

from importlib import import_module
from typing import Any

DRAFTERS: dict[str, str] = {
    "eagle3": "sglang_ext.drafters.eagle3:Eagle3Drafter",
    "medusa": "sglang_ext.drafters.medusa:MedusaDrafter",
    "hydra": "sglang_ext.drafters.hydra:HydraDrafter",
    "specformer": "sglang_ext.drafters.specformer:SpecFormerDrafter",
    "independent": "sglang_ext.drafters.independent:IndependentDrafter",
}


def drafter_class(kind: str) -> Any:
    """The class of a drafter kind; its module is imported only now. Raises ValueError for an unknown kind."""
    if kind not in DRAFTERS:
        raise ValueError(f"unknown drafter kind {kind!r}; known: {', '.join(DRAFTERS)}")
    module, name = DRAFTERS[kind].split(":")
    return getattr(import_module(module), name)


def architecture_of(kind: str) -> str:
    """What `architectures` of a checkpoint names."""
    names = {"specformer": "SpecFormer"}
    return f"RaySpec{names.get(kind, kind.capitalize())}"
