"""How a version does under traffic: tau and time per token of its servers' counters, and whether that is worse than the
version before it."""

from dataclasses import astuple, dataclass

from prometheus_client.parser import text_string_to_metric_families

VERIFIED, ACCEPTED = "rayspec_verified_requests_total", "rayspec_accepted_drafts_total"
REQUESTS, E2E_S = "sglang:e2e_request_latency_seconds_count", "sglang:e2e_request_latency_seconds_sum"
TTFT_S, TOKENS = "sglang:time_to_first_token_seconds_sum", "sglang:generation_tokens_total"


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Counts since a server's start, or over a window."""

    verified: float = 0.0  # verify steps that drafted, each as often as a request took part
    accepted: float = 0.0  # drafts
    requests: float = 0.0  # that were answered
    tokens: float = 0.0
    ttft_s: float = 0.0
    e2e_s: float = 0.0

    def __add__(self, other: "Totals") -> "Totals":
        return self._with(other, 1.0)

    def __sub__(self, other: "Totals") -> "Totals":
        return self._with(other, -1.0)

    def _with(self, other: "Totals", sign: float) -> "Totals":
        names = self.__dataclass_fields__
        sums = [a + sign * b for a, b in zip(astuple(self), astuple(other), strict=True)]
        return Totals(**dict(zip(names, sums, strict=True)))

    @property
    def tau(self) -> float | None:
        return 1.0 + self.accepted / self.verified if self.verified > 0 else None

    @property
    def token_s(self) -> float | None:
        """Seconds a token after the first of a request."""
        later = self.tokens - self.requests
        return (self.e2e_s - self.ttft_s) / later if later > 0 else None


def read_totals(text: str) -> Totals:
    """Of what a server's /metrics says."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("draft_steps") != "0":  # a policy's plain steps have no drafts to accept
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return Totals(
        verified=found.get(VERIFIED, 0.0),
        accepted=found.get(ACCEPTED, 0.0),
        requests=found.get(REQUESTS, 0.0),
        tokens=found.get(TOKENS, 0.0),
        ttft_s=found.get(TTFT_S, 0.0),
        e2e_s=found.get(E2E_S, 0.0),
    )


@dataclass(frozen=True, kw_only=True)
class WatchBounds:
    """What a new version may lose against the one before under live traffic, which is never the same twice."""

    tau_loss: float = 0.10  # share of tau
    token_s_growth: float = 0.50  # share of the seconds a token
    min_requests: int = 20  # of each version; with fewer nothing is judged


def worse(now: Totals, before: Totals, bounds: WatchBounds, *, judges_tau: bool) -> str | None:
    """Why the new version is to be rolled back; None where it is not, or where too few requests say so.

    `judges_tau` False: a policy chooses draft lengths by load, so that tau says nothing of the drafter.
    """
    if min(now.requests, before.requests) < bounds.min_requests:
        return None
    if judges_tau and now.tau and before.tau and now.tau < (1 - bounds.tau_loss) * before.tau:
        return (
            f"tau under traffic is {now.tau:.3f}, {1 - now.tau / before.tau:.0%} below the {before.tau:.3f} of the "
            f"version before (bound {bounds.tau_loss:.0%})"
        )
    if now.token_s and before.token_s and now.token_s > (1 + bounds.token_s_growth) * before.token_s:
        return (
            f"a token takes {1e3 * now.token_s:.1f} ms under traffic, {now.token_s / before.token_s - 1:.0%} more than "
            f"the {1e3 * before.token_s:.1f} ms of the version before (bound {bounds.token_s_growth:.0%})"
        )
    return None
