"""Entry point of `sglang.srt.plugins`: our model classes, algorithms and hooks.

SGLang logs and ignores a plugin that fails, so whatever must not be missing is checked again where it is needed
(`patches.check_hooks` in the worker, `engine.assert_plugin_active` in our own processes).
"""

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from sglang_ext.adapter import SGLANG_VERSION
from sglang_ext.adapter.internals import HEAD_WORKERS
from sglang_ext.adapter.patches import prepare_scheduler, register_hooks
from sglang_ext.json_log import log_as_told

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
    check_version()
    log_as_told()
    present = os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODEL_PACKAGE)
    if present not in (MODEL_PACKAGE, ""):  # empty: none but SGLang's own models, which stock drafters need alone
        raise RuntimeError(
            f"SGLANG_EXTERNAL_MODEL_PACKAGE is {present!r}, but rayspec's drafters need {MODEL_PACKAGE!r}; unset it"
        )
    from sglang_ext.adapter.spec_algorithm import register_algorithms

    register_algorithms()
    register_hooks()


def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """AROUND SpeculativeAlgorithm.create_worker, which only the scheduler calls."""
    from sglang_ext.adapter.served_target import check_tree_of_windows
    from sglang_ext.adapter.workers.policy import check_follows
    from sglang_ext.adapter.workers.timed import timed

    check_tree_of_windows()
    prepare_scheduler(HEAD_WORKERS)
    worker = timed(original(algorithm, server_args))
    check_follows(worker, algorithm, server_args)
    return worker
