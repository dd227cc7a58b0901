"""How many replicas serve, and how requests find one."""

from dataclasses import dataclass
from typing import Any

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
    router: str = "balanced"
    drain_s: float = 600.0  # that a replica may take to answer what runs
    cpus: float = 1.0  # of each replica, as Ray counts them
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.minimum < 1 or self.maximum < self.minimum:
            raise ValueError(
                f"--min-replicas and --max-replicas must be 1 <= min <= max, got {self.minimum} and {self.maximum}"
            )
        if self.requests_each < 1:
            raise ValueError(f"--requests-each must be at least 1, got {self.requests_each}")
        if self.drain_s <= 0:
            raise ValueError(f"--drain-seconds must be above 0, got {self.drain_s:g}")
        if self.router not in ROUTERS:
            raise ValueError(f"--router must be one of {', '.join(ROUTERS)}, got {self.router!r}")

    @property
    def actor_options(self) -> dict[str, Any]:
        """Of a replica, and of the canary."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}

    @property
    def described(self) -> str:
        count = f"{self.minimum}" if self.minimum == self.maximum else f"{self.minimum} to {self.maximum}"
        return f"{count} replica(s), router {self.router}, {self.drain_s:g} s to answer what runs"
