"""The target's answers from SGLang engines on Ray: the requests of a batch are spread over all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayspec.training.data.answers import Answerer, Request
from sglang_ext.settings import Settings


@dataclass(frozen=True, kw_only=True)
class AnswerEnginesConfig(Settings):
    """The plain engines that answer. None leaves the choice to SGLang or to the platform."""

    count: int = 1  # engines
    num_cpus: float = 1.0  # that Ray reserves for each
    num_gpus: float = 0.0
    num_threads: int | None = None  # CPU threads of each; None: every core of its machine
    dtype: str | None = "bfloat16"
    max_running_requests: int = 128
    start_timeout_s: float = 1200.0
    batch_timeout_s: float = 7200.0
    extra: dict[str, Any] = field(default_factory=dict)  # any other field of SGLang's ServerArgs

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"engines.count must be at least 1, got {self.count}")
        for name in ("start_timeout_s", "batch_timeout_s", "num_cpus"):
            if getattr(self, name) <= 0:
                raise ValueError(f"engines.{name} must be above 0, got {getattr(self, name)}")
        if self.num_gpus < 0:
            raise ValueError(f"engines.num_gpus must be at least 0, got {self.num_gpus}")
        if self.num_threads is not None and self.num_threads < 1:
            raise ValueError(f"engines.num_threads must be at least 1, got {self.num_threads}")
        if self.max_running_requests < 1:
            raise ValueError(f"engines.max_running_requests must be at least 1, got {self.max_running_requests}")


@contextlib.contextmanager
def answer_engines(
    config: AnswerEnginesConfig, target: str, longest: int, stop_ids: Sequence[int], log_folder: Path, seed: int
) -> Iterator[Answerer]:
    """Engines of the target folder, ended with the block. `longest`: tokens of prompt and answer; `seed`: of what is
    drawn, another one for each start. Raises EngineFailed from whatever is called."""
    from rayspec.farm.actor import RuntimeHandle, cluster  # Ray takes a second
    from rayspec.farm.runtime import EngineSpec

    overrides = {
        "max_running_requests": config.max_running_requests,
        "max_total_tokens": config.max_running_requests * longest,
        "context_length": longest + 8,
        **({} if config.dtype is None else {"dtype": config.dtype}),
        **config.extra,
    }
    specs = [
        EngineSpec(target=target, num_threads=config.num_threads, overrides={**overrides, "random_seed": seed + n})
        for n in range(config.count)
    ]
    with cluster(None, min_cpus=config.count * config.num_cpus), contextlib.ExitStack() as stack:
        handles = [
            RuntimeHandle(
                spec,
                log_folder / f"answers-{n}.log",
                num_cpus=config.num_cpus,
                num_gpus=config.num_gpus,
                block_timeout_s=config.batch_timeout_s,
            )
            for n, spec in enumerate(specs)
        ]
        for handle in handles:
            stack.callback(handle.stop)
        starts = [handle.begin_start() for handle in handles]
        for handle, start in zip(handles, starts, strict=True):
            handle.finish_start(start, config.start_timeout_s)

        def answer(requests: Sequence[Request]) -> list[list[int]]:
            parts = [requests[n :: len(handles)] for n in range(len(handles))]
            begun = [
                h.begin_generate([list(r.prompt_ids) for r in part], [sampling_params(r, stop_ids) for r in part])
                for h, part in zip(handles, parts, strict=True)
            ]
            answers: list[list[int]] = [[] for _ in requests]
            for n, (handle, ref) in enumerate(zip(handles, begun, strict=True)):
                answers[n :: len(handles)] = [g.output_ids for g in handle.finish_generate(ref)]
            return answers

        yield answer


def sampling_params(request: Request, stop_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "temperature": request.temperature,
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": [*stop_ids, *request.stop_ids],
        "skip_special_tokens": False,
    }
