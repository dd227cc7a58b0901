"""Names of the models and prompts that ship with the package."""

import os
from pathlib import Path

ASSETS = Path(__file__).resolve().parent / "assets"
DEMO_TARGET = "demo"


def user_path(text: str, setting: str) -> Path:
    """A path as the user wrote it, `~` resolved. Raises ValueError where there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{setting} is {text!r}, but {error}; write the path in full".replace("..", ".")) from error


def is_file(path: Path) -> bool:
    """As `Path.is_file`; False too for a name that no file can have, which is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def target_path(name: str) -> str:
    """The target to serve: the shipped one for `demo`, else the given folder or Hugging Face name.

    Raises ValueError for a folder that holds no model; whether a Hugging Face name exists shows when the engine starts.
    """
    is_path = name.startswith(("/", ".", "~")) or is_file(Path(name) / "config.json") or is_file(Path(name))
    if name != DEMO_TARGET and not is_path and not os.path.isdir(name):
        return name
    folder = ASSETS / "target" if name == DEMO_TARGET else user_path(name, "target").resolve()
    if not is_file(folder / "config.json"):
        raise ValueError(f"target is {name!r}, but there is no model at {folder} (config.json is missing)")
    return str(folder)


def drafter_names() -> list[str]:
    """Names of the shipped drafters."""
    return sorted(p.parent.name for p in (ASSETS / "drafters").glob("*/config.json"))


def drafter_path(name: str) -> str:
    """The folder of a drafter: a shipped name, or a path. Raises ValueError where neither exists."""
    shipped = ASSETS / "drafters" / name
    for folder in (shipped, user_path(name, "drafter")):
        if is_file(folder / "config.json"):
            return str(folder.resolve())
    known = ", ".join(drafter_names()) or "none"
    raise ValueError(
        f"no drafter {name!r}: neither a shipped name ({known}) nor a folder with a config.json; "
        "python jobs/train.py makes one"
    )


def calibration_path(name: str) -> str:
    """The folder of a calibration: a shipped name, or a path. Raises ValueError where neither exists."""
    shipped = ASSETS / "calibrations" / name
    for folder in (shipped, user_path(name, "calibration")):
        if is_file(folder / "calibration.json"):
            return str(folder.resolve())
    known = ", ".join(sorted(p.parent.name for p in (ASSETS / "calibrations").glob("*/calibration.json"))) or "none"
    raise ValueError(
        f"no calibration {name!r}: neither a shipped name ({known}) nor a folder with a calibration.json; "
        "python jobs/calibrate.py makes one"
    )


def drafter_label(name: str) -> str:
    """The short name of a drafter in tables: the shipped name, or the last part of its path."""
    return Path(name).name
