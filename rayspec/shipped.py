"""Names of targets, drafters and calibrations, and where they lie.

A target is fetched to `$RAYSPEC_HOME/models/NAME`. Its drafters lie in `$RAYSPEC_HOME/drafters/TARGET/NAME`, its
calibrations in `$RAYSPEC_HOME/calibrations/TARGET/NAME`: the jobs write what they make there, and what ships with the
package is put there when it is first named, but by a plan (`leaving_nothing`).
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rayspec.home import home
from rayspec.targets.adapters import check_no_adapter
from rayspec.targets.catalogue import CATALOGUE, DEFAULT_TARGET, fetched

ASSETS = Path(__file__).resolve().parent / "assets"
WAY_OUT = {"drafters": "rayspec train makes one", "calibrations": "rayspec calibrate makes one"}
MARKS = {"drafters": "config.json", "calibrations": "calibration.json"}
_temporary: Path | None = None  # where what ships is put within `leaving_nothing`


@contextmanager
def leaving_nothing(if_so: bool) -> Iterator[None]:
    """Within it what ships is put into a folder that is gone afterwards, `if_so`: a plan leaves nothing behind."""
    global _temporary
    if not if_so:
        yield
        return
    with TemporaryDirectory(prefix="rayspec-plan-") as folder:
        _temporary = Path(folder)
        try:
            yield
        finally:
            _temporary = None


def user_path(text: str, setting: str) -> Path:
    """A path as the user wrote it, `~` resolved. Raises ValueError where there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{setting} is {text!r}, but there is no such user; write the path in full") from error


def target_path(name: str) -> str:
    """The target to serve: a fetched one by its name or the hub's, else the given folder or Hugging Face name.

    Raises ValueError for a target that was not fetched yet and for a folder that holds no model or an adapter; whether
    a Hugging Face name exists shows when the engine starts.
    """
    if name in CATALOGUE:
        found = fetched(name)
        if found is None:
            raise ValueError(f"target {name} is not on this machine yet; rayspec fetch {name} brings it")
        return str(found)
    is_name = not name.startswith(("/", ".", "~")) and not os.path.exists(name)
    if is_name:
        return str(fetched(name) or name)
    folder = user_path(name, "target").resolve()
    check_no_adapter(folder)
    if not os.path.isfile(folder / "config.json"):
        raise ValueError(f"target is {name!r}, but there is no model at {folder} (config.json is missing)")
    return str(folder)


def target_name(target: str) -> str:
    """The short name of a target: a fetched one's name, or the last part of its path."""
    return Path(target).name


def own_folder(kind: str, target: str) -> Path:
    """Where a target's drafters or calibrations (`kind`) lie on this machine."""
    return home() / kind / target_name(target)


def drafter_path(name: str, target: str = DEFAULT_TARGET) -> str:
    """The folder of a drafter: a name, or a path. Raises ValueError where neither exists."""
    return _path("drafters", name, target)


def calibration_path(name: str, target: str = DEFAULT_TARGET) -> str:
    """The folder of a calibration: a name, or a path. Raises ValueError where neither exists."""
    return _path("calibrations", name, target)


def drafter_label(name: str) -> str:
    """The short name of a drafter in tables: its name, or the last part of its path."""
    return Path(name).name


def _shipped(kind: str, target: str) -> Path:
    return ASSETS / kind / target_name(target)


def names(kind: str, target: str = DEFAULT_TARGET) -> list[str]:
    """Names of a target's drafters or calibrations (`kind`) that ship or were made here."""
    places = (own_folder(kind, target), _shipped(kind, target))
    return sorted({file.parent.name for place in places for file in place.glob(f"*/{MARKS[kind]}")})


def _path(kind: str, name: str, target: str) -> str:
    own, shipped = own_folder(kind, target) / name, _shipped(kind, target) / name
    is_plain = Path(name).name == name
    if is_plain and not os.path.isfile(own / MARKS[kind]) and os.path.isfile(shipped / MARKS[kind]):
        own = _installed(kind, name, target)
    for folder in ([own] if is_plain else []) + [user_path(name, kind)]:
        if os.path.isfile(folder / MARKS[kind]):
            return str(folder.resolve())
    known = ", ".join(names(kind, target)) or "none"
    raise ValueError(
        f"no {kind.removesuffix('s')} {name!r}: neither one of target {target_name(target)} ({known}) nor a folder "
        f"with a {MARKS[kind]}; {WAY_OUT[kind]}"
    )


def _installed(kind: str, name: str, target: str) -> Path:
    """Where a shipped drafter, with what it shares tensors with, or a shipped calibration is put: where the jobs would
    have, or into the temporary folder."""
    shipped, own = _shipped(kind, target), (_temporary or home()) / kind / target_name(target)
    if os.path.isfile(own / name / MARKS[kind]):
        return own / name
    if kind == "calibrations":
        shutil.copytree(shipped / name, own / name)
        return own / name
    from rayspec.packing import unpack  # torch takes a second
    from sglang_ext.drafters.checkpoint_config import read_info
    from sglang_ext.fingerprints import weights_sha256
    from sglang_ext.folder_kinds import WEIGHTS

    for shares in read_info(shipped / name).shares:
        other = Path(drafter_path(Path(shares.drafter).name, target))
        if weights_sha256(other / WEIGHTS) != shares.sha256:
            raise ValueError(
                f"drafter {name!r} ships with a drafter {other.name!r} that it shares tensors with, but {other} is "
                "another one: trained here, or from an earlier release; move it away to have both as they ship"
            )
        if not os.path.exists(own / other.name):  # of a plan: beside what shares with it
            own.mkdir(parents=True, exist_ok=True)
            (own / other.name).symlink_to(other)
    unpack(shipped / name, own / name, Path(target_path(target)))
    return own / name
