"""The configuration of a calibration job: configs/calibrate/*.yaml say only what differs from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator

from rayspec.calibration.rules import parse_rule
from rayspec.calibration.rules.base import Rule
from rayspec.calibration.sources.kinds import Source, parse_sources
from rayspec.entries import entry_of
from rayspec.made_for import MadeForTarget
from rayspec.ray_address import RayAddress
from rayspec.shipped import drafter_label
from rayspec.targets.catalogue import DEFAULT_TARGET
from rayspec.training.data.sources import CorpusConfig
from sglang_ext.folders import check_name, check_unique
from sglang_ext.settings import Settings, require


@dataclass(frozen=True, kw_only=True)
class NamedRule(Settings):
    """One calibration to make: the rule {kind: ..., options} on the counts of a source, named as in `sources`."""

    name: str
    source: str
    rule: Annotated[Rule, PlainValidator(parse_rule)]

    def __post_init__(self) -> None:
        check_name(self.name, "calibrations[].name")

    @property
    def entry(self) -> dict[str, Any]:
        """The rule with every default written out, and a drafter by its name instead of its path."""
        entry = entry_of(self.rule.kind, self.rule)
        return {key: drafter_label(value) if key == "drafter" and value else value for key, value in entry.items()}


@dataclass(frozen=True, kw_only=True)
class RayConfig(RayAddress):
    """How the counting reaches Ray, and how finely a source is cut for it."""

    blocks: int | None = None  # parts of a source; None: two for each CPU of the cluster

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.blocks is None or self.blocks >= 1, "ray.blocks", self.blocks, "at least 1")


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig(MadeForTarget):
    """Every source is counted once; then every rule is applied to the counts of its source."""

    makes: ClassVar[str] = "calibrations"

    target: str = DEFAULT_TARGET  # a fetched target, or a Hugging Face folder
    output_dir: str | None = None  # output_dir/<name>/ is a calibration; None = the home folder's calibrations/<target>
    work_dir: str | None = None  # where rayspec train keeps the answers; None = the home folder's training/<target>
    held_out: str | None = None  # answers for the coverage figure; None = work_dir's held_out, where it exists
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    # name: {kind: ..., options}; a file that names none has `raw` of kind raw
    sources: Annotated[dict[str, Source], PlainValidator(parse_sources)] = field(default_factory=dict)
    calibrations: list[NamedRule] = field(default_factory=list)
    ray: RayConfig = field(default_factory=RayConfig)
    mlflow: bool = True
    num_threads: int | None = None  # of torch, for the clusters; None = its own choice, the number of cores

    def __post_init__(self) -> None:
        if not self.calibrations:
            raise ValueError(
                "calibrations is empty; give a list such as "
                "[{name: frspec, source: raw, rule: {kind: frspec, top_k: 4096}}]"
            )
        check_unique([c.name for c in self.calibrations], "calibrations[].name")
        for c in self.calibrations:
            if c.source not in self.sources:
                known = ", ".join(self.sources) or "none"
                raise ValueError(f"calibrations.{c.name}.source must be one of sources ({known}), got {c.source!r}")
            kind = self.sources[c.source].kind
            if kind not in c.rule.source_kinds:
                raise ValueError(
                    f"calibrations.{c.name}.source must be of kind {' or '.join(c.rule.source_kinds)} for the rule "
                    f"{c.rule.kind!r}, got {c.source!r} of kind {kind!r}"
                )
        is_threads = self.num_threads is None or self.num_threads >= 1
        require(is_threads, "num_threads", self.num_threads, "at least 1")
