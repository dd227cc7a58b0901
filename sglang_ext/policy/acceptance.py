"""How often drafts are accepted, position by position, estimated from the steps that have ended."""

from collections.abc import Iterable, Sequence


class Acceptance:
    """Shares of accepted drafts among those that were reached, pooled over all requests.

    Older steps weigh less, down to nothing: then the prior is what is expected, also of a position that is not drafted
    any more.
    """

    def __init__(self, prior: Sequence[float], *, prior_verifications: float, half_life_steps: int) -> None:
        self._prior, self._weight = list(prior), prior_verifications
        self._keep = 0.5 ** (1 / half_life_steps)
        self._reached, self._accepted = [0.0] * len(self._prior), [0.0] * len(self._prior)

    def see(self, drafted: int, accepted: Iterable[int]) -> None:
        """A step has ended in which each request was given `drafted` drafts; `accepted` of each of them, in turn."""
        self._reached = [self._keep * n for n in self._reached]
        self._accepted = [self._keep * n for n in self._accepted]
        for count in accepted:
            for position in range(min(count + 1, drafted)):
                self._reached[position] += 1
                self._accepted[position] += position < count

    def shares(self) -> list[float]:
        """Of positions 1, 2, ..., given that all before were accepted."""
        return [
            (accepted + self._weight * prior) / (reached + self._weight)
            for prior, reached, accepted in zip(self._prior, self._reached, self._accepted, strict=True)
        ]

    def tokens(self, drafted: int) -> float:
        """That a step is expected to emit of a request: its own, and the accepted drafts."""
        total = chance = 1.0
        for share in self.shares()[:drafted]:
            chance *= share
            total += chance
        return total
