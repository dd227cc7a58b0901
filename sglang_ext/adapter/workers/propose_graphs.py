"""CUDA graphs of drafting from the one vector that a request carries: the whole chain or tree is one replay.

There is one for each batch size that SGLang captures, made by SGLang's own backend in the memory that all of its graphs
share. B = requests, H = hidden size.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.runner import ShapeKey, get_batch_sizes_to_capture, model_capture_mode
from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.model_executor.runner_backend_utils import CUDA_GRAPH_CAPTURE_FAILED_MSG
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_capture_stream
from sglang.srt.runtime_context import get_device, get_exec
from sglang.srt.utils import get_available_gpu_memory
from torch import Tensor

from rayspec_kernels.common.draft_tree import DraftTree
from sglang_ext.trees import Draft

logger = logging.getLogger(__name__)

Propose = Callable[[Tensor, Tensor], Draft]  # of vectors [B, H] and roots int64 [B]


def has_graphs() -> bool:
    """Whether this server decodes with CUDA graphs."""
    return get_device().device == "cuda" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)


class ProposeGraphs:
    """Not run on a GPU yet."""

    def __init__(self, target_runner: Any, hidden_size: int, propose: Propose) -> None:
        device, self.device_module = target_runner.device, torch.get_device_module(target_runner.device)
        self.sizes: list[int] = get_batch_sizes_to_capture(target_runner)[0]  # ascending
        self._pads = not get_exec().graph.disable_cuda_graph_padding
        # outside of the graphs' memory, where a replay of another one would write over them
        self._hidden_BH = torch.zeros(self.sizes[-1], hidden_size, dtype=target_runner.dtype, device=device)
        self._root_B = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        self._backend = FullCudaGraphBackend(
            self,  # of which it reads `device_module`
            enable_memory_saver=get_exec().features.enable_memory_saver,
        )
        start, free = time.perf_counter(), partial(get_available_gpu_memory, device, target_runner.gpu_id)
        before = free()
        try:
            with _on_capture_stream() as stream, self._backend.capture_session(stream):
                for size in reversed(self.sizes):  # smaller ones use the memory of larger ones again
                    rows = self._hidden_BH[:size], self._root_B[:size]
                    self._backend.capture_one(ShapeKey(size), partial(propose, *rows))
        except RuntimeError as error:
            self.free()
            raise RuntimeError(f"capturing the drafting failed: {error}\n{CUDA_GRAPH_CAPTURE_FAILED_MSG}") from error
        self.memory_gb = before - free()
        logger.info(
            "drafting captured in CUDA graphs: batches of %s, %.2f s, %.2f GB",
            *(self.sizes, time.perf_counter() - start, self.memory_gb),
        )

    def replay(self, hidden_BH: Tensor, root_B: Tensor) -> Draft | None:
        """The draft of B requests; None for a batch without a graph."""
        B = len(root_B)
        size = self._size_for(B)
        if size is None:
            return None
        self._hidden_BH[:B].copy_(hidden_BH)
        self._root_B[:B].copy_(root_B)
        if size > B:  # a head whose rows share their candidates must not see those of an earlier batch
            self._hidden_BH[B:size].zero_()
            self._root_B[B:size].zero_()
        tokens_BN, links, num_nodes_B = self._backend.replay(ShapeKey(size), None)
        own = partial(_own, B=B)
        return Draft(own(tokens_BN), DraftTree(*map(own, links)), None if num_nodes_B is None else own(num_nodes_B))

    def _size_for(self, B: int) -> int | None:
        place = bisect_left(self.sizes, B)
        if place == len(self.sizes) or not (self._pads or self.sizes[place] == B):
            return None
        return self.sizes[place]

    def free(self) -> None:
        self._backend.cleanup()


def _own(captured: Tensor, B: int) -> Tensor:
    """The rows of B requests, in memory that no replay writes to. What a static tree has for all requests alike is a
    view of one row of its own, and no graph's."""
    return captured[:B] if captured.stride(0) == 0 else captured[:B].clone()


@contextmanager
def _on_capture_stream() -> Iterator[Any]:
    """As SGLang's runners capture."""
    with (
        model_capture_mode(),
        freeze_gc(get_exec().graph.enable_cudagraph_gc),
        graph_capture(stream=get_or_create_global_graph_capture_stream()) as capture,
    ):
        yield capture.stream
