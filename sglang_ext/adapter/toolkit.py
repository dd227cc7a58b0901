"""Whether SGLang finds the compiler that it needs on CUDA."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch


def check_before_speculating(original: Callable[..., Any], server_args: Any) -> Any:
    """AROUND handle_speculative_decoding, where every server looks at what it was told of speculation, before it loads
    anything. Raises RuntimeError."""
    from sglang.srt.arg_groups.overrides import resolving_view

    if resolving_view(server_args).speculative_algorithm is not None:
        check_toolkit()
    return original(server_args)


def check_toolkit() -> None:
    """Raise RuntimeError where SGLang would start on CUDA without nvcc: it compiles kernels when they are first asked
    for, among them those of speculation's trees, which is after it has loaded the target."""
    uses_cuda = torch.cuda.is_available() and torch.version.hip is None
    if not uses_cuda or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return
    from sglang.kernels.jit.utils.compile.toolchain import cuda_home

    nvcc = os.path.join(cuda_home(), "bin", "nvcc")
    if shutil.which(nvcc) is None:
        raise RuntimeError(
            f"SGLang compiles kernels on CUDA, and there is no {nvcc}; install the CUDA toolkit of PyTorch's version "
            f"({torch.version.cuda}), and set CUDA_HOME to its folder if that is not /usr/local/cuda"
        )
