"""Promises about the repository itself."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_kernels_folder_does_not_shadow_the_installed_package() -> None:
    """transformers and SGLang import an installed package named `kernels` (from the repository root, too)."""
    code = "import kernels, rayspec_kernels; print(kernels.__file__); print(rayspec_kernels.__file__)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installed, ours = (Path(line) for line in out.splitlines())
    assert ROOT / "kernels" not in installed.parents
    assert ours.is_relative_to(ROOT / "kernels")
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(("asked", "seen"), [("", "''"), ("full", "''"), ("gpu", "'0'")])
def test_tests_leave_a_card_alone_unless_they_are_of_it(asked: str, seen: str) -> None:
    code = "import os, conftest; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    settings = os.environ | {"RAYSPEC_TESTS": asked, "CUDA_VISIBLE_DEVICES": "0"}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=ROOT / "tests", env=settings, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == seen


def test_both_tritons_that_are_named_are_tried() -> None:
    """The pinned one by every test; the other one by a target of its own, in a folder that git ignores."""
    pinned = re.search(r"^triton==(\d+\.\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    said = re.search(r"\(Triton (\S+), which is pinned; Triton (\S+) by `make (\S+)`\)", read("docs/architecture.md"))
    assert said is not None and said[1] == pinned[1]  # noqa: PT018
    command = ["make", "--dry-run", said[3]]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    install = next(line for line in steps if f"triton=={said[2]}.*" in line)
    folder = re.search(r"--target (\S+)", install)
    assert folder is not None
    assert subprocess.run(["git", "check-ignore", "--quiet", folder[1]], cwd=ROOT, check=False).returncode == 0
    for what in (
        "pytest tests/kernels",
        "tests/kernels/compile_for_hopper.py",
        "docs/experiments/loop_instructions.py",
    ):
        (line,) = (line for line in steps if what in line)
        assert line.startswith(f"PYTHONPATH={folder[1]}:"), "before the environment's own"


def read(name: str) -> str:
    return (ROOT / name).read_text().replace("\n", " ")


def test_what_is_said_to_hold_a_property_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", read("docs/properties.md"))
    assert len(named) > 30
    assert [(file, test) for file, test in named if f"def {test}(" not in read(file)] == []


def test_imports_run_one_way() -> None:
    """jobs -> rayspec -> sglang_ext -> rayspec_kernels; only the adapter knows SGLang."""
    forbidden = {
        "kernels/rayspec_kernels": ("sglang", "ray", "rayspec", "mlflow", "sglang_ext"),
        "sglang_ext": ("ray", "rayspec", "mlflow"),
        "sglang_ext/heads": ("sglang",),
        "sglang_ext/drafters": ("sglang",),
        "sglang_ext/trees": ("sglang",),
        "rayspec": ("jobs",),
    }
    wrong = []
    for folder, names in forbidden.items():
        for file in (ROOT / folder).rglob("*.py"):
            for line in file.read_text().splitlines():
                words = line.split()
                if words[:1] in (["import"], ["from"]) and words[1].split(".")[0] in names:
                    wrong.append(f"{file.relative_to(ROOT)}: {line.strip()}")
    assert wrong == []


def dispatches(source: str) -> Iterator[str]:
    """Where it asks of which family a drafter is, or of which kind something is by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            kinds = [s for s in sides if isinstance(s, ast.Attribute) and s.attr in ("kind",)]
            if kinds and any(is_name(n) for s in sides for n in ast.walk(s)):
                yield ast.unparse(node)
        match node:
            case ast.Match(subject=ast.Attribute(attr="kind")):
                yield ast.unparse(node.subject)
            case ast.Call(func=ast.Name(id="isinstance"), args=[_, what]) if re.search(r"Drafter\b", ast.unparse(what)):
                yield ast.unparse(node)


def is_name(node: ast.AST) -> bool:
    """Whether it is text, or a constant that stands for it."""
    called = getattr(node, "id", None) or getattr(node, "attr", "")
    return called.isupper() or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_nothing_outside_of_a_family_asks_which_it_is() -> None:
    found = {
        str(file.relative_to(ROOT)): list(dispatches(file.read_text()))
        for folder in ("rayspec", "sglang_ext")
        for file in (ROOT / folder).rglob("*.py")
    }
    assert len(found) > 200
    # the worker of one family, whose drafter's type it narrows
    allowed = {"sglang_ext/adapter/workers/last_hidden.py": ["isinstance(drafter, LastHiddenDrafter)"]}
    assert {name: what for name, what in found.items() if what} == allowed


@pytest.mark.parametrize(
    "source",
    [
        "if a.kind == 'eagle3': pass",
        "b = x.family.kind in ('medusa', 'hydra')",
        "isinstance(d, (A, drafters.Eagle3Drafter))",
        "if own.kind != DEFAULT: pass",
        "match info.kind:\n    case 'eagle3': pass",
    ],
)
def test_a_dispatch_is_seen(source: str) -> None:
    assert len(list(dispatches(source))) == 1


def test_paths_that_pages_name_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    path = re.compile(r"`((?:configs|docs|jobs|kernels|rayspec|sglang_ext|tests)/[\w./-]*)`")
    named = {(page.name, found) for page in pages for found in path.findall(page.read_text())}
    assert len(named) > 50
    assert sorted((page, found) for page, found in named if not (ROOT / found).exists()) == []


def test_pins_are_exact_and_without_addresses() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) > 100
    assert [line for line in lines if "==" not in line or "/" in line.split(";")[0]] == []
