"""How often drafts are accepted, position by position, estimated from the steps that have ended."""

from collections.abc import Iterable, Sequence


class Acceptance:
    """Shares of accepted drafts among those that were reached, pooled over all requests: running means in which a step
    weighs half after `half_life_steps` others. They begin at the prior, as if that had been seen `prior_verifications`
    times, and a position that was not drafted for `retry_after_steps` begins there again.
    """

    def __init__(
        self, prior: Sequence[float], *, prior_verifications: float, half_life_steps: int, retry_after_steps: int
    ) -> None:
        self._prior, self._weight = list(prior), prior_verifications
        self._keep, self._retry = 0.5 ** (1 / half_life_steps), retry_after_steps
        self._reached = [self._weight for _ in prior]
        self._accepted = [self._weight * share for share in prior]
        self._unseen = [0 for _ in prior]  # steps since a position was reached

    def see(self, drafted: int, accepted: Iterable[int]) -> None:
        """A step has ended in which each request was given `drafted` drafts; `accepted` of each of them, in turn."""
        counts = list(accepted)
        for position in range(len(self._prior)):
            reached = sum(count >= position for count in counts) if position < drafted else 0
            if reached:
                taken = sum(count > position for count in counts)
                self._reached[position] = self._keep * self._reached[position] + reached
                self._accepted[position] = self._keep * self._accepted[position] + taken
                self._unseen[position] = 0
            else:
                self._miss(position)

    def _miss(self, position: int) -> None:
        self._unseen[position] += 1
        if self._unseen[position] >= self._retry:
            self._reached[position] = self._weight
            self._accepted[position] = self._weight * self._prior[position]
            self._unseen[position] = 0

    def shares(self) -> list[float]:
        """Of positions 1, 2, ..., given that all before were accepted."""
        return [accepted / reached for accepted, reached in zip(self._accepted, self._reached, strict=True)]

    def tokens(self, drafted: int) -> float:
        """That a step is expected to emit of a request: its own, and the accepted drafts."""
        total = chance = 1.0
        for share in self.shares()[:drafted]:
            chance *= share
            total += chance
        return total
