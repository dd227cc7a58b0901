"""Everything that we change in SGLang's own modules and classes; what that is, `internals.py` lists.

No other module of the adapter assigns to SGLang or registers with it (a test reads them). A change is a hook of
SGLang's registry, a name that is given another value, or an operation's forward of another platform.
"""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from sglang_ext.adapter import SGLANG_VERSION
from sglang_ext.adapter.internals import (
    CPU_FORWARDS,
    CPU_MISSING,
    CPU_REPLACEMENTS,
    CPU_WRAPPED,
    SCHEDULER_CALLS,
    WRAPPED,
    Internal,
)

FUSED_OPS_KEY = "native"  # SRTPlatform.get_dispatch_key_name()


def on_cpu_platform() -> bool:
    from sglang.srt.platforms import current_platform

    return type(current_platform).__module__ == "sglang_ext.adapter.cpu.platform"


def register_hooks() -> None:
    """Called in every process before SGLang resolves its arguments. It logs a hook that fails and goes on without."""
    for internal in WRAPPED + (CPU_WRAPPED if on_cpu_platform() else ()):
        wrap(internal.target, pkgutil.resolve_name(internal.replacement))
    for internal in CPU_REPLACEMENTS if on_cpu_platform() else ():
        _hook(internal.target, pkgutil.resolve_name(internal.replacement), "REPLACE")


def wrap(target: str, around: Callable[..., Any]) -> None:
    """Let `around(original, *arguments)` be called in place of what SGLang has under this dotted name."""
    _hook(target, around, "AROUND")


def _hook(target: str, ours: Callable[..., Any], kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, ours, HookType[kind])


def check_hooks(internals: tuple[Internal, ...]) -> None:
    """Raise RuntimeError unless SGLang applied every one of these hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [i.target for i in internals if i.target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            f"SGLang did not apply rayspec's hook on {', '.join(missing)}; its log above says why "
            f"(the adapter is written against sglang {SGLANG_VERSION}, installed is {version('sglang')})"
        )


def check_cpu_hooks() -> None:
    """Raise RuntimeError unless SGLang applied every hook of the CPU platform."""
    check_hooks(CPU_REPLACEMENTS + CPU_WRAPPED)


def put(internals: tuple[Internal, ...]) -> None:
    """Give each name in SGLang what is listed for it."""
    # all of ours first: their modules import what SGLang has under these names
    replacements = [pkgutil.resolve_name(internal.replacement) for internal in internals]
    for internal, ours in zip(internals, replacements, strict=True):
        owner, name = internal.target.rsplit(".", 1)
        setattr(pkgutil.resolve_name(owner), name, ours)


@contextmanager
def lent(target: str, ours: Any) -> Iterator[None]:
    """Within it, SGLang has ours under this dotted name."""
    owner, name = target.rsplit(".", 1)
    module = pkgutil.resolve_name(owner)
    own = getattr(module, name)
    setattr(module, name, ours)
    try:
        yield
    finally:
        setattr(module, name, own)


@contextmanager
def hooks_of(module: str) -> Iterator[None]:
    """Within it, SGLang's registry forgets the hooks on all other modules before it applies any."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply = HookRegistry.apply_hooks

    def apply_to_it() -> None:
        for target in [name for name in HookRegistry._hooks if not name.startswith(f"{module}.")]:
            del HookRegistry._hooks[target]
        apply()

    with lent("sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks", apply_to_it):
        yield


def prepare_scheduler(workers: tuple[Internal, ...]) -> None:
    """In a scheduler that speculates: check the hooks that all of our workers need, give it the calls of `engine.py`,
    and let SGLang's worker take its parts from us."""
    check_hooks(WRAPPED)
    put(SCHEDULER_CALLS + workers)


def prepare_cpu_worker() -> None:
    """In each worker of the CPU platform: fail unless everything that we replace is in place, and add what SGLang
    lacks."""
    check_cpu_hooks()
    put(CPU_MISSING)


def register_cpu_forwards() -> None:
    """Through SGLang's own seam for the operations of a platform."""
    from sglang.kernels.fused_op import BaseFusedOp

    for internal in CPU_FORWARDS:
        operation = pkgutil.resolve_name(internal.target.rsplit(".", 1)[0])
        BaseFusedOp.register_oot_forward(operation, pkgutil.resolve_name(internal.replacement), FUSED_OPS_KEY)
