"""Merges the counters of several servers for Prometheus, whose scrapes would else meet another server each time."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class _Families(Collector):
    families: Collection[Metric]

    def collect(self) -> Collection[Metric]:
        return self.families


def merged(told: Mapping[str, str]) -> bytes:
    """What each replica says under `/metrics`, by its name, which becomes the label `replica` of its samples."""
    families: dict[str, Metric] = {}
    for replica, text in told.items():
        for family in text_string_to_metric_families(text):
            every = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            every.samples += [s._replace(labels={**s.labels, "replica": replica}) for s in family.samples]
    return generate_latest(_Families(families.values()))
