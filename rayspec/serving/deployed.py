"""The applications of `rayspec serve` on the connected cluster: put in, replaced, ended with the command, and taken
over where a command that was killed has left them.

Whoever holds the board, an actor of a fixed name that ends with its driver, is the one `rayspec serve` of a cluster.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayspec.messages import first_line
from rayspec.serving.access import check_is_free
from rayspec.serving.application import ingress_application, ray_logging, server_application
from rayspec.serving.board import Board
from rayspec.serving.canary_actor import PLACE_TIMEOUT_S, canary_on_ray
from rayspec.serving.canary_server import check_promise
from rayspec.serving.champion import MODEL, Champion
from rayspec.serving.ingress import BOARD, DEPLOYMENT, NAMESPACE, SERVERS
from rayspec.serving.logs import adopt_loggers, log
from rayspec.serving.rollover import Postponed
from rayspec.serving.scale import Scale
from rayspec.serving.start import Find
from rayspec.serving.version import ServedVersion, Serving

STATUS_S = 1.0
HEAD = "node:__internal_head__"  # resource of Ray's head node
GONE_TIMEOUT_S = 30.0  # for Ray to see that a driver has died
LEFT_TIMEOUT_S = 60.0  # for a server to say what it serves, and for one that has not come up to end
INGRESS = "rayspec-ingress"  # application
NO_ROOM = "to be scheduled"  # of replicas that wait for resources, in Ray Serve's words
POSTPONED = f"\n{Postponed.__module__}.{Postponed.__qualname__}: "  # where a traceback names its error
REMOVE = "end what is left with `serve shutdown --yes --address http://HEAD:8265` (Ray's dashboard)"


class NoPrompt:
    """What a prefix-aware router reads of a call that no client has made."""

    prompt = "canary"


NO_PROMPT = NoPrompt()


def put_in(version: ServedVersion, scale: Scale, board: Any) -> None:
    """Ray Serve's rolling update, until all replicas are of this version. Raises ValueError where they do not start,
    Postponed where Ray has had no room for them, or a node's disk or its way to MLflow is to blame."""
    deploy(version, scale, board)
    deadline = time.monotonic() + version.start_timeout_s
    while (status := serve.status().applications.get(SERVERS)) is None or status.status != ApplicationStatus.RUNNING:
        said = (
            ""
            if status is None
            else next((d.message for d in status.deployments.values() if d.message), status.message)
        )
        if status is not None and status.status == ApplicationStatus.DEPLOY_FAILED:
            # Ray Serve tells the error of a replica as text
            _, of_its_node, why = said.partition(POSTPONED)
            raise (Postponed if of_its_node else ValueError)(
                f"the replicas of {version.name} did not start: {why.strip() or said}"
            )
        if time.monotonic() > deadline:
            late = f"the replicas of {version.name} were not up after {version.start_timeout_s:g} s"
            if NO_ROOM in said:
                raise Postponed(f"{late}, for want of room, which new ones need beside those that run: {said}")
            if POSTPONED in said:
                raise Postponed(f"{late}: {said.partition(POSTPONED)[2].strip()}")
            raise ValueError(f"{late}: {said or 'Ray Serve does not say why'}")
        time.sleep(STATUS_S)


