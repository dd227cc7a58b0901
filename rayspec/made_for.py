"""What the configs of rayspec train and rayspec calibrate have in common: a target, and where its things lie."""

from abc import ABC
from pathlib import Path
from typing import ClassVar

from rayspec.home import home
from rayspec.shipped import own_folder, target_name, target_path
from sglang_ext.settings import Settings


class MadeForTarget(Settings, ABC):
    """A config of what `makes` drafters or calibrations for a target."""

    makes: ClassVar[str]
    target: str
    output_dir: str | None
    work_dir: str | None

    @property
    def output_folder(self) -> Path:
        return Path(self.output_dir) if self.output_dir else own_folder(self.makes, self.target)

    @property
    def target_folder(self) -> str:
        return target_path(self.target)

    @property
    def target_name(self) -> str:
        return target_name(self.target)

    @property
    def work_folder(self) -> Path:
        """Where rayspec train keeps the target's answers."""
        return Path(self.work_dir) if self.work_dir else home() / "training" / self.target_name
