"""Merges the counters of several servers for Prometheus, whose scrapes would else meet another server each time."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class _Families(Collector):
    families: Collection[Metric]

    def collect(self) -> Collection[Metric]:
        return self.families


class Told(NamedTuple):
    """What the server of a replica says under `/metrics`."""

    replica: str
    version: str
    text: str


def merged(told: Iterable[Told]) -> bytes:
    """All of it in one, each sample with labels that say of which replica and version it is."""
    families: dict[str, Metric] = {}
    for one in told:
        labels = {"replica": one.replica, "version": one.version}
        for family in text_string_to_metric_families(one.text):
            every = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            every.samples += [s._replace(labels={**s.labels, **labels}) for s in family.samples]
    return generate_latest(_Families(families.values()))
