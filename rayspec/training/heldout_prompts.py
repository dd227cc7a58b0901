"""Writes rayspec/assets/prompts/heldout_python.jsonl, the sweep's workload: openings of held-out Python.

    python -m rayspec.training.heldout_prompts <tokenizer folder> <output.jsonl>

The texts ship in the repository, so only the standard library and permissively licensed packages of this project's own
stack are quoted.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from rayspec.training.corpus import cut_prompt_records, held_out_documents
from rayspec.training.sources import STDLIB, CorpusConfig, Document
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


def write_heldout_prompts(tokenizer_folder: Path, output: Path, documents: Sequence[Document] | None = None) -> None:
    """Write COUNT prompts as JSON lines {question_id, category, turns}; category is the package."""
    tokenizer = load_tokenizer(tokenizer_folder)
    documents = held_out_documents(CorpusConfig()) if documents is None else documents
    library = [d for d in documents if d.package.name == STDLIB]
    packages = [d for d in documents if d.package.name in LICENCES and d.package.name != STDLIB]
    prompts = cut_prompt_records(tokenizer, library, STDLIB_COUNT, PROMPT_TOKENS, seed=0)
    prompts += cut_prompt_records(tokenizer, packages, COUNT - STDLIB_COUNT, PROMPT_TOKENS, seed=1)
    lines = [
        {"question_id": f"heldout-python-{i:03d}", "category": p.document.package.name, "turns": [p.text]}
        for i, p in enumerate(prompts)
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    os.replace(temporary, output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizer_folder", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    write_heldout_prompts(arguments.tokenizer_folder, arguments.output)
