"""How often drafts are accepted, position by position, estimated from the steps that have ended."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from operator import mul


class Acceptance:
    """Shares of accepted drafts among those that were reached: of each running request its own, and what is common to
    all, which is expected of a request that is new.

    What a request accepts is taken to vary about the common share as a Beta distribution of `concentration` c. So its
    own share is that of its verifications and of c more of the common one; and n of its verifications say as much of
    the common share as n (c + 1) / (c + n) of requests that are all different: c + 1 at most.

    The common shares are running means, in which a step weighs half after `half_life_steps` others, whether these
    drafted or not. They begin at the prior, as if that had been seen `prior_verifications` times; what was known never
    weighs less than that, so that few requests cannot overrule it after a long time without drafts.
    """

    def __init__(
        self, prior: Sequence[float], *, prior_verifications: float, half_life_steps: int, concentration: float
    ) -> None:
        self._least, self._keep = prior_verifications, 0.5 ** (1 / half_life_steps)
        self._concentration = concentration
        self._reached = [prior_verifications for _ in prior]
        self._accepted = [prior_verifications * share for share in prior]
        self._own: dict[Hashable, list[tuple[int, int]]] = {}  # (reached, accepted) at each position
        self._tokens: dict[Hashable, list[float]] = {}  # of those requests, by draft length
        self._common = _expected(prior)

    def keep(self, requests: Iterable[Hashable]) -> None:
        """Forget all but these."""
        for request in self._own.keys() - set(requests):
            del self._own[request], self._tokens[request]

    def see(self, drafted: int, accepted: Iterable[tuple[Hashable, int]]) -> None:
        """A step has ended in which each of these requests was given `drafted` drafts and accepted so many of them."""
        counts = list(accepted) if drafted else []
        c, fresh = self._concentration, [(0, 0)] * len(self._reached)
        own = [list(self._own.get(request, fresh)) for request, _ in counts]
        for position, weight in enumerate(self._reached):
            keep, reached, taken = max(self._keep, min(1.0, self._least / weight)), 0.0, 0.0
            for seen, (_, count) in zip(own, counts, strict=True):
                if position < drafted and count >= position:
                    of, right = seen[position]
                    seen[position] = (of + 1, right + (count > position))
                    says = c * (c + 1) / ((c + of) * (c + of + 1))
                    reached += says
                    taken += says * (count > position)
            self._reached[position] = keep * weight + reached
            self._accepted[position] = keep * self._accepted[position] + taken
        if counts:
            self._own.update({request: seen for (request, _), seen in zip(counts, own, strict=True)})
            shares = self.shares()
            self._common = _expected(shares)
            self._tokens = {request: self._of(seen, shares) for request, seen in self._own.items()}

    def shares(self) -> list[float]:
        """Common shares of drafts accepted at positions 1, 2, ..., given that all before were accepted."""
        return [accepted / reached for accepted, reached in zip(self._accepted, self._reached, strict=True)]

    def tokens(self, drafted: int, request: Hashable = None) -> float:
        """The tokens that a step is expected to emit of a request: its own, and the accepted drafts. Without one: of a
        request that is new."""
        return self._tokens.get(request, self._common)[drafted]

    def _of(self, seen: Sequence[tuple[int, int]], shares: Sequence[float]) -> list[float]:
        c = self._concentration
        return _expected([(c * share + right) / (c + of) for share, (of, right) in zip(shares, seen, strict=True)])


def _expected(shares: Iterable[float]) -> list[float]:
    """`tokens` by draft length."""
    return list(accumulate(accumulate(shares, mul, initial=1.0)))
