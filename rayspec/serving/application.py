"""The applications of Ray Serve: an ingress, and the replicas behind it, which a roll-over replaces without it."""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import EncodingType, LoggingConfig

from rayspec.serving.ingress import DEPLOYMENT, Ingress
from rayspec.serving.replica import Replica
from rayspec.serving.scale import MAX_ONGOING, ROUTERS, Scale
from rayspec.serving.version import ServedVersion
from sglang_ext.adapter.http_app import DEFAULT_MIB

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 40.0
PREFIX_OPTIONS = {"imbalanced_threshold": 16, "do_eviction": True}


class Server(Replica):
    """A replica of Ray Serve, which calls `__del__` once what runs has ended."""

    def __del__(self) -> None:
        if hasattr(self, "server"):
            self.stop()


def ray_logging(log_format: str) -> LoggingConfig | None:
    """Settings of Ray Serve's own log files; None for what the cluster says."""
    return LoggingConfig(encoding=EncodingType.JSON) if log_format == "json" else None


def ingress_application(
    log_format: str = "text",
    max_body_mib: int = DEFAULT_MIB,
    router: str = Scale.router,
    drain_s: float = Scale.drain_s,
) -> serve.Application:
    """What listens. It waits as long for what runs as the replicas do."""
    return (
        serve.deployment(Ingress)
        .options(
            max_ongoing_requests=MAX_ONGOING,
            ray_actor_options={"num_cpus": 0},
            graceful_shutdown_timeout_s=drain_s,
            logging_config=ray_logging(log_format),
        )
        .bind(max_body_mib, ROUTERS[router] is not None)
    )


def server_application(version: ServedVersion, scale: Scale, board: Any) -> serve.Application:
    """New replicas start beside the old ones, which stay until these are ready and then end what they answer."""
    count: dict[str, Any] = {"num_replicas": scale.minimum}
    if scale.maximum > scale.minimum:
        # no `initial_replicas`: Ray Serve would take a roll-over for a beginning, and go down to them under full load
        count = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scale.minimum,
                max_replicas=scale.maximum,
                target_ongoing_requests=scale.requests_each,
                downscale_delay_s=scale.scale_down_s,
            )
        }
    router = ROUTERS[scale.router]
    if router is not None:
        count["request_router_config"] = RequestRouterConfig(
            request_router_class=router, request_router_kwargs=PREFIX_OPTIONS
        )
    return (
        serve.deployment(Server)
        .options(
            name=DEPLOYMENT,
            **count,
            ray_actor_options=scale.actor_options,
            max_ongoing_requests=MAX_ONGOING,
            max_surge_percent=100,
            graceful_shutdown_timeout_s=scale.drain_s,
            graceful_shutdown_wait_loop_s=1.0,
            health_check_period_s=HEALTH_PERIOD_S,
            health_check_timeout_s=HEALTH_TIMEOUT_S,
            max_constructor_retry_count=2,
            logging_config=ray_logging(version.log_format),
        )
        .bind(version, board)
    )
