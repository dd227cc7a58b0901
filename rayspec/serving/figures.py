"""How a version does under traffic: tau, times and deaths of its servers, and whether that is worse than the version
before it.

Traffic is never the same twice, and it is looked at again and again. So a figure must be beyond its bound, and chance
must not explain that there is a difference: by the ranks (Mann and Whitney) of the parts of both windows, in each of
which some requests were answered, at levels that add up to FALSE_ALARM over all looks (as in `rayspec.gate.decision`).
Ranks, since counters of one request move at different times, and a few parts that are far off then say nothing.
Deaths are too rare for that: a few of them are somebody else's, and more are the version's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from prometheus_client.parser import text_string_to_metric_families
from scipy import stats

from rayspec.statistics import error_spent

VERIFIED, DRAFTED = "rayspec_verified_requests_total", "rayspec_drafted_total"
ACCEPTED = "rayspec_accepted_drafts_total"
REQUESTS, E2E_S = "sglang:e2e_request_latency_seconds_count", "sglang:e2e_request_latency_seconds_sum"
FIRST_TOKENS, TTFT_S = "sglang:time_to_first_token_seconds_count", "sglang:time_to_first_token_seconds_sum"
TOKENS = "sglang:generation_tokens_total"
PROMPT_TOKENS, CACHED_TOKENS = "sglang:prompt_tokens_total", "sglang:cached_tokens_total"
ASKED = "sglang:http_requests_total"  # with POST; what asks for health and metrics is GET
FALSE_ALARM = 0.003  # chance for each of the three figures, over all looks at one version
PART_REQUESTS = 2  # at least, of a part: one request goes on over several looks, whose counts then go together


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts since a server's start, or over a window."""

    verified: float = 0.0  # verify steps that drafted, each as often as a request took part
    accepted: float = 0.0  # drafts
    drafted_first: float = 0.0  # first drafts of a verify step
    accepted_first: float = 0.0
    asked: float = 0.0  # requests
    requests: float = 0.0  # that were answered
    tokens: float = 0.0
    first_tokens: float = 0.0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    prompt_tokens: float = 0.0  # of those that were answered, without what was found in the cache
    deaths: float = 0.0  # of servers that nobody had stopped

    def __add__(self, other: "Totals") -> "Totals":
        return self._with(other, 1.0)

    def __sub__(self, other: "Totals") -> "Totals":
        return self._with(other, -1.0)

    def _with(self, other: "Totals", sign: float) -> "Totals":
        return Totals(**{n: getattr(self, n) + sign * getattr(other, n) for n in self.__dataclass_fields__})

    @property
    def emitted(self) -> tuple[float, float]:
        """(tokens, verify steps), whose ratio is tau."""
        return self.verified + self.accepted, self.verified

    @property
    def emitted_by_first(self) -> tuple[float, float]:
        """The same, had each step but one draft: what it is does not depend on how many a policy chooses."""
        return self.drafted_first + self.accepted_first, self.drafted_first

    @property
    def decoding(self) -> tuple[float, float]:
        """(seconds, tokens) after the first token of each request."""
        return self.e2e_s - self.ttft_s, self.tokens - self.requests

    @property
    def waiting(self) -> tuple[float, float]:
        """(seconds, first tokens)."""
        return self.ttft_s, self.first_tokens

    @property
    def waiting_for_prompt(self) -> tuple[float, float]:
        """(seconds until first tokens, prompt tokens that were computed)."""
        return self.ttft_s, self.prompt_tokens

    @property
    def tau(self) -> float | None:
        return _ratio(self.emitted)

    @property
    def tau_of_first(self) -> float | None:
        return _ratio(self.emitted_by_first)

    @property
    def token_s(self) -> float | None:
        return _ratio(self.decoding)

    @property
    def first_token_s(self) -> float | None:
        return _ratio(self.waiting)


def _ratio(pair: tuple[float, float]) -> float | None:
    return pair[0] / pair[1] if pair[1] > 0 else None


Window = Sequence[Totals]  # successive parts
Figure = Callable[[Totals], tuple[float, float]]  # what is summed over parts before it is divided
DECODING, WAITING, FOR_PROMPT = map(attrgetter, ("decoding", "waiting", "waiting_for_prompt"))


def window(marks: Sequence[Totals]) -> Window:
    """What was counted between each reading of the counters and the next."""
    return [later - earlier for earlier, later in pairwise(marks)]


def pooled(parts: Window) -> Totals:
    return sum(parts, Totals())


def read_totals(text: str) -> Totals:
    """The totals in the text of a server's /metrics."""
    found: dict[str, float] = {}
    first: dict[str, float] = {}
    posted: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("draft_steps") != "0":  # a policy's plain steps have no drafts to accept
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
            if sample.labels.get("position") == "1":
                first[sample.name] = first.get(sample.name, 0.0) + sample.value
            if sample.labels.get("method") == "POST":
                posted[sample.name] = posted.get(sample.name, 0.0) + sample.value
    return Totals(
        verified=found.get(VERIFIED, 0.0),
        accepted=found.get(ACCEPTED, 0.0),
        drafted_first=first.get(DRAFTED, 0.0),
        accepted_first=first.get(ACCEPTED, 0.0),
        asked=posted.get(ASKED, 0.0),
        requests=found.get(REQUESTS, 0.0),
        tokens=found.get(TOKENS, 0.0),
        first_tokens=found.get(FIRST_TOKENS, 0.0),
        ttft_s=found.get(TTFT_S, 0.0),
        e2e_s=found.get(E2E_S, 0.0),
        prompt_tokens=found.get(PROMPT_TOKENS, 0.0) - found.get(CACHED_TOKENS, 0.0),
    )


