"""SGLang on a machine without an accelerator: an out-of-tree platform in plain torch."""

import os
from collections.abc import Callable
from typing import Any

import psutil
import torch
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

# Enough for a handful of long requests; the KV pool is allocated at start, and SGLang's own default fills the RAM.
DEFAULT_MAX_TOTAL_TOKENS = 32768
# Speculative decoding reserves slots for its drafts in every running request.
DEFAULT_MAX_RUNNING_REQUESTS = 32
DEFAULT_CHUNKED_PREFILL_SIZE = 2048


class CpuPlatform(SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what the user left open: float32, a KV pool for a laptop, no busy waiting."""
        if server_args.enable_deterministic_inference:
            raise ValueError(
                "--enable-deterministic-inference needs SGLang's batch-invariant CUDA kernels, which the CPU platform "
                "does not run; leave it out: a request's sampling_seed is honoured without it"
            )
        for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
            if getattr(server_args, name) != 1.0:
                raise ValueError(
                    f"--{name.replace('_', '-')} below 1 changes the output's distribution, which the CPU platform "
                    f"does not offer (got {getattr(server_args, name)}); leave it at 1.0"
                )
        if server_args.enable_multi_layer_eagle:
            raise ValueError("--enable-multi-layer-eagle is not offered by rayspec's CPU platform; leave it out")
        if server_args.dtype == "auto":  # greedy equality with plain decoding needs float32
            server_args.dtype = "float32"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
        if server_args.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
        if server_args.chunked_prefill_size is None:
            server_args.chunked_prefill_size = DEFAULT_CHUNKED_PREFILL_SIZE
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        if server_args.moe_runner_backend == "auto":  # SGLang's torch code reads the layout of the experts from it
            server_args.moe_runner_backend = "triton"
        if server_args.tp_size > 1:  # SGLang would ask for a NUMA node for each rank
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * server_args.tp_size))
        server_args.device = "cpu"
        server_args.disable_overlap_schedule = True  # its relay is a Triton kernel, and there is nothing to overlap
        server_args.disable_cuda_graph = True
        server_args.disable_hybrid_swa_memory = True  # windows are masks here, so that every layer keeps every token
        server_args.sleep_on_idle = True  # an idle scheduler otherwise spins on a core

    def get_default_attention_backend(self) -> str:
        return "torch_native"  # the name SGLang routes its torch code by; the class behind it is ours

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ("EAGLE", "EAGLE3", "STANDALONE")

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from sglang_ext.adapter.cpu.spec_ops import extend_slots

        return extend_slots

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Once in each worker, before the first request: fail unless everything that we replace is in
        place, then pack the projections."""
        from sglang_ext.adapter.cpu.packing import pack_model
        from sglang_ext.adapter.patches import prepare_cpu_worker

        prepare_cpu_worker()
        pack_model(model)

    def init_backend(self) -> None:
        """Once in each worker, while SGLang's model runner is being imported."""
        from sglang_ext.adapter.patches import register_cpu_forwards

        register_cpu_forwards()

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        return float(psutil.Process().memory_info().rss)

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"

    def get_device_name(self, device_id: int = 0) -> str:
        return "cpu"

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total
