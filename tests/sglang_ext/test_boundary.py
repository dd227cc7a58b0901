"""Where the project touches SGLang, read from the sources: in one package, under names that are listed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.adapter import internals
from sglang_ext.adapter.internals import IMPORTED, Internal

ROOT = Path(__file__).parents[2]
ADAPTER = "sglang_ext/adapter/"
# what these functions change, `patches.py` changes alone
REGISTRATIONS = ("setattr", "delattr", "HookRegistry.register", "BaseFusedOp.register_oot_forward")
CHANGING = ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update")  # of what it has


def sources() -> list[str]:
    """Every Python file of the repository, but the tests."""
    folders = [f for f in ROOT.iterdir() if f.is_dir() and f.name != "tests" and not f.name.startswith(".")]
    return sorted(str(file.relative_to(ROOT)) for folder in folders for file in folder.rglob("*.py"))


def trees(names: list[str]) -> Iterator[tuple[str, ast.Module]]:
    for name in names:
        yield name, ast.parse((ROOT / name).read_text())


def imported(tree: ast.Module) -> dict[str, str]:
    """What a source calls each thing that it imports from SGLang, wherever in the file it does."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.asname or a.name: a.name for a in node.names if a.name.split(".")[0] == "sglang"}
    return found


def changes(tree: ast.Module) -> Iterator[str]:
    """Assignments to attributes of what was imported from SGLang, their deletion, changes of the lists and mappings
    that they are, and registrations with it."""
    names = imported(tree)
    for node in ast.walk(tree):
        targets = [node.target] if is_single(node) else []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            owner = ast.unparse(node.func.value)
            if "." in owner and owner.split(".")[0] in names:
                yield ast.unparse(node)
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and ast.unparse(part).split(".")[0] in names:
                    yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in REGISTRATIONS:
            about = ast.unparse(node.args[0]).split(".")[0] if node.args else ""
            if ast.unparse(node.func).split(".")[0] in names or about in names:
                yield ast.unparse(node)


def is_single(node: ast.AST) -> bool:
    return isinstance(node, ast.AugAssign | ast.AnnAssign)


def listed() -> list[str]:
    """Every name of `internals.py`."""
    values = [v for name, v in vars(internals).items() if name.isupper() and name != "IMPORTED"]
    entries = [i for value in values for i in ([value] if isinstance(value, Internal) else value)]
    return [*IMPORTED, *(i.target for i in entries if isinstance(i, Internal))]


def test_only_the_adapter_imports_sglang() -> None:
    importing = [name for name, tree in trees(sources()) if imported(tree)]
    assert [name for name in importing if not name.startswith(ADAPTER)] == []
    assert len(importing) > 15, "the sources were not found"


def test_every_import_from_sglang_is_listed() -> None:
    """By itself, or by a method that is relied on."""
    known = listed()
    unlisted = [
        f"{name}: {what}"
        for name, tree in trees([n for n in sources() if n.startswith(ADAPTER)])
        for what in imported(tree).values()
        if not any(k == what or k.startswith(f"{what}.") for k in known)
    ]
    assert unlisted == [], "add them to sglang_ext/adapter/internals.py"


def test_every_name_of_sglang_in_a_text_is_listed() -> None:
    """By which a patch finds what it replaces."""
    entry_points = {"sglang.srt.plugins", "sglang.srt.platforms"}  # groups of them, by which SGLang finds us
    found = {
        (name, node.value)
        for name, tree in trees([n for n in sources() if n != f"{ADAPTER}internals.py" and "docs/" not in n])
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"sglang(\.\w+)+", node.value)
    }
    known = {*listed(), *entry_points, "sglang.launch_server"}  # a command
    assert {(name, text) for name, text in found if text not in known} == set(), f"{ADAPTER}internals.py has them"


def test_what_is_listed_as_imported_is() -> None:
    adapter = trees([n for n in sources() if n.startswith(ADAPTER)])
    assert set(IMPORTED) - {what for _, tree in adapter for what in imported(tree).values()} == set(), "take them out"


def test_sglang_is_changed_in_one_place() -> None:
    changed = {name: list(changes(tree)) for name, tree in trees(sources())}
    assert {name: found for name, found in changed.items() if found and not name.endswith("adapter/patches.py")} == {}
    # the hooks of the registry, those that it forgets, and the forwards of fused operations
    assert len(changed[f"{ADAPTER}patches.py"]) == 3


@pytest.mark.parametrize(
    "source",
    [
        "from sglang.srt.managers.scheduler import Scheduler\nScheduler.ours = print",
        "def f():\n    from sglang.srt.speculative import eagle_utils\n    a, eagle_utils.b = 1, 2",
        "import sglang\nsetattr(sglang, 'x', 1)",
        "from sglang.srt.plugins.hook_registry import HookRegistry\nHookRegistry.register('a', print, 'AROUND')",
        "from sglang.srt.plugins.hook_registry import HookRegistry\ndel HookRegistry._hooks['a']",
        "from sglang.srt.plugins.hook_registry import HookRegistry\nHookRegistry._hooks.clear()",
    ],
    ids=["class", "module_under_a_function", "setattr", "hook", "deletion", "clearing"],
)
def test_a_change_is_seen(source: str) -> None:
    assert len(list(changes(ast.parse(source)))) == 1
