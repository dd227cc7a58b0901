"""English prose that every installation has, for a list of raw text that is not source code.

    python docs/experiments/english_text.py english.jsonl

The docstrings of Python's own modules and of the packages in `PACKAGES`, and the descriptions of all packages: what is
long enough to be prose, each once, in the order of its hash, to 4 MiB.
"""

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator, Set
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path

LEAST, MOST = 400, 4000  # characters of a text
TOTAL = 4 * 2**20
PACKAGES = ("mlflow", "numpy", "ray", "scipy")
SKIPPED = {"tests", "test", "idlelib", "site-packages"}


def docstrings(folder: Path) -> Iterator[str]:
    for _, tree in parsed(folder, SKIPPED):
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def parsed(folder: Path, skipped: Set[str]) -> Iterator[tuple[Path, ast.Module]]:
    """Modules below a folder that Python can read, by their path in it; `skipped`: names of folders and files."""
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder)
        if skipped & set(path.parts):
            continue
        try:
            yield path, ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, RecursionError):
            continue


def is_prose(text: str) -> bool:
    """Mostly letters and spaces, in sentences: neither tables nor doctests."""
    letters = sum(c.isalpha() or c == " " for c in text)
    return len(text) >= LEAST and letters > 0.85 * len(text) and ">>>" not in text and text.isascii()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    paths = sysconfig.get_paths()
    folders = [Path(paths["stdlib"]), *(Path(paths["purelib"]) / name for name in PACKAGES)]
    texts = {text[:MOST] for folder in folders for text in docstrings(folder) if is_prose(text)}
    described = (d.metadata.get_payload() for d in distributions())
    texts |= {text[:MOST] for text in described if isinstance(text, str) and is_prose(text)}
    written = total = 0
    with out.open("w") as file:
        for text in sorted(texts, key=lambda text: sha256(text.encode()).digest()):
            if total + len(text) > TOTAL:
                break
            file.write(json.dumps({"text": text}) + "\n")
            written, total = written + 1, total + len(text)
    print(f"{written} of {len(texts)} texts, {total / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
