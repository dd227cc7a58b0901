"""The Ray shell around a Runtime: reach a cluster, start an engine's actor, call it, and be sure that it is gone."""

import contextlib
import gc
import logging
import math
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when ray starts
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # an actor without GPU keeps the node's setting

import psutil
import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayspec.farm.lifeline import node_lost_raises
from rayspec.farm.load import Load
from rayspec.farm.processes import end_processes, environment
from rayspec.farm.runtime import EngineDied, EngineFailed, EngineSpec, Runtime
from rayspec.messages import first_line, log_tail
from rayspec.provenance import machine
from rayspec.records import Generated, Measured
from sglang_ext.drafters.counting import StepShape

STOP_TIMEOUT_S = 90.0
TOKEN = secrets.token_hex(32)  # one for all clusters of a process: Ray keeps the first that it has read
LOCAL_OBJECT_STORE_BYTES = 128 * 2**20  # records are small; Ray would take a third of the memory


@contextlib.contextmanager
def cluster(address: str | None, min_cpus: float = 0) -> Iterator[None]:
    """Connect to `address`, or to the cluster of RAY_ADDRESS, or start Ray on this machine; leave it at the end.

    A cluster of our own counts at least `min_cpus`: a reservation orders who is started, it limits nobody. Raises
    TimeoutError where it does not start in Ray's time.
    """
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "rayspec"}
    on_terminate = signal.getsignal(signal.SIGTERM)
    with contextlib.ExitStack() as stack:
        if address or os.environ.get("RAY_ADDRESS"):
            ray.init(address=address, **options)
        else:
            stack.enter_context(_private_token())
            stack.enter_context(_loopback_only())
            _start(max(len(os.sched_getaffinity(0)), math.ceil(min_cpus)), options)
        stack.callback(_shut_down)
        # Ray puts an own handler there that aborts the process: no run would be ended, no engine stopped
        signal.signal(signal.SIGTERM, on_terminate)
        stack.enter_context(node_lost_raises())
        yield


def _start(num_cpus: int, options: dict[str, Any]) -> None:
    """Ray on this machine."""
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=num_cpus,
            object_store_memory=LOCAL_OBJECT_STORE_BYTES,
            # Ray gives its workers a priority so low that a measurement would be one of whatever else runs, and starts
            # some that wait for work without an environment of its own, which engines have
            _system_config={"worker_niceness": 0, "prestart_worker_first_driver": False},
            **options,
        )
    except Exception as error:
        if type(error) is not Exception or "timed out during startup" not in str(error):  # Ray has no class for it
            raise
        raise TimeoutError(
            "Ray did not start on this machine in half a minute, as happens where other work has all cores; run the "
            "same command again when there is less (rayspec sweep --resume goes on with a sweep)"
        ) from error


