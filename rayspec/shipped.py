"""Names of the models and prompts that ship with the package."""

from pathlib import Path

from rayspec.targets.catalogue import CATALOGUE, fetched

ASSETS = Path(__file__).resolve().parent / "assets"
DEMO_TARGET = "demo"


def target_path(name: str) -> str:
    """The target to serve: a fetched one by name, else the given folder or Hugging Face name.

    Raises ValueError for a target that was not fetched yet and for a folder that holds no model; whether a Hugging Face
    name exists shows when the engine starts.
    """
    if name in CATALOGUE:
        found = fetched(name)
        if found is None:
            raise ValueError(f"target {name} is not on this machine yet; python jobs/fetch_target.py {name} brings it")
        return str(found)
    is_name = name != DEMO_TARGET and not name.startswith(("/", ".", "~")) and not Path(name).is_dir()
    if is_name:
        return name
    folder = ASSETS / "target" if name == DEMO_TARGET else Path(name).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise ValueError(f"target is {name!r}, but there is no model at {folder} (config.json is missing)")
    return str(folder)


def drafter_names() -> list[str]:
    """Names of the shipped drafters."""
    return sorted(p.parent.name for p in (ASSETS / "drafters").glob("*/config.json"))


def drafter_path(name: str) -> str:
    """The folder of a drafter: a shipped name, or a path. Raises ValueError where neither exists."""
    shipped = ASSETS / "drafters" / name
    for folder in (shipped, Path(name).expanduser()):
        if (folder / "config.json").is_file():
            return str(folder.resolve())
    known = ", ".join(drafter_names()) or "none"
    raise ValueError(
        f"no drafter {name!r}: neither a shipped name ({known}) nor a folder with a config.json; "
        "python jobs/train.py makes one"
    )


def calibration_path(name: str) -> str:
    """The folder of a calibration: a shipped name, or a path. Raises ValueError where neither exists."""
    shipped = ASSETS / "calibrations" / name
    for folder in (shipped, Path(name).expanduser()):
        if (folder / "calibration.json").is_file():
            return str(folder.resolve())
    known = ", ".join(sorted(p.parent.name for p in (ASSETS / "calibrations").glob("*/calibration.json"))) or "none"
    raise ValueError(
        f"no calibration {name!r}: neither a shipped name ({known}) nor a folder with a calibration.json; "
        "python jobs/calibrate.py makes one"
    )


def drafter_label(name: str) -> str:
    """The short name of a drafter in tables: the shipped name, or the last part of its path."""
    return Path(name).name
