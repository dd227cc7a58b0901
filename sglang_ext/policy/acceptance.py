"""How often drafts are accepted, position by position, estimated from the steps that have ended."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul


class Acceptance:
    """Shares of accepted drafts among those that were reached, pooled over all requests: running means in which a step
    weighs half after `half_life_steps` others, whether these drafted or not. They begin at the prior, as if that had
    been seen `prior_verifications` times; what was known never weighs less than that, so that few requests cannot
    overrule it after a long time without drafts.
    """

    def __init__(self, prior: Sequence[float], *, prior_verifications: float, half_life_steps: int) -> None:
        self._least, self._keep = prior_verifications, 0.5 ** (1 / half_life_steps)
        self._reached = [prior_verifications for _ in prior]
        self._accepted = [prior_verifications * share for share in prior]
        self._tokens = self._expected()

    def see(self, drafted: int, accepted: Iterable[int]) -> None:
        """A step has ended in which each request was given `drafted` drafts; `accepted` of each of them, in turn."""
        counts = list(accepted)
        for position, weight in enumerate(self._reached):
            keep = max(self._keep, min(1.0, self._least / weight))
            reached = sum(count >= position for count in counts) if position < drafted else 0
            taken = sum(count > position for count in counts) if reached else 0
            self._reached[position] = keep * weight + reached
            self._accepted[position] = keep * self._accepted[position] + taken
        self._tokens = self._expected()

    def shares(self) -> list[float]:
        """Shares of drafts accepted at positions 1, 2, ..., given that all before were accepted."""
        return [accepted / reached for accepted, reached in zip(self._accepted, self._reached, strict=True)]

    def tokens(self, drafted: int) -> float:
        """The tokens that a step is expected to emit of a request: its own, and the accepted drafts."""
        return self._tokens[drafted]

    def _expected(self) -> list[float]:
        """`tokens` by draft length."""
        return list(accumulate(accumulate(self.shares(), mul, initial=1.0)))