def _shut_down() -> None:
    """Leave the cluster. A reference to a Ray object that another thread frees meanwhile would end this process, from
    C++; so those that wait for the garbage collector go before, and none is collected until Ray is down."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Let Ray's servers listen on the loopback address alone, as they do on systems where Ray has no clusters.

    Otherwise they listen on all interfaces; 127.0.0.1 as the node's address is replaced by one that others reach.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # for this process, where Ray has read the variable already
    try:
        with environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _private_token() -> Iterator[None]:
    """A token for our local clusters alone, unless the user has chosen one.

    Otherwise Ray leaves one in ~/.ray/auth_token, and then every `ray start` and `ray job submit` of the user asks for
    it. Ray sets the mode for good, which the next cluster of this process would take as the user's choice.
    """
    if any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        yield
        return
    try:
        with environment({"RAY_AUTH_TOKEN": TOKEN}):
            yield
    finally:
        os.environ.pop("RAY_AUTH_MODE", None)


def _bundle(number: int) -> PlacementGroupSchedulingStrategy:
    """A place in the placement group that this process runs in."""
    group = ray.util.get_current_placement_group()
    assert group is not None, "an engine of several nodes is started in a placement group with a bundle for each"
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)


def node_gpus() -> list[float]:
    """GPUs of each node of the connected cluster."""
    return [float(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]


class _RuntimeShell:
    """What runs in the actor: a Runtime, and what the driver needs to know about its process and machine."""

    def __init__(self, spec: EngineSpec, log_path: str) -> None:
        self.runtime = Runtime(spec, log_path)

    def process(self) -> tuple[str, int]:
        return socket.gethostname(), os.getpid()

    def address(self) -> str:
        """host:port where the nodes of an engine can meet."""
        with socket.socket() as s:
            s.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"

    def start(self, node: int = 0, address: str | None = None) -> dict[str, Any]:
        try:
            seconds = self.runtime.start(node, address)
        except BaseException:
            self.runtime.stop()
            raise
        served = {"engine.threads": str(self.runtime.num_threads), "engine.dtype": self.runtime.dtype_name}
        return {"start_s": seconds, "machine": {**machine(), **served}}

    def swap(self, drafter: str) -> None:
        self.runtime.swap(drafter)

    def warm_up(self, load: Load) -> None:
        self.runtime.warm_up(load)

    def measure(self, load: Load) -> Measured:
        return self.runtime.measure(load)

    def generate(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[Generated]:
        return self.runtime.generate(prompts, sampling)

    def head_latencies(self, drafters: dict[str, str], requests: int, shape: StepShape) -> dict[str, float]:
        return self.runtime.head_latencies(drafters, requests, shape)

    def follow(self, node: int, address: str) -> None:
        """Hold the ranks of a node beside the first; returns, or raises, once they are gone."""
        self.start(node, address)
        self.runtime.wait_for_death()

    def stop(self) -> None:
        self.runtime.stop()


class RuntimeHandle:
    """One engine in its actor. Every method raises EngineFailed with the cause, and in time: a hang ends the actor.

    An engine of several nodes has an actor on each, in the bundle of its number of the placement group that its caller
    runs in. Requests go to the first; the others hold ranks, and the death of one is the engine's.

    After EngineDied `is_alive` is False and the handle is of no more use.
    """

    def __init__(
        self,
        spec: EngineSpec,
        log_path: Path,
        *,
        num_cpus: float,
        num_gpus: float,
        block_timeout_s: float,
        place: PlacementGroupSchedulingStrategy | None = None,
    ) -> None:
        """`place`: of an engine on one node; None leaves it to Ray, or to the placement group of the caller."""
        from sglang_ext.adapter.engine import engine_environment

        self.spec = spec
        self.log_path = log_path
        self.block_timeout_s = block_timeout_s
        self.is_alive = True
        # Threads that spin at OpenMP's barriers starve the other engine. The CPU platform gives SGLang the same
        # setting, but torch is loaded in this actor before.
        env_vars = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"), **engine_environment()}
        actor: Any = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0)(_RuntimeShell)
        logs = [log_path, *(log_path.with_suffix(f".node{n}.log") for n in range(1, spec.nodes))]
        places = [_bundle(n) for n in range(spec.nodes)] if spec.nodes > 1 else [place]
        self._actors = [
            actor.options(runtime_env={"env_vars": env_vars}, scheduling_strategy=place).remote(spec, str(log))
            for place, log in zip(places, logs, strict=True)
        ]
        self._actor = self._actors[0]
        self._processes = [a.process.remote() for a in self._actors]  # answered once they are up, before any start
        self._followers: list[ray.ObjectRef] = []  # ready when a node beside the first has lost its ranks

    def begin_start(self) -> ray.ObjectRef:
        """Start the engine without waiting, so that several can start at once; pass the result to `finish_start`."""
        if self.spec.nodes == 1:
            return self._actor.start.remote()
        address = self._actor.address.remote()
        self._followers = [actor.follow.remote(n, address) for n, actor in enumerate(self._actors[1:], start=1)]
        return self._actor.start.remote(0, address)

    def finish_start(self, ref: ray.ObjectRef, timeout_s: float) -> dict[str, Any]:
        """Wait until the engine is up: {start_s, machine}."""
        return self._get(ref, timeout_s, "engine.start_timeout_s")

    def swap(self, drafter: str) -> None:
        self._get(self._actor.swap.remote(drafter), self.block_timeout_s, "engine.block_timeout_s")

    def warm_up(self, load: Load) -> None:
        self._get(self._actor.warm_up.remote(load), self.block_timeout_s, "engine.block_timeout_s")

    def measure(self, load: Load) -> Measured:
        return self._get(self._actor.measure.remote(load), self.block_timeout_s, "engine.block_timeout_s")

    def generate(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[Generated]:
        """The continuation of each prompt (token ids) under its own sampling parameters."""
        return self.finish_generate(self.begin_generate(prompts, sampling))

    def begin_generate(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> ray.ObjectRef:
        """`generate` without waiting, so that several engines work at once; pass the result to `finish_generate`."""
        return self._actor.generate.remote(prompts, sampling)

    def finish_generate(self, ref: ray.ObjectRef) -> list[Generated]:
        return self._get(ref, self.block_timeout_s, "engine.block_timeout_s")

    def head_latencies(self, drafters: dict[str, str], requests: int, shape: StepShape) -> dict[str, float]:
        ref = self._actor.head_latencies.remote(drafters, requests, shape)
        return self._get(ref, self.block_timeout_s, "engine.block_timeout_s")

    def stop(self) -> None:
        """Shut the engine down, then end its actor; never raises."""
        self._followers = []  # they end with the first
        if self.is_alive:
            with contextlib.suppress(EngineFailed):
                self._get(self._actor.stop.remote(), STOP_TIMEOUT_S, "the time to stop")
        self.kill()

    def kill(self) -> None:
        """End the actor at once, and with it the processes that it started where they run on this machine.

        The kernel ends an engine's children with their parent, but only those that have finished importing.
        """
        self.is_alive = False
        children: list[psutil.Process] = []
        up, _ = ray.wait(self._processes, num_returns=len(self._processes), timeout=0)
        for process in up:
            with contextlib.suppress(RayActorError, psutil.NoSuchProcess):
                host, pid = ray.get(process)
                if host == socket.gethostname():
                    children += psutil.Process(pid).children(recursive=True)
        for actor in self._actors:
            with contextlib.suppress(ValueError, RayActorError):
                ray.kill(actor, no_restart=True)
        end_processes(children)

    def _get(self, ref: ray.ObjectRef, timeout_s: float, setting: str) -> Any:
        try:
            done, _ = ray.wait([ref, *self._followers], timeout=timeout_s)
            if done and done[0] != ref:
                self.kill()
                ray.get(done[0])  # raises where the cause is known
                raise EngineDied(f"a process of the engine died on another of its nodes. {self._log()}")
            return ray.get(ref, timeout=0)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineDied):
                self.kill()
            raise cause if isinstance(cause, EngineFailed) else EngineFailed(str(error)) from None
        except GetTimeoutError:
            self.kill()
            raise EngineDied(
                f"the engine did not answer within {timeout_s:g} s ({setting}); it was ended. {self._log()}"
            ) from None
        except RayActorError as error:
            self.kill()
            raise EngineDied(f"the engine's process died: {first_line(error)} {self._log()}") from None

    def _log(self) -> str:
        # readable where driver and engine share the home folder, as they do on one machine
        return f"\n--- end of {self.log_path} ---\n{log_tail(self.log_path)}"
