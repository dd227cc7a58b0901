"""Merges the counters of several servers for Prometheus, whose scrapes would else meet another server each time."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rayspec.serving.kinds import KINDS


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


def rollovers(counted: Mapping[str, int]) -> Metric:
    """What the roll-overs of this command have done; kinds that never were are there, for the rate of the first one."""
    family = CounterMetricFamily("rayspec_rollover_events", "Events of roll-overs, by their kind.", labels=["event"])
    for kind in KINDS:
        family.add_metric([kind], counted.get(kind, 0))
    return family


def merged(told: Iterable[Told], *others: Metric) -> bytes:
    """All of it in one, each sample with labels that say of which replica and version it is; `others` as they are."""
    families: dict[str, Metric] = {family.name: family for family in others}
    for one in told:
        labels = {"replica": one.replica, "version": one.version}
        for family in text_string_to_metric_families(one.text):
            every = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            every.samples += [s._replace(labels={**s.labels, **labels}) for s in family.samples]
    return generate_latest(_Families(families.values()))
