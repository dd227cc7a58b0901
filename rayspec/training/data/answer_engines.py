"""SGLang engines on Ray that answer, each piece of work by one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.settings import Settings, require

if TYPE_CHECKING:
    from rayspec.farm.actor import RuntimeHandle
    from rayspec.training.data.engine_pool import EnginePool


MAX_ENGINES = 1000


@dataclass(frozen=True, kw_only=True)
class AnswerEnginesConfig(Settings):
    """The plain engines that answer.

    `dtype`: None takes bfloat16 where engines have GPUs or this machine's processor has instructions for it, else
    float32 ("auto" leaves it to SGLang).
    """

    count: int = 1  # engines
    num_cpus: float = 1.0  # that Ray reserves for each
    num_gpus: float = 0.0
    num_threads: int | None = None  # CPU threads of each; None: every core of its machine
    dtype: str | None = None
    max_running_requests: int = 128
    start_timeout_s: float = 1200.0
    batch_timeout_s: float = 7200.0
    restarts: int = 3  # of an engine that died; one that dies more often is left out
    extra: dict[str, Any] = field(default_factory=dict)  # any other field of SGLang's ServerArgs

    def __post_init__(self) -> None:
        is_count = 1 <= self.count <= MAX_ENGINES
        require(is_count, "engines.count", self.count, f"at least 1 and at most {MAX_ENGINES}")
        for name in ("start_timeout_s", "batch_timeout_s", "num_cpus"):
            require(getattr(self, name) > 0, f"engines.{name}", getattr(self, name), "above 0")
        require(self.restarts >= 0, "engines.restarts", self.restarts, "at least 0 (none)")
        require(self.num_gpus >= 0, "engines.num_gpus", self.num_gpus, "at least 0")
        is_threads = self.num_threads is None or self.num_threads >= 1
        require(is_threads, "engines.num_threads", self.num_threads, "at least 1")
        is_batch = self.max_running_requests >= 1
        require(is_batch, "engines.max_running_requests", self.max_running_requests, "at least 1")


def _dtype(*, on_gpu: bool) -> str:
    import torch  # with the next one, seconds

    from rayspec.training.precision import fast_dtype

    return str(fast_dtype(torch.device("cuda" if on_gpu else "cpu"))).removeprefix("torch.")


@contextlib.contextmanager
def answer_engines(
    config: AnswerEnginesConfig, target: str, longest: int, stop_ids: Sequence[int], log_folder: Path, seed: int
) -> Iterator[EnginePool]:
    """Engines of the target folder, one of them up, all ended with the block. `longest`: tokens of prompt and answer;
    `seed`: of what is drawn by engines that take no seed of a request, another one for each start. Raises EngineFailed
    from whatever is called."""
    import ray  # takes a second

    from rayspec.farm.actor import RuntimeHandle, cluster
    from rayspec.farm.runtime import EngineSpec
    from rayspec.training.data.engine_pool import EnginePool

    overrides = {
        "max_running_requests": config.max_running_requests,
        "max_total_tokens": config.max_running_requests * longest,
        "context_length": longest + 8,
        "dtype": config.dtype or _dtype(on_gpu=config.num_gpus > 0),
        **config.extra,
    }

    def make(place: int, start: int) -> RuntimeHandle:
        own_seed = {"random_seed": seed + place + start * config.count}
        return RuntimeHandle(
            EngineSpec(target=target, num_threads=config.num_threads, overrides={**overrides, **own_seed}),
            log_folder / (f"answers-{place}.log" if start == 0 else f"answers-{place}.restart-{start}.log"),
            num_cpus=config.num_cpus,
            num_gpus=config.num_gpus,
            block_timeout_s=config.batch_timeout_s,
        )

    def wait(refs: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        return ray.wait(list(refs), num_returns=1, timeout=timeout_s)[0]

    pool = EnginePool(
        config.count,
        make,
        wait,
        stop_ids=stop_ids,
        restarts=config.restarts,
        start_timeout_s=config.start_timeout_s,
        batch_timeout_s=config.batch_timeout_s,
    )
    with cluster(None, min_cpus=config.count * config.num_cpus):
        try:
            pool.start()
            yield pool
        except BaseException:
            pool.kill()
            raise
        pool.stop()
