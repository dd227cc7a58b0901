"""How a job reaches Ray."""

import re
from dataclasses import dataclass

from sglang_ext.settings import Settings, require

ADDRESS = re.compile(r"auto|local|(ray://)?[^\s/:]+:(\d{1,5})")


@dataclass(frozen=True, kw_only=True)
class RayAddress(Settings):
    """The entry `ray` of a job's config, as far as all jobs have it."""

    address: str | None = None  # None: the cluster of RAY_ADDRESS (so of `ray job submit`), else a local one

    def __post_init__(self) -> None:
        found = ADDRESS.fullmatch("auto" if self.address is None else self.address)
        is_address = found is not None and int(found[2] or 1) <= 65535
        require(is_address, "ray.address", self.address, "auto, local, HOST:PORT or ray://HOST:PORT")
