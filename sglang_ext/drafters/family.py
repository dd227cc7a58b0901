"""The drafter families. Each is a folder of five files of the same names:

config.py    `Config`: the sizes and options of a body, and their form in config.json (base.py)
module.py    `Drafter`: the plain torch module (base.py)
training.py  functions: how it begins, and what its head reads along an answer (training.py)
cost.py      `count`: the FLOPs of a verify step, and the bytes that it reads (counting.py)
serving.py   `SERVING`: the speculative algorithms of SGLang that serve it (serving.py)

A further family is such a package in any installed distribution, named under the entry point group `rayspec.drafters`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from sglang_ext.drafters.base import Drafter, DrafterConfig, DrafterOptions
from sglang_ext.drafters.counting import CostOf
from sglang_ext.drafters.serving import Serving
from sglang_ext.drafters.training import Steps, Target, Training
from sglang_ext.settings import build, kind_and_options

BUILT_IN = ("eagle3", "eagle", "medusa", "hydra", "specformer", "independent")
DEFAULT = "eagle3"  # where no kind is named; a stock checkpoint's
ENTRY_POINTS = "rayspec.drafters"


@dataclass(frozen=True)
class Family:
    """The parts of a family, each imported when it is first asked for."""

    kind: str
    package: str

    def _module(self, name: str) -> ModuleType:
        return import_module(f"{self.package}.{name}")

    @property
    def config_class(self) -> type[DrafterConfig]:
        return self._module("config").Config

    @property
    def drafter_class(self) -> type[Drafter]:
        return self._module("module").Drafter

    @property
    def training(self) -> Training:
        return self._module("training")  # type: ignore[return-value]

    @property
    def count(self) -> CostOf:
        return self._module("cost").count

    @property
    def serving(self) -> Serving:
        return self._module("serving").SERVING


@cache
def families() -> Mapping[str, Family]:
    """All families by kind. Raises ValueError where two packages claim one."""
    found = {kind: Family(kind, f"sglang_ext.drafters.{kind}") for kind in BUILT_IN}
    for point in entry_points(group=ENTRY_POINTS):
        if point.name in found and found[point.name].package != point.value:
            raise ValueError(
                f"the drafter family {point.name!r} is both {found[point.name].package} and {point.value}; uninstall "
                "one of the two packages"
            )
        found[point.name] = Family(point.name, point.value)
    return found


def family(kind: str) -> Family:
    """Raises ValueError for an unknown kind."""
    if kind not in families():
        raise ValueError(f"unknown drafter kind {kind!r}; known: {', '.join(families())}")
    return families()[kind]


def parse_drafter(entry: Any) -> DrafterOptions:
    """The checked options of a `drafter` entry {kind, options}. Raises ValueError for an unknown kind or option, and
    for one of the wrong type or value."""
    kind, options = kind_and_options(entry, families(), "drafter")
    return build(families()[kind].config_class.Options, options, "drafter")


def body_for(target: Target, options: DrafterOptions, recipe: Steps) -> DrafterConfig:
    """The body of a new drafter. Raises ValueError for a target that the family cannot draft for."""
    return family(options.kind).training.config_for(target, options, recipe)
