"""SGLang engines on Ray that answer, each piece of work by one of them."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayspec.farm.gpu_share import equal_share, memory_fraction, one_gpu_each
from sglang_ext.settings import Settings, require

if TYPE_CHECKING:
    from rayspec.farm.actor import RuntimeHandle
    from rayspec.training.data.engine_pool import EnginePool


MAX_ENGINES = 1000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AnswerEnginesConfig(Settings):
    """The plain engines that answer.

    `dtype`: None takes bfloat16 where engines have GPUs, as those have that reserve none but find one, or this
    machine's processor has instructions for it, else float32 ("auto" leaves it to SGLang).
    """

    count: int = 1  # engines
    num_cpus: float = 1.0  # that Ray reserves for each
    # the same; below 1 as many engines share a GPU as fit, one starting after the other; None: extra.tp_size, or one,
    # where the cluster has any
    num_gpus: float | None = None
    num_threads: int | None = None  # CPU threads of each; None: every core of its machine
    dtype: str | None = None
    max_running_requests: int = 128
    start_timeout_s: float = 1200.0
    batch_timeout_s: float = 7200.0
    restarts: int = 3  # of an engine that died; one that dies more often is left out
    # any other field of SGLang's ServerArgs; of engines that share a GPU, mem_fraction_static is each one's share of it
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        is_count = 1 <= self.count <= MAX_ENGINES
        require(is_count, "engines.count", self.count, f"at least 1 and at most {MAX_ENGINES}")
        for name in ("start_timeout_s", "batch_timeout_s", "num_cpus"):
            require(getattr(self, name) > 0, f"engines.{name}", getattr(self, name), "above 0")
        require(self.restarts >= 0, "engines.restarts", self.restarts, "at least 0 (none)")
        require(self.num_gpus is None or self.num_gpus >= 0, "engines.num_gpus", self.num_gpus, "at least 0")
        is_threads = self.num_threads is None or self.num_threads >= 1
        require(is_threads, "engines.num_threads", self.num_threads, "at least 1")
        is_batch = self.max_running_requests >= 1
        require(is_batch, "engines.max_running_requests", self.max_running_requests, "at least 1")
        share, allowed = self.extra.get("mem_fraction_static"), f"below 1/{self.per_gpu}, the share of each of "
        allowed += f"{self.per_gpu} engines on a GPU (or raise engines.num_gpus, so that fewer share one)"
        is_share = isinstance(share, int | float) and 0 < share < 1 / self.per_gpu
        fits = self.per_gpu == 1 or share is None or is_share
        require(fits, "engines.extra.mem_fraction_static", share, allowed)

    @property
    def per_gpu(self) -> int:
        """Engines that share a GPU; 1 where none do."""
        if self.num_gpus is None or not 0 < self.num_gpus < 1:
            return 1
        return math.floor(min(self.count, 1 / self.num_gpus + 1e-6))

    def gpus_each(self, gpus_of_nodes: Sequence[float]) -> float:
        """What an engine reserves on a cluster whose nodes have so many."""
        if self.num_gpus is not None:
            return self.num_gpus
        return float(self.extra.get("tp_size", 1)) if any(gpus_of_nodes) else 0.0

    def memory(self, beside: int) -> dict[str, float]:
        """SGLang's `mem_fraction_static` of an engine beside so many others on its GPU."""
        if self.per_gpu == 1:
            return {}
        return memory_fraction(self.extra.get("mem_fraction_static") or equal_share(self.per_gpu), beside)

    def bundles(self) -> list[dict[str, float]]:
        """What is reserved for the engines of each GPU that several share."""
        if self.num_gpus is None or self.per_gpu == 1:
            return []
        engines = [min(self.per_gpu, self.count - n) for n in range(0, self.count, self.per_gpu)]
        return [{"CPU": n * self.num_cpus, "GPU": min(1.0, n * self.num_gpus)} for n in engines]


def _dtype(num_gpus: float) -> str:
    """Of engines that reserve so many GPUs; Ray does not hide those of its machine from one that reserves none."""
    import torch  # with the next one, seconds

    from rayspec.training.precision import fast_dtype

    on_gpu = num_gpus > 0 or torch.cuda.is_available()
    return str(fast_dtype(torch.device("cuda" if on_gpu else "cpu"))).removeprefix("torch.")


def _warn_of_wait(count: int, num_gpus: float, gpus_of_nodes: Sequence[float]) -> None:
    """A cluster may still grow, so that what is missing is no error."""
    room = sum(int(gpus // num_gpus) for gpus in gpus_of_nodes) if num_gpus >= 1 else count
    if room < count:
        logger.warning(
            "engines.count=%d of engines.num_gpus=%g each, but the Ray cluster has GPUs for %d now; engines that find "
            "none within engines.start_timeout_s are left out; lower engines.count",
            count,
            num_gpus,
            room,
        )


@contextlib.contextmanager
def answer_engines(
    config: AnswerEnginesConfig, target: str, longest: int, stop_ids: Sequence[int], log_folder: Path, seed: int
) -> Iterator[EnginePool]:
    """Engines of the target folder, one of them up, all ended with the block. `longest`: tokens of prompt and answer;
    `seed`: of what is drawn by engines that take no seed of a request, another one for each start. Raises EngineFailed
    from whatever is called."""
    import ray  # takes a second

    from rayspec.farm.actor import RuntimeHandle, cluster, node_gpus
    from rayspec.farm.runtime import EngineSpec
    from rayspec.training.data.engine_pool import EnginePool

    def wait(refs: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        return ray.wait(list(refs), num_returns=1, timeout=timeout_s)[0]

    # `places`: of the engines that share a GPU
    with cluster(None, min_cpus=config.count * config.num_cpus), one_gpu_each(config.bundles()) as places:
        num_gpus = config.gpus_each(node_gpus())
        _warn_of_wait(config.count, num_gpus, node_gpus())
        overrides = {
            "max_running_requests": config.max_running_requests,
            "max_total_tokens": config.max_running_requests * longest,
            "context_length": longest + 8,
            "dtype": config.dtype or _dtype(num_gpus),
            **config.extra,
        }

        def make(place: int, start: int, beside: int) -> RuntimeHandle:
            own = {"random_seed": seed + place + start * config.count, **config.memory(beside)}
            return RuntimeHandle(
                EngineSpec(target=target, num_threads=config.num_threads, overrides={**overrides, **own}),
                log_folder / (f"answers-{place}.log" if start == 0 else f"answers-{place}.restart-{start}.log"),
                num_cpus=config.num_cpus,
                num_gpus=num_gpus,
                block_timeout_s=config.batch_timeout_s,
                place=places[place // config.per_gpu] if places else None,
            )

        pool = EnginePool(
            config.count,
            make,
            wait,
            stop_ids=stop_ids,
            restarts=config.restarts,
            start_timeout_s=config.start_timeout_s,
            batch_timeout_s=config.batch_timeout_s,
            per_gpu=config.per_gpu,
        )
        try:
            pool.start()
            yield pool
        except BaseException:
            pool.kill()
            raise
        pool.stop()
