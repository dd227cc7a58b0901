"""The audit of dependencies that needs no network; `make audit` asks for known vulnerabilities, which does."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OF_THE_ENVIRONMENT = {"pip", "setuptools", "wheel"}  # pip freeze leaves them out


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    requirements = [Requirement(line) for line in lines]
    here = [r for r in requirements if r.marker is None or r.marker.evaluate()]
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in here}


def needed() -> tuple[set[str], set[str]]:
    """Whatever rayspec with its extras needs, directly or not: (what is installed of it, what is not)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    asked = {(canonicalize_name(r.name), extra) for r in map(Requirement, own) for extra in ("", *r.extras)}
    found: set[str] = set()
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while asked:
        name, extra = asked.pop()
        seen.add((name, extra))
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            missing.add(name)
            continue
        found.add(name)
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                key = canonicalize_name(requirement.name)
                asked |= {(key, e) for e in ("", *requirement.extras)} - seen
    assert len(found) > 100
    return found, missing


def test_what_is_installed_is_what_is_pinned() -> None:
    """Of everything that rayspec needs, so that what was tested is what `make install` gives others."""
    pinned, (found, _) = pins(), needed()
    wrong = {
        name: (version(name), pinned.get(name, "no pin"))
        for name in sorted(found - OF_THE_ENVIRONMENT)
        if version(name).partition("+")[0] != pinned.get(name, "").partition("+")[0]
    }
    assert wrong == {}, "installed and pinned differ: make install, or make pins after a change of versions"


def test_nothing_is_pinned_that_nothing_needs() -> None:
    found, missing = needed()
    if missing:
        pytest.skip(f"not installed, so nobody knows what they need: {', '.join(sorted(missing))} (make install)")
    assert sorted(set(pins()) - found) == []


def test_what_is_installed_goes_together() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    about_us = [line for line in done.stdout.splitlines() if re.match(r"\S+ \S+ (has|requires)", line)]
    assert about_us == [], "pip check"
