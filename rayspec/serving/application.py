"""The applications of Ray Serve: an ingress, and the replicas behind it, which a roll-over replaces without it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rayspec.serving.relay import (
    RETRY_AFTER_S,
    Gone,
    Head,
    Passed,
    Taken,
    error_body,
    error_event,
    passed_on,
    prompt_of,
)
from rayspec.serving.replica import Replica, ServedVersion
from rayspec.serving.scale import ROUTERS, Scale

INGRESS, SERVERS = "rayspec-ingress", "rayspec-champion"  # applications
DEPLOYMENT = "Server"
MAX_ONGOING = 2048  # of a replica; SGLang queues by itself
MAX_BODY_BYTES = 32 * 2**20
TAKE_TIMEOUT_S = 15.0  # until some replica has a request
ATTEMPTS = 3
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 40.0
PREFIX_OPTIONS = {"imbalanced_threshold": 16, "do_eviction": True}


class Server(Replica):
    """A replica of Ray Serve, which calls `__del__` once what runs has ended."""

    def __del__(self) -> None:
        if hasattr(self, "server"):
            self.stop()


def unavailable(reason: str) -> Response:
    return JSONResponse(error_body(reason), 503, {"Retry-After": str(RETRY_AFTER_S)})


class Ingress:
    """Hands every request on to a replica, and turns the death of one into an answer that a client can act on."""

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        if len(body) > MAX_BODY_BYTES:
            return JSONResponse(
                {"error": {"message": f"a request may have {MAX_BODY_BYTES} bytes", "type": "invalid_request_error"}},
                413,
            )
        query = f"?{request.url.query}" if request.url.query else ""
        passed = Passed(
            method=request.method,
            path=f"{request.url.path}{query}",
            headers=passed_on(request.headers.items()),
            body=body,
            prompt=prompt_of(body),
        )
        reason = "no replica"
        for _ in range(ATTEMPTS):
            answer = await self._asked(passed)
            if isinstance(answer, Response):
                return answer
            reason = answer
        return unavailable(reason)

    async def _asked(self, passed: Passed) -> Response | str:
        """What a replica answers, or why none has begun to."""
        handle = serve.get_deployment_handle(DEPLOYMENT, SERVERS).options(stream=True)
        messages = handle.relay.remote(passed)
        rest = aiter(messages)
        try:
            taken = await asyncio.wait_for(anext(rest), TAKE_TIMEOUT_S)
            assert isinstance(taken, Taken), "a replica begins with it"
            head = await anext(rest)
        except TimeoutError:
            messages.cancel()
            return unavailable(f"no replica took the request within {TAKE_TIMEOUT_S:g} s; send it again")
        except (RayError, RayServeException) as error:
            return f"the replica has ended ({type(error).__name__}); send the request again"
        if isinstance(head, Gone):
            return head.reason
        assert isinstance(head, Head), "the answer begins with it"
        response = StreamingResponse(_body(rest, head), head.status)
        response.raw_headers = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in head.headers]
        return response


async def _body(messages: AsyncIterator[bytes], head: Head) -> AsyncIterator[bytes]:
    try:
        async for part in messages:
            yield part
    except (RayError, RayServeException) as error:
        if not head.streams:
            raise
        yield error_event(f"the replica has ended ({type(error).__name__}); send the request again")


def ingress_application() -> serve.Application:
    return (
        serve.deployment(Ingress)
        .options(
            max_ongoing_requests=MAX_ONGOING,
            ray_actor_options={"num_cpus": 0},
            graceful_shutdown_timeout_s=600.0,
        )
        .bind()
    )


def server_application(version: ServedVersion, scale: Scale, board: Any) -> serve.Application:
    """New replicas start beside the old ones, which stay until these are ready and then end what they answer."""
    count: dict[str, Any] = {"num_replicas": scale.minimum}
    if scale.maximum > scale.minimum:
        count = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scale.minimum,
                max_replicas=scale.maximum,
                initial_replicas=scale.minimum,
                target_ongoing_requests=scale.requests_each,
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
        )
        .bind(version, board)
    )