def deploy(version: ServedVersion, scale: Scale, board: Any) -> None:
    """Begin to put it in."""
    target = serve.RunTarget(server_application(version, scale, board), name=SERVERS, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


@contextmanager
def deployed(
    champion: Champion, source: str, serving: Serving, find: Find | None = None
) -> Iterator[tuple[Any, Champion, str]]:
    """Yields the board, and which champion is under traffic as which source: `find`, where an alias is followed, checks
    the one that a killed command has left. Ends the ingress first, so that what runs is answered before the servers
    end."""
    if serving.log_format == "json":
        adopt_loggers()
    board = _only_board()  # from here on no other command changes what is found
    found = set(serve.status().applications)
    if found - {SERVERS, INGRESS}:
        raise ValueError(
            f"the cluster's Ray Serve runs {', '.join(sorted(found))}, but rayspec serve needs its address and routes "
            "for itself; end those applications, or serve on a cluster of your own (no RAY_ADDRESS)"
        )
    left = _left(source) if found else None
    if left is not None:
        champion, source = to_keep(champion, source, left, find)
    _listen(serving)
    with ExitStack() as stack:
        stack.callback(_shut_down)
        if serving.tries_first and not (source == left and MODEL.fullmatch(source)):  # which alone cannot have changed
            _try(champion, serving.version(champion, source), serving, beside_others=left is not None)
        scale = serving.scale
        # read when the end comes; of a start that fails nothing runs, and a replica that loads its model cannot end
        wait_s = scale.drain_s if found else LEFT_TIMEOUT_S
        stack.callback(lambda: _delete(SERVERS, wait_s))
        if found:
            log.info("takes over the applications of a rayspec serve that has ended")
            stack.callback(lambda: _delete(INGRESS, wait_s))
        try:
            put_in(serving.version(champion, source), scale, board)
        except Exception as error:
            if found:
                stack.pop_all()  # deletes nothing
            if not isinstance(error, (ValueError, Postponed)):
                raise
            left = f"; the replicas that were there go on, but no new ones start; {REMOVE}" if found else ""
            raise ValueError(f"{error}{left}") from error
        if not found:
            stack.callback(lambda: _delete(INGRESS, wait_s))
        ingress = ingress_application(serving.log_format, serving.access.max_body_mib, scale.router, scale.drain_s)
        serve.run(ingress, name=INGRESS, route_prefix="/")
        wait_s = scale.drain_s
        yield board, champion, source


def _try(champion: Champion, version: ServedVersion, serving: Serving, *, beside_others: bool) -> None:
    """Raises ValueError for one that may take no traffic."""
    about = {"version": version.name}
    log.info(
        "%s answers canary prompts before it takes traffic (--no-canary leaves that out)", version.name, extra=about
    )
    # alone it has room, or a node that brings it is yet to come
    place_timeout_s = PLACE_TIMEOUT_S if beside_others else version.start_timeout_s
    try:
        check_promise(champion, canary_on_ray(version, serving.scale, place_timeout_s), serving.more)
    except Postponed as error:
        raise ValueError(f"{error}; --no-canary starts without it") from error


def _only_board() -> Any:
    """A cluster has one, whose name is free once the command that made it has ended, however that was. It lies on this
    node, so that it is not lost with another. Raises ValueError while another command holds it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while True:
        try:
            options = {"name": BOARD, "namespace": NAMESPACE, "scheduling_strategy": here}
            return ray.remote(num_cpus=0)(Board).options(**options).remote()
        except ValueError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    "another rayspec serve runs on this cluster; end it first, or serve on a cluster of your own "
                    "(no RAY_ADDRESS)"
                ) from error
            time.sleep(STATUS_S)


def _left(source: str) -> str:
    """What the servers serve that a killed command has left. Raises ValueError unless it is of the same model, in any
    version."""
    try:
        handle = serve.get_deployment_handle(DEPLOYMENT, SERVERS)
        left = str(handle.source.remote(NO_PROMPT).result(timeout_s=LEFT_TIMEOUT_S))
    except (RayError, RayServeException, TimeoutError) as error:
        raise ValueError(
            "a rayspec serve that was killed has left its applications on this cluster, and no server of theirs says "
            f"within {LEFT_TIMEOUT_S:g} s what it serves ({type(error).__name__}), so they are not taken over; they "
            f"may still be starting: try again, or {REMOVE}"
        ) from error
    if _model(left) != _model(source):
        raise ValueError(
            f"a rayspec serve that was killed has left {left} under traffic on this cluster, and {source} is of "
            f"another model; {REMOVE}"
        )
    return left


def to_keep(champion: Champion, source: str, left: str, find: Find | None) -> tuple[Champion, str]:
    """The champion that is under traffic already, where an alias is followed: its next version comes after a canary.
    The one that was named where nothing is followed, or what is there may not be served any more."""
    if find is None or left == source:
        return champion, source
    try:
        return find(left), left
    except ValueError as error:
        log.warning(
            "%s is under traffic and may not be served any more: %s; %s comes in its place", left, error, source
        )
        return champion, source


def _model(source: str) -> str:
    """The registered model, whatever the version; what a folder or a run is called."""
    model = MODEL.fullmatch(source)
    return source if model is None else model["name"]


def _listen(serving: Serving) -> None:
    """Start Ray Serve's proxy. Raises ValueError where it cannot listen, or another program does: Ray's proxies share a
    port without a word, and clients would get answers of either. Also where Ray Serve was running before and listens
    elsewhere: it says so in its log alone."""
    if _get_global_client(raise_if_no_controller_running=False) is None:
        check = ray.remote(num_cpus=0, resources={HEAD: 0.001})(check_is_free)
        try:
            ray.get(check.remote(serving.host, serving.port))
        except RayTaskError as error:
            raise ValueError(str(error.cause)) from error
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": serving.host, "port": serving.port},
            logging_config=ray_logging(serving.log_format),
        )
    except (RayError, RayServeException) as error:
        cause = error.cause if isinstance(error, RayTaskError) else error  # its text begins with another's traceback
        raise ValueError(
            f"Ray Serve does not start at --host {serving.host} --port {serving.port}: {first_line(cause)}; end what "
            "listens there, or name another port"
        ) from error
    has = _get_global_client().http_config
    if (has.host, has.port) != (serving.host, serving.port):
        raise ValueError(
            f"the cluster's Ray Serve listens on {has.host}:{has.port} and cannot be moved; give --host {has.host} "
            f"--port {has.port}, or {REMOVE}"
        )


def _shut_down() -> None:
    """Unless somebody has deployed an application of theirs meanwhile."""
    if not serve.status().applications:
        serve.shutdown()


def _delete(name: str, drain_s: float) -> None:
    """End an application once it has answered what runs, for which Ray Serve's own call waits a minute and no more."""
    with suppress(RayError, RayServeException, RuntimeError):  # a cluster that is gone has nothing left
        serve.delete(name, _blocking=False)
        log.info("the application %s ends, within %g s for what it answers", name, drain_s)
        deadline = time.monotonic() + drain_s + GONE_TIMEOUT_S
        while name in serve.status().applications:
            if time.monotonic() > deadline:
                log.warning("the application %s has not ended within %g s", name, drain_s + GONE_TIMEOUT_S)
                return
            time.sleep(STATUS_S)
