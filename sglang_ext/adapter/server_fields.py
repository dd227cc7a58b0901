"""The fields of SGLang's `ServerArgs`, read from the installed source: importing it takes ten seconds and more, and a
plan should not wait for that."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_ext.adapter.internals import FIELDS

SIMPLE = {"int": int, "float": float, "str": str, "bool": bool}


@dataclass(frozen=True)
class ServerField:
    """`kind` is None where the type is not one of SIMPLE; `choices` are empty where any value goes."""

    kind: type | None
    is_optional: bool = False
    choices: tuple[Any, ...] = ()

    def takes(self, value: object) -> bool:
        if value is None:
            return self.is_optional or self.kind is None
        if self.kind is not None and type(value) not in ((int, float) if self.kind is float else (self.kind,)):
            return False
        return not self.choices or value in self.choices

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        return "a valid value" if self.kind is None else f"of type {self.kind.__name__}"


def check_overrides(overrides: Mapping[str, Any], path: str) -> None:
    """Raise ValueError for a field that `ServerArgs` does not have, or a value that it cannot; `path` is the setting
    that they are of."""
    known = server_fields()
    for name, value in overrides.items():
        if name not in known:
            raise ValueError(
                f"{path}.{name} is no argument of SGLang; they are written as in its ServerArgs, with underscores: "
                f"{', '.join(_similar(name, known)) or 'mem_fraction_static'}, ..."
            )
        if not known[name].takes(value):
            raise ValueError(f"{path}.{name} must be {known[name]}, as in SGLang's ServerArgs, got {value!r}")


def _similar(name: str, known: Mapping[str, ServerField]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(name, known, n=3)


@lru_cache(maxsize=1)
def server_fields() -> dict[str, ServerField]:
    """All fields by name, in the order of the source."""
    package = find_spec("sglang")
    assert package is not None, "SGLang is a dependency"
    assert package.submodule_search_locations is not None, "it is a package"
    folder = Path(next(iter(package.submodule_search_locations)), *FIELDS)
    return {name: field for file in sorted(folder.glob("*.py")) for name, field in _fields_of(file)}


def _fields_of(file: Path) -> Iterator[tuple[str, ServerField]]:
    for namespace in ast.parse(file.read_text()).body:
        if isinstance(namespace, ast.ClassDef):
            for line in namespace.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id, _field_of(line.annotation)


def _field_of(annotation: ast.expr) -> ServerField:
    """The field that is annotated as `T`, `Optional[T]`, `A[T, help]` or `A[T, Arg(choices=[...])]`."""
    choices: tuple[Any, ...] = ()
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A":
        kind, *rest = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        for about in rest:
            for keyword in about.keywords if isinstance(about, ast.Call) else ():
                if keyword.arg == "choices" and isinstance(keyword.value, ast.List):
                    entries = keyword.value.elts
                    choices = tuple(e.value for e in entries if isinstance(e, ast.Constant))
                    choices = choices if len(choices) == len(entries) else ()
        annotation = kind
    text = ast.unparse(annotation)
    is_optional = text.startswith("Optional[")
    own_type = SIMPLE.get(text.removeprefix("Optional[").removesuffix("]") if is_optional else text)
    return ServerField(own_type, is_optional, choices)
