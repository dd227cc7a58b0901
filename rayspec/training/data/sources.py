"""The Python files of this installation that may be learnt from: usable, permissively licensed, each content once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from sglang_ext.settings import Settings, require

STDLIB = "stdlib"
STDLIB_TESTS = "stdlib-tests"  # half of the standard library's bytes; capped like a package
SKIPPED_FOLDERS = {
    "__pycache__",
    "site-packages",
    "_vendor",
    "vendor",
    "vendored",
    "third_party",
    "thirdparty",
    "3rdparty",
}
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|ISC|Python Software Foundation|HPND)\b|BSD-|^BSD|Apache-2", re.IGNORECASE
)
NOT_PERMISSIVE = re.compile(r"GPL|Proprietary|NVIDIA|Mozilla|MPL", re.IGNORECASE)
MAX_LINE_CHARS = 1000
MAX_MEAN_LINE_CHARS = 80  # denser files are tables or generated code
MAX_LITERAL_LINES = 0.4  # share of lines that begin with a literal: data, not code


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(Settings):
    """Which files are read, how much of each package is kept, and how large the held-out share is."""

    min_bytes: int = 1_000
    max_bytes: int = 200_000
    package_cap_bytes: int = 400_000  # training bytes of one package; the standard library has no cap
    held_out_cap_bytes: int = 100_000  # held-out bytes of one package; again no cap for the standard library
    stdlib_repeats: int = 2  # times a standard-library file stands in one pass over the training stream
    held_out_percent: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.min_bytes <= self.max_bytes:
            raise ValueError(
                f"corpus.min_bytes must be in 1..corpus.max_bytes ({self.max_bytes}), got {self.min_bytes}"
            )
        is_percent = 1 <= self.held_out_percent <= 50
        require(is_percent, "corpus.held_out_percent", self.held_out_percent, "in 1..50")
        for key in ("package_cap_bytes", "held_out_cap_bytes"):
            value = getattr(self, key)
            require(value >= self.min_bytes, f"corpus.{key}", value, "at least corpus.min_bytes")
        require(self.stdlib_repeats >= 1, "corpus.stdlib_repeats", self.stdlib_repeats, "at least 1")


@dataclass(frozen=True, kw_only=True)
class Package:
    """A distribution whose source is read; the standard library is one too."""

    name: str
    version: str
    licence: str


@dataclass(frozen=True, kw_only=True)
class Document:
    """One source file. `name` is relative to its root, so it means the same on every machine."""

    package: Package
    name: str
    sha256: str
    num_bytes: int
    path: Path = field(repr=False)

    def is_held_out(self, percent: int) -> bool:
        return int(self.sha256, 16) % 100 < percent

    @cached_property
    def text(self) -> str:
        return self.path.read_bytes().decode()


def discover(config: CorpusConfig) -> list[Document]:
    """Every usable file of this interpreter, exact duplicates kept once, in an order given by content alone."""
    stdlib_licence = "PSF-2.0"
    version = platform.python_version()
    library = Package(name=STDLIB, version=version, licence=stdlib_licence)
    library_tests = Package(name=STDLIB_TESTS, version=version, licence=stdlib_licence)
    found: dict[str, Document] = {}
    stdlib_root = Path(sysconfig.get_path("stdlib"))
    candidates: list[tuple[Package, Path, Path]] = [
        (library_tests if _is_test(path.relative_to(stdlib_root)) else library, stdlib_root, path)
        for path in source_files(stdlib_root)
    ]
    owners = permissive_packages()
    for site in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for path in source_files(Path(site)):
            top = path.relative_to(site).parts[0].removesuffix(".py")
            if top in owners:
                candidates.append((owners[top], Path(site), path))
    for package, root, path in candidates:
        document = read_document(path, root, package, config)
        if document is not None:
            found.setdefault(document.sha256, document)
    return [found[sha256] for sha256 in sorted(found)]


def read_document(path: Path, root: Path, package: Package, config: CorpusConfig) -> Document | None:
    """The file as a document of its package, None if it is not usable or too short or long."""
    if not config.min_bytes <= path.stat().st_size <= config.max_bytes:
        return None
    content = path.read_bytes()
    if not is_usable_source(content):
        return None
    name = path.relative_to(root).as_posix()
    sha256 = hashlib.sha256(content).hexdigest()
    return Document(package=package, name=name, sha256=sha256, num_bytes=len(content), path=path)


def is_usable_source(content: bytes) -> bool:
    """Whether a file reads like code that a person wrote: UTF-8, Unix lines, no very long lines, no data table."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return False
    if "\r" in text or "\0" in text:
        return False
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines or max(map(len, lines)) > MAX_LINE_CHARS:
        return False
    if sum(map(len, lines)) / len(lines) > MAX_MEAN_LINE_CHARS:
        return False
    literal = sum(line[0] in "0123456789-'\"[({" and not line.startswith(('"""', "'''")) for line in lines)
    return literal / len(lines) <= MAX_LITERAL_LINES


def permissive_packages() -> dict[str, Package]:
    """Top-level module name → its distribution, for distributions whose metadata names a permissive licence only."""
    owners: dict[str, Package] = {}
    for top, distributions in sorted(importlib.metadata.packages_distributions().items()):
        licences = {name: _licence(name) for name in distributions}
        # a namespace shared by several distributions is used only if all of them are permissive
        if all(PERMISSIVE.search(text) and not NOT_PERMISSIVE.search(text) for text in licences.values()):
            name = sorted(distributions)[0]
            owners[top] = Package(name=name.lower(), version=importlib.metadata.version(name), licence=licences[name])
    return owners


def source_files(root: Path) -> Iterator[Path]:
    """Python files under a folder, in order of name, without vendored ones."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _is_test(relative: Path) -> bool:
    return any(part in ("test", "tests", "idle_test") for part in relative.parts[:-1])


def _licence(distribution: str) -> str:
    metadata = importlib.metadata.metadata(distribution)
    expression, free_text = (" ".join(metadata.get_all(key) or []) for key in ("License-Expression", "License"))
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    named = expression or "; ".join(c.split("::")[-1].strip() for c in classifiers)
    return (named or free_text.strip().split("\n")[0])[:80]  # some put the whole licence into the free text
