"""How many replicas serve, and how requests find one."""

from dataclasses import dataclass
from typing import Any

MAX_REPLICAS = 1000
MAX_REQUESTS_EACH = 2048
# Requests of an actor, more than come at once: one that has as many answers no health checks either, so that Ray Serve
# ends it. SGLang queues by itself.
MAX_ONGOING = 100_000
MAX_DRAIN_S = MAX_SCALE_DOWN_S = 86400.0
ROUTERS = {
    "balanced": None,  # Ray Serve's own: the less busy of two
    "prefix": "ray.serve.llm.request_router:PrefixCacheAffinityRouter",
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How many replicas; between `minimum` and `maximum` by the requests that each has, where these differ."""

    minimum: int = 1
    maximum: int = 1
    requests_each: int = 16  # that autoscaling aims at
    scale_down_s: float = 600.0  # this long with less load before a replica is ended: a new one takes minutes to start
    router: str = "balanced"
    drain_s: float = 600.0  # that a replica may take to answer what runs
    cpus: float = 1.0  # of each replica, as Ray counts them
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum <= MAX_REPLICAS:
            raise ValueError(
                f"--min-replicas and --max-replicas must be 1 <= min <= max <= {MAX_REPLICAS}, got {self.minimum} and "
                f"{self.maximum}"
            )
        if not 1 <= self.requests_each <= MAX_REQUESTS_EACH:
            raise ValueError(f"--requests-each must be in 1..{MAX_REQUESTS_EACH}, got {self.requests_each}")
        if not 0 < self.scale_down_s <= MAX_SCALE_DOWN_S:
            raise ValueError(
                f"--scale-down-seconds must be above 0 and at most {MAX_SCALE_DOWN_S:g} (a day), got "
                f"{self.scale_down_s:g}"
            )
        if not 0 < self.drain_s <= MAX_DRAIN_S:
            raise ValueError(
                f"--drain-seconds must be above 0 and at most {MAX_DRAIN_S:g} (a day), got {self.drain_s:g}"
            )
        if self.router not in ROUTERS:
            raise ValueError(f"--router must be one of {', '.join(ROUTERS)}, got {self.router!r}")

    @property
    def actor_options(self) -> dict[str, Any]:
        """Ray's options for the actor of a replica, and of the canary."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}

    @property
    def described(self) -> str:
        count = f"{self.minimum}" if self.minimum == self.maximum else f"{self.minimum} to {self.maximum}"
        return f"{count} replica(s), router {self.router}, {self.drain_s:g} s to answer what runs"
