"""The ingress: hands every request on to a replica. Imports little, so that its process stays small."""

import asyncio
from collections.abc import AsyncIterator

import ray
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from rayspec.serving.relay import (
    RETRY_AFTER_S,
    Passed,
    ReplicaGone,
    ResponseHead,
    Taken,
    body_of,
    error_body,
    error_event,
    passed_on,
    path_of,
    prompt_of,
)
from rayspec.serving.scrape import merged, rollovers

SERVERS, DEPLOYMENT = "rayspec-champion", "Server"  # application and deployment of the replicas
BOARD, NAMESPACE = "rayspec-board", "rayspec"  # of the actor (board.py) that the command on the cluster holds
TAKE_TIMEOUT_S = 15.0  # until some replica has a request
BOARD_TIMEOUT_S = 2.0
# before the second and the third try: a replica whose server died takes requests until it has ended itself
PAUSES_S = (0.7, 1.4)
METRICS = ("/metrics", "/metrics/")
MAY_END = 2  # so many servers may end while they have a request, then no other gets it, as it may be why they end
SUSPECT = f"{MAY_END} servers ended while they had this request, which may be why; it was not sent to another"


def unavailable(reason: str) -> Response:
    return JSONResponse(error_body(reason), 503, {"Retry-After": str(RETRY_AFTER_S)})


def suspect() -> Response:
    return JSONResponse(error_body(SUSPECT), 503, {"x-should-retry": "false"})  # which OpenAI's client goes by


class Ingress:
    """Hands every request on to a replica, and turns the death of one into an answer that a client can act on.
    `max_body_mib`: larger requests are refused; 0: none is. `reads_prompts`: for a router that goes by them; without, a
    body is not looked into before the server has seen its key."""

    def __init__(self, max_body_mib: int, reads_prompts: bool) -> None:
        self._max_body_mib, self._reads_prompts = max_body_mib, reads_prompts

    async def __call__(self, request: Request) -> Response:
        announced = request.headers.get("content-length", "")
        try:
            body = await body_of(request.stream(), self._max_body_mib * 2**20, announced)
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        if body is None:
            return JSONResponse(
                {
                    "error": {
                        "message": f"the body of the request is larger than {self._max_body_mib} MiB, the most that "
                        "this server takes",
                        "type": "invalid_request_error",
                    }
                },
                413,
                {"Connection": "close"},
            )
        path = request.scope["path"]
        if request.method == "GET" and path in METRICS:
            return await self._metrics()
        passed = Passed(
            method=request.method,
            path=path_of(request.scope),
            headers=passed_on(request.headers.items()),
            body=body,
            # Ray's prefix tree fails on empty text
            prompt=(prompt_of(body) if self._reads_prompts else "") or path,
        )
        reason, ended = "no replica", 0
        for pause_s in (0.0, *PAUSES_S):  # a client that leaves cancels this, and with it the tries
            await asyncio.sleep(pause_s)
            answer = await self._asked(passed)
            if isinstance(answer, Response):
                return answer
            reason, ended = answer.reason, ended + answer.was_read
            if ended == MAY_END:
                return suspect()
        return unavailable(reason)

    async def _metrics(self) -> Response:
        """The counters of all replicas in one answer."""
        asked = serve.get_deployment_handle(DEPLOYMENT, SERVERS).broadcast("metrics")
        try:
            found = await asked.results_async(timeout_s=TAKE_TIMEOUT_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            return unavailable(f"the replicas do not tell their counters ({type(error).__name__})")
        told = [answer for answer in found if not isinstance(answer, BaseException)]
        if not told:
            return unavailable("no replica tells its counters")
        others = await _rollovers()
        return Response(await asyncio.to_thread(merged, told, *others), media_type=CONTENT_TYPE_LATEST)

    async def _asked(self, passed: Passed) -> Response | ReplicaGone:
        """What a replica answers, or why none has begun to."""
        handle = serve.get_deployment_handle(DEPLOYMENT, SERVERS).options(stream=True)
        messages = handle.relay.remote(passed)
        rest = aiter(messages)
        taken = None
        try:
            async with asyncio.timeout(TAKE_TIMEOUT_S):  # Python 3.11's wait_for may lose that the client has left
                taken = await anext(rest)
            assert isinstance(taken, Taken), "a replica begins with it"
            head = await anext(rest)
            is_whole = isinstance(head, ResponseHead) and not head.streams
            body = b"".join([part async for part in rest]) if is_whole else None  # before it, it can become a 503
        except TimeoutError:
            messages.cancel()
            return unavailable(f"no replica took the request within {TAKE_TIMEOUT_S:g} s; send it again")
        except (RayError, RayServeException) as error:
            said = f"the replica has ended ({type(error).__name__}); send the request again"
            return ReplicaGone(reason=said, was_read=taken is not None)
        if isinstance(head, ReplicaGone):
            return head
        assert isinstance(head, ResponseHead), "the answer begins with it"
        response = StreamingResponse(_events(rest), head.status) if body is None else Response(body, head.status)
        response.raw_headers = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in head.headers]
        return response


async def _rollovers() -> list[Metric]:
    """Nothing where no command holds the board, as under `serve deploy`."""
    try:
        async with asyncio.timeout(BOARD_TIMEOUT_S):
            board = await asyncio.to_thread(ray.get_actor, BOARD, NAMESPACE)  # it waits for Ray
            return [rollovers(await board.events.remote())]
    except (ValueError, RayError, TimeoutError):
        return []


async def _events(messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for part in messages:
            yield part
    except (RayError, RayServeException) as error:
        yield error_event(f"the replica has ended ({type(error).__name__}); send the request again")
