"""Questions with answers that no model wrote, which every installation has: what a function of a package does.

    python docs/experiments/documented_functions.py questions.jsonl

A record of `messages` for each function, method and class whose docstring begins with prose: the question names it, the
answer is that beginning. Each answer and each question once, in the order of the answer's hash.
"""

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from english_text import parsed

from sglang_ext.whole import write_whole

PACKAGES = ("mlflow", "numpy", "pandas", "ray", "scipy", "sklearn", "torch", "transformers")
SKIPPED = {"tests", "test", "testing", "idlelib", "site-packages", "_vendor"}
Defined = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
LEAST, MOST = 360, 1200  # characters of an answer: some 80 to 250 tokens
QUESTIONS = (
    "What does {name} of Python's module {module} do?",
    "Explain {name}, which is defined in the Python module {module}.",
    "I have found {name} in {module}. What is it for?",
    "Describe how {name} in the Python module {module} behaves.",
)


def documented(folder: Path, package: str) -> Iterator[tuple[str, str, str]]:
    """(module, name, docstring) of what is public in a package, "" for the standard library."""
    for path, tree in parsed(folder, SKIPPED):
        module = ".".join((package, *path.with_suffix("").parts)).removesuffix(".__init__").lstrip(".")
        for name, node in defined(tree):
            yield module, name, ast.get_docstring(node) or ""


def defined(scope: ast.AST, inside: str = "") -> Iterator[tuple[str, Defined]]:
    """Public functions and classes with their names, those of methods behind their classes'; none inside functions."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, Defined):
            yield from defined(node, inside) if isinstance(node, ast.If | ast.Try) else ()
        elif not node.name.startswith("_"):
            yield inside + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from defined(node, f"{inside}{node.name}.")


def beginning(docstring: str) -> str:
    """The paragraphs of prose that a docstring begins with: up to a list, an example, a table or a heading, and to the
    last sentence that ends within `MOST`."""
    kept: list[str] = []
    for paragraph in docstring.split("\n\n"):
        lines = paragraph.splitlines()
        is_prose = not any(line.startswith((" ", "-", "*", ">", "|", ".", ":", "=")) for line in lines)
        letters = sum(c.isalpha() or c == " " for c in paragraph)
        if not is_prose or not paragraph.isascii() or letters < 0.85 * len(paragraph):
            break
        kept.append(" ".join(lines))
    text = "\n\n".join(kept)
    return text if len(text) <= MOST else text[: text.rfind(". ", 0, MOST) + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    paths = sysconfig.get_paths()
    folders = {"": Path(paths["stdlib"])} | {name: Path(paths["purelib"]) / name for name in PACKAGES}
    records: dict[str, dict[str, object]] = {}
    asked: set[str] = set()
    for package, folder in folders.items():
        for module, name, docstring in documented(folder, package):
            answer = beginning(docstring)
            if len(answer) < LEAST or answer in records or f"{module}.{name}" in asked:
                continue
            asked.add(f"{module}.{name}")
            question = QUESTIONS[len(records) % len(QUESTIONS)].format(name=name, module=module)
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            records[answer] = {"messages": turns}
    ordered = sorted(records, key=lambda answer: sha256(answer.encode()).digest())
    write_whole(out, "".join(json.dumps(records[answer]) + "\n" for answer in ordered))
    print(f"{len(ordered)} questions")


if __name__ == "__main__":
    main()