@dataclass(frozen=True, kw_only=True)
class WatchBounds:
    """What a new version may lose against the one before under live traffic, which is never the same twice."""

    tau_loss: float = 0.10  # share of tau, or of that of first drafts
    token_s_growth: float = 0.50  # share of the seconds a token
    first_token_s_growth: float = 1.00  # share of the seconds to the first token
    deaths: int = 2  # of servers, more than of the version before
    min_requests: int = 20  # of each version; with fewer nothing is judged


def worse(now: Window, before: Window, bounds: WatchBounds, *, of_first_drafts: bool, level: float) -> str | None:
    """Why the new version is to be rolled back; None where it is not, or where too few requests say so.

    `of_first_drafts`: judge tau by them alone, where a policy chooses how many follow. `level`: how probable each
    figure's false alarm may be at this look (`spent`); 1 for what is beyond its bound, if only by chance.
    """
    own, other = pooled(now), pooled(before)
    if own.deaths > other.deaths + bounds.deaths:
        return (
            f"{own.deaths:.0f} of its servers died under traffic, where {other.deaths:.0f} of the version before did "
            f"(bound: {bounds.deaths} more)"
        )
    if min(own.requests, other.requests) < bounds.min_requests:
        return None
    name = "tau of first drafts alone" if of_first_drafts else "tau"
    emitted = attrgetter("emitted_by_first" if of_first_drafts else "emitted")
    if _is_beyond(before, now, emitted, 1 / (1 - bounds.tau_loss), level):
        tau, tau_before = _compared(emitted, own, other)
        return (
            f"{name} under traffic is {tau:.3f}, {1 - tau / tau_before:.0%} below the {tau_before:.3f} of the version "
            f"before (bound {bounds.tau_loss:.0%})"
        )
    if _is_beyond(now, before, DECODING, 1 + bounds.token_s_growth, level):
        return _slower("a token takes", *_compared(DECODING, own, other), bounds.token_s_growth)
    # The caches of new servers are empty, so that prompts take longer at first; and other prompts may be longer.
    # Whichever it is, a prompt token that is computed takes no longer for it.
    bound = 1 + bounds.first_token_s_growth
    if _is_beyond(now, before, WAITING, bound, level) and _exceeds(own, other, FOR_PROMPT, bound):
        return _slower("the first token takes", *_compared(WAITING, own, other), bounds.first_token_s_growth)
    return None


def silent(now: Window, before: Window, bounds: WatchBounds) -> str | None:
    """Why a version that was watched to the end is to be rolled back although it has answered too little to be
    compared; None where it is not."""
    own, other = pooled(now), pooled(before)
    if own.first_tokens or min(own.asked, other.first_tokens) < bounds.min_requests:
        return None
    return f"none of {own.asked:.0f} requests got a token, where the version before answered {other.requests:.0f}"


def spent(share: float) -> float:
    """The part of FALSE_ALARM that all looks may spend in this share (0..1) of the time that a version is watched."""
    return FALSE_ALARM * error_spent(share)


def _compared(figure: Figure, own: Totals, other: Totals) -> tuple[float, float]:
    """The figures of two windows that have been found to be beyond a bound."""
    found, before = _ratio(figure(own)), _ratio(figure(other))
    assert found is not None, "it was compared with a bound"
    assert before is not None, "it was compared with a bound"
    return found, before


def _slower(what: str, seconds: float, before: float, bound: float) -> str:
    return (
        f"{what} {1e3 * seconds:.1f} ms under traffic, {seconds / before - 1:.0%} more than the {1e3 * before:.1f} ms "
        f"of the version before (bound {bound:.0%})"
    )


def _is_beyond(higher: Window, lower: Window, figure: Figure, factor: float, level: float) -> bool:
    """Whether the pooled ratio of `higher` is more than `factor` times that of `lower`, and above it for no chance."""
    if not _exceeds(pooled(higher), pooled(lower), figure, factor):
        return False
    above, below = ([r for p in _of_requests(w) if (r := _ratio(figure(p))) is not None] for w in (higher, lower))
    return bool(above and below and stats.mannwhitneyu(above, below, alternative="greater").pvalue <= level)


def _exceeds(higher: Totals, lower: Totals, figure: Figure, factor: float) -> bool:
    high, low = _ratio(figure(higher)), _ratio(figure(lower))
    return bool(high and low and high > factor * low)


def _of_requests(parts: Window) -> Window:
    """The parts, put together until each has PART_REQUESTS."""
    merged = [Totals()]
    for part in parts:
        if merged[-1].requests >= PART_REQUESTS:
            merged.append(Totals())
        merged[-1] += part
    if len(merged) > 1 and merged[-1].requests < PART_REQUESTS:
        last = merged.pop()
        merged[-1] += last
    return merged
