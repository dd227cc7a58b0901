"""Entry point of `sglang.srt.plugins`: our model classes, the live swap, and the hooks of the CPU platform.

SGLang logs and ignores a plugin that fails, so whatever must not be missing is checked again where it is needed
(`check_cpu_hooks` in the worker, `engine.assert_plugin_active` in our own processes).
"""

import os
import pkgutil
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from sglang_ext.adapter import SGLANG_VERSION
from sglang_ext.adapter.internals import CPU_MISSING, CPU_REPLACEMENTS, CPU_WRAPPED, WRAPPED, Internal

MODEL_PACKAGE = "sglang_ext.adapter.models"


def check_version() -> None:
    """Raise RuntimeError unless the installed SGLang is the one that the adapter was written against."""
    installed = version("sglang")
    if installed != SGLANG_VERSION:
        raise RuntimeError(
            f"rayspec was written against sglang {SGLANG_VERSION} and {installed} is installed; "
            f"pip install sglang=={SGLANG_VERSION} (or run tests/sglang_ext/test_internals.py and move the pin)"
        )


def register() -> None:
    """Called by SGLang once in every process, before its arguments are resolved."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    check_version()
    present = os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODEL_PACKAGE)
    if present not in (MODEL_PACKAGE, ""):  # empty: none but SGLang's own models, which stock drafters need alone
        raise RuntimeError(
            f"SGLANG_EXTERNAL_MODEL_PACKAGE is {present!r}, but rayspec's drafters need {MODEL_PACKAGE!r}; unset it"
        )
    from sglang_ext.adapter.spec_algorithm import register_algorithms

    register_algorithms()
    for internal in WRAPPED:
        HookRegistry.register(internal.target, pkgutil.resolve_name(internal.replacement), HookType.AROUND)
    if _is_cpu_platform(current_platform):
        for internal in CPU_REPLACEMENTS:
            HookRegistry.register(internal.target, pkgutil.resolve_name(internal.replacement), HookType.REPLACE)
        for internal in CPU_WRAPPED:
            HookRegistry.register(internal.target, pkgutil.resolve_name(internal.replacement), HookType.AROUND)


def _is_cpu_platform(platform: Any) -> bool:
    return type(platform).__module__ == "sglang_ext.adapter.platform"


def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """AROUND SpeculativeAlgorithm.create_worker, which only the scheduler calls."""
    from sglang.srt.speculative import eagle_worker_v2, standalone_worker_v2

    from sglang_ext.adapter.draft_worker import HeadDraftWorker, StandaloneHeadDraftWorker
    from sglang_ext.adapter.extend_graphs import HeadExtendGraphs
    from sglang_ext.adapter.step_clock import timed

    eagle_worker_v2.EagleDraftWorker = HeadDraftWorker  # EAGLEWorkerV2.__init__ takes it from there
    eagle_worker_v2.EAGLEDraftExtendCudaGraphRunner = HeadExtendGraphs  # and its _capture_cuda_graphs this one
    standalone_worker_v2.StandaloneDraftWorker = StandaloneHeadDraftWorker  # and StandaloneWorkerV2.__init__ this one
    prepare_scheduler()
    return timed(original(algorithm, server_args))


def prepare_scheduler() -> None:
    """In a scheduler that speculates: check the hooks that all of our workers need, and give it the calls of
    `engine.py`."""
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_ext.adapter.step_clock import start_step_clock, write_step_clock
    from sglang_ext.adapter.swap import swap_drafter

    check_hooks(WRAPPED)
    Scheduler.rayspec_swap_drafter = swap_drafter
    Scheduler.rayspec_start_step_clock = start_step_clock
    Scheduler.rayspec_write_step_clock = write_step_clock


def check_hooks(internals: tuple[Internal, ...]) -> None:
    """Raise RuntimeError unless SGLang applied every one of these hooks (it only logs those that fail)."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [i.target for i in internals if i.target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            f"SGLang did not apply rayspec's hook on {', '.join(missing)}; its log above says why "
            f"(the adapter is written against sglang {SGLANG_VERSION}, installed is {version('sglang')})"
        )


def check_cpu_hooks() -> None:
    """Raise RuntimeError unless SGLang applied every CPU replacement."""
    check_hooks(CPU_REPLACEMENTS + CPU_WRAPPED)


def install_missing_cpu_ops() -> None:
    for internal in CPU_MISSING:
        module, name = internal.target.rsplit(".", 1)
        setattr(pkgutil.resolve_name(module), name, pkgutil.resolve_name(internal.replacement))
