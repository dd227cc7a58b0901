"""Nothing imports itself by way of others: neither a module nor a package, and not under a function either."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"rayspec": ROOT, "sglang_ext": ROOT, "rayspec_kernels": ROOT / "kernels"}

Graph = Mapping[str, set[str]]


@cache
def sources() -> dict[str, str]:
    """Source by the module's dotted name."""
    found = {}
    for package, root in PACKAGES.items():
        for file in sorted((root / package).rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text()
    return found


def imports(modules: Mapping[str, str]) -> Graph:
    """Which of the modules each imports, anywhere in its source, for its types too."""
    return {name: set(_imported(ast.parse(text), modules)) - {name} for name, text in modules.items()}


def _imported(tree: ast.Module, modules: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules else str(node.module) for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def package(name: str, depth: int = 2) -> str:
    """`rayspec.sweep` of `rayspec.sweep.plan.trials`; a module beside the packages stands for itself."""
    return ".".join(name.split(".")[:depth])


def of_packages(graph: Graph, depth: int = 2) -> Graph:
    merged: dict[str, set[str]] = {}
    for name, others in graph.items():
        merged.setdefault(package(name, depth), set()).update(package(other, depth) for other in others)
    return {name: others - {name} for name, others in merged.items()}


def circle(graph: Graph) -> Iterable[str]:
    """One of them, from a module to itself; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_circle_of_modules() -> None:
    graph = imports(sources())
    assert len(graph) > 200, "the sources were not found"
    assert "rayspec.sweep.candidate" in graph["rayspec.sweep.plan.trials"]
    assert circle(graph) == []


def test_no_circle_of_packages() -> None:
    graph = of_packages(imports(sources()))
    assert "rayspec.sweep" in graph["rayspec.report"]
    assert circle(graph) == []


def test_no_circle_of_their_parts() -> None:
    graph = of_packages(imports(sources()), depth=3)
    assert "rayspec.sweep.plan" in graph["rayspec.sweep.measure"]
    assert circle(graph) == []


def test_transformers_waits_until_it_is_used() -> None:
    """Its import takes seconds, which commands and workers that load no model would spend, too."""
    ours = {name: text for name, text in sources().items() if package(name, 1) == "rayspec"}
    at_the_top = {name for name, text in ours.items() if "transformers" in _top_level(ast.parse(text))}
    assert at_the_top == {"rayspec.targets.gguf"}, "which is imported where a model is converted"


def _top_level(tree: ast.Module) -> set[str]:
    """Packages that are imported with the module."""
    names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("line", ["import p.a.x", "from p.a import x", "from p.a.x import f"])
@pytest.mark.parametrize("where", ["{}", "def g():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_a_circle_is_seen(line: str, where: str) -> None:
    graph = imports({"p.a": "", "p.a.x": "import p.b.y", "p.b.y": where.format(line), "p.c": "import p.b.y"})
    assert circle(graph) == ["p.a.x", "p.b.y", "p.a.x"] or circle(graph) == ["p.b.y", "p.a.x", "p.b.y"]
    assert len(list(circle(of_packages(graph)))) == 3
