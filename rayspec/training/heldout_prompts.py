"""Writes the shipped workloads: heldout_python.jsonl, openings of held-out Python, and mixed_languages.jsonl.

    python -m rayspec.training.heldout_prompts <tokenizer folder> <output folder>

mixed_languages has held-out Python and, in equal shares, text unlike all that the target has seen: C++, CUDA, Cython,
Fortran and Markdown. Its answers are full of tokens that counts of Python rank low, which is where a reduced vocabulary
fails. The texts ship in the repository, so only the standard library and permissively licensed packages of this
project's own stack are quoted.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from rayspec.training.corpus import Encoder, cut_prompt_records, held_out_documents
from rayspec.training.sources import STDLIB, CorpusConfig, Document, permissive_packages, read_document, source_files
from rayspec.training.tokenizer import load_tokenizer

LICENCES = {
    "aiohttp": "Apache-2.0 and MIT",
    "datasets": "Apache-2.0",
    "fastapi": "MIT",
    "flask": "BSD-3-Clause",
    "huggingface_hub": "Apache-2.0",
    "jinja2": "BSD-3-Clause",
    "matplotlib": "PSF-based",
    "mlflow": "Apache-2.0",
    "networkx": "BSD-3-Clause",
    "numba": "BSD-2-Clause",
    "numpy": "BSD-3-Clause",
    "omegaconf": "BSD-3-Clause",
    "pandas": "BSD-3-Clause",
    "pygments": "BSD-2-Clause",
    "pytest": "MIT",
    "ray": "Apache-2.0",
    "scikit-learn": "BSD-3-Clause",
    "scipy": "BSD-3-Clause",
    "setuptools": "MIT",
    "sglang": "Apache-2.0",
    "sqlalchemy": "MIT",
    "sympy": "BSD-3-Clause",
    "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "triton": "MIT",
    STDLIB: "PSF-2.0",
}
COUNT, STDLIB_COUNT = 400, 160
PROMPT_TOKENS = (32, 160)
LANGUAGES = {
    "c++": (".h", ".hpp", ".cpp", ".c"),
    "cuda": (".cu", ".cuh"),
    "cython": (".pyx", ".pxd"),
    "fortran": (".f90", ".f"),
    "markdown": (".md",),
}
LANGUAGE_COUNT = 20  # prompts of each, and of Python


def python_prompts(tokenizer: Encoder, documents: Sequence[Document]) -> list[dict[str, object]]:
    """COUNT prompts {question_id, category, turns}; category is the package."""
    library = [d for d in documents if d.package.name == STDLIB]
    packages = [d for d in documents if d.package.name in LICENCES and d.package.name != STDLIB]
    prompts = cut_prompt_records(tokenizer, library, STDLIB_COUNT, PROMPT_TOKENS, seed=0)
    prompts += cut_prompt_records(tokenizer, packages, COUNT - STDLIB_COUNT, PROMPT_TOKENS, seed=1)
    return [
        {"question_id": f"heldout-python-{i:03d}", "category": p.document.package.name, "turns": [p.text]}
        for i, p in enumerate(prompts)
    ]


def mixed_prompts(tokenizer: Encoder, documents: Sequence[Document], site: Path) -> list[dict[str, object]]:
    """LANGUAGE_COUNT prompts of each language in the packages under `site`, and of the held-out Python `documents`;
    category is the language."""
    owners = {top: package for top, package in permissive_packages().items() if package.name in LICENCES}
    limits = CorpusConfig()
    by_language: dict[str, Sequence[Document]] = {"python": [d for d in documents if d.package.name in LICENCES]}
    for language, suffixes in LANGUAGES.items():
        paths = [path for path in source_files(site, suffixes) if path.relative_to(site).parts[0] in owners]
        found = (read_document(path, site, owners[path.relative_to(site).parts[0]], limits) for path in paths)
        by_language[language] = sorted({d.sha256: d for d in found if d is not None}.values(), key=lambda d: d.sha256)
    return [
        {"question_id": f"mixed-{language}-{i:02d}", "category": language, "turns": [p.text]}
        for language, found in by_language.items()
        for i, p in enumerate(cut_prompt_records(tokenizer, found, LANGUAGE_COUNT, PROMPT_TOKENS, seed=2))
    ]


def write_lines(output: Path, lines: Iterable[dict[str, object]]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    os.replace(temporary, output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer_folder", type=Path)
    parser.add_argument("output_folder", type=Path)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer_folder)
    documents = held_out_documents(CorpusConfig())
    site = Path(sysconfig.get_path("purelib"))
    write_lines(arguments.output_folder / "mixed_languages.jsonl", mixed_prompts(tokenizer, documents, site))
    write_lines(arguments.output_folder / "heldout_python.jsonl", python_prompts(tokenizer, documents))
