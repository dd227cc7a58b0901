"""Where replicas, on whatever node they run, write down their servers' counters, which a roll-over watches, and what it
does about them, which the ingress tells Prometheus."""

from collections import Counter

from rayspec.serving.figures import Totals


class Board:
    """An actor. What a replica has counted stays when it ends."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], Totals] = {}
        self._events = Counter[str]()

    def put(self, version: str, replica: str, totals: Totals) -> None:
        """`replica`: a name that no other has on any node."""
        self._totals[version, replica] = totals

    def totals(self, version: str) -> Totals:
        """The sum over all replicas that a version has had."""
        found = (totals for (name, _), totals in self._totals.items() if name == version)
        return sum(found, Totals())

    def count(self, event: str) -> None:
        """One of a roll-over's (`events.py`)."""
        self._events[event] += 1

    def events(self) -> Counter[str]:
        return self._events
