"""Whether the CPU platform is used here; imports nothing of SGLang, which asks while it is half imported itself.

The platform steps aside wherever SGLang has a device of its own, so that the same installation on a GPU machine runs
SGLang's CUDA path untouched.
"""

import os

import torch


def has_accelerator() -> bool:
    """Whether SGLang would find a device of its own here (or was told to use its own CPU engine)."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return True
    if torch.cuda.is_available() or torch.xpu.is_available():
        return True
    mps = getattr(torch.backends, "mps", None)
    others = any(getattr(torch, name, None) is not None for name in ("npu", "musa"))
    return others or (mps is not None and mps.is_available())


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform's class name, or None where it must not be used."""
    if has_accelerator():
        return None
    # EAGLE's step functions are wrapped in torch.compile; on a CPU that needs a C++ compiler and a minute to start.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("SGLANG_NATIVE_MOVE_KV_CACHE", "1")
    # A step is hundreds of tiny parallel regions. OpenMP threads that spin between them cost a factor of ten and more
    # as soon as anything else wants a core (docs/results/archive/profile.md); sleeping ones cost microseconds.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return "sglang_ext.adapter.cpu.platform.CpuPlatform"
