"""Made-up source files, for the tests of the corpus and of what is trained on it."""

import hashlib
from pathlib import Path

from rayspec.training.data.sources import Document, Package

CODE = "def add(a, b):\n    return a + b\n\n\nclass Box:\n    size = 3\n    name = None\n\nprint(add(1, 2))\n"


def make_document(folder: Path, index: int, package: str = "pkg", text: str = CODE) -> Document:
    content = f"# file {index}\n{text}".encode()
    path = folder / f"{package}_{index}.py"
    path.write_bytes(content)
    owner = Package(name=package, version="1", licence="MIT")
    sha256 = hashlib.sha256(content).hexdigest()
    return Document(package=owner, name=path.name, sha256=sha256, num_bytes=len(content), path=path)
