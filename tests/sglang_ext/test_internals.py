"""The pinned SGLang still has what the adapter replaces. If this fails, read sglang_ext/adapter/internals.py."""

import importlib
import inspect
import json
import multiprocessing
import os
import pkgutil
import subprocess
import sys
from importlib.metadata import entry_points, version
from typing import NamedTuple

import pytest

from sglang_ext import adapter
from sglang_ext.adapter import SGLANG_VERSION
from sglang_ext.adapter.internals import (
    BARRIER,
    CHAIN_VERIFICATION,
    CONTEXT_WORKERS,
    CPU_FORWARDS,
    CPU_MISSING,
    CPU_REPLACEMENTS,
    CPU_WRAPPED,
    ENGINE_PROCESSES,
    HEAD_WORKERS,
    IMPORTED,
    LAST_HIDDEN_WORKERS,
    LOGGERS,
    OVERRIDDEN,
    PRELOADED,
    RELIED_ON,
    SCHEDULER_CALLS,
    TOP_K_FILTER,
    WRAPPED,
    Internal,
)
from sglang_ext.adapter.server_fields import server_fields

WORKERS = HEAD_WORKERS + LAST_HIDDEN_WORKERS + CONTEXT_WORKERS
WITH_SIGNATURE = CPU_REPLACEMENTS + CPU_WRAPPED + CPU_FORWARDS + HEAD_WORKERS + WRAPPED + RELIED_ON + (BARRIER,)


def test_pinned_version_is_installed() -> None:
    assert version("sglang") == SGLANG_VERSION


UNTOUCHED = """
import importlib, inspect, json, pkgutil, sys
from typing import get_type_hints
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs
import sglang.srt.utils.common as theirs
import rayspec_kernels, triton
from triton.runtime.jit import JITFunction

parameters = {t: list(inspect.signature(pkgutil.resolve_name(t)).parameters) for t in json.loads(sys.argv[1])}
arguments = {f.name: repr(get_type_hints(ServerArgs).get(f.name)) for f in record_fields(ServerArgs)}
assert triton.next_power_of_2 is theirs.next_power_of_2, "SGLang no longer replaces functions of Triton"
modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(rayspec_kernels.__path__, "rayspec_kernels.")]
kernels = {f"{m.__name__}.{name}": f for m in modules for name, f in vars(m).items() if isinstance(f, JITFunction)}
faults = dict.fromkeys(kernels, "")
for name, kernel in kernels.items():
    try:
        kernel.cache_key  # looks up all that the kernel names
    except RuntimeError as error:
        faults[name] = str(error)
print(json.dumps([parameters, arguments, faults]))
"""


class Untouched(NamedTuple):
    """SGLang as it is in a process in which no plugin was loaded."""

    parameters: dict[str, list[str]]  # by the object's name
    arguments: dict[str, str]  # of a server, and their types
    faults: dict[str, str]  # of our kernels beside it; empty where there is none


@pytest.fixture(scope="module")
def untouched() -> Untouched:
    targets = [i.target for i in WITH_SIGNATURE]
    command = [sys.executable, "-c", UNTOUCHED, json.dumps(targets)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)  # by which nothing is compiled
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Untouched(*json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("internal", WITH_SIGNATURE, ids=lambda i: i.target.rsplit(".", 1)[1])
def test_signature_is_the_one_that_we_replace(internal: Internal, untouched: Untouched) -> None:
    names = [n for n in untouched.parameters[internal.target] if n != "self" or "self" in internal.parameters]
    assert tuple(names) == internal.parameters


def test_no_kernel_of_ours_calls_what_sglang_replaces(untouched: Untouched) -> None:
    """SGLang puts functions of its own into Triton's module (`triton.next_power_of_2`, in srt/utils/common.py). A
    kernel that calls such a function compiles everywhere but in SGLang."""
    assert len(untouched.faults) > 40
    assert {name: fault for name, fault in untouched.faults.items() if fault} == {}


def test_arguments_as_read_from_the_source_are_those_that_a_server_has(untouched: Untouched) -> None:
    ours, theirs = server_fields(), untouched.arguments
    assert set(ours) <= set(theirs)
    assert set(theirs) - set(ours) <= {"custom_sigquit_handler"}
    for name, field in ours.items():
        if field.kind is not None:
            kind = field.kind.__name__
            assert theirs[name] in (f"<class '{kind}'>", f"typing.Optional[{kind}]"), name


def test_engines_start_their_processes_by_a_module_that_can_be_replaced() -> None:
    assert pkgutil.resolve_name(ENGINE_PROCESSES) is multiprocessing


@pytest.mark.parametrize("name", LOGGERS)
def test_loggers_are_named_after_their_modules(name: str) -> None:
    module = name.removesuffix(".stdout")
    assert "name_prefix=__name__" in inspect.getsource(pkgutil.resolve_name(module))
    make = pkgutil.resolve_name("sglang.srt.utils.log_utils.create_log_targets")
    assert [logger.name for logger in make(targets=["stdout"], name_prefix=module)] == [name]


@pytest.mark.parametrize("name", IMPORTED + PRELOADED)
def test_what_we_import_is_there(name: str) -> None:
    assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize("internal", WORKERS, ids=lambda i: i.replacement.rsplit(".", 1)[1])
def test_our_part_of_a_worker_is_made_like_sglangs(internal: Internal) -> None:
    taken = inspect.signature(pkgutil.resolve_name(internal.replacement))
    taken.bind(*internal.parameters[:1], **dict.fromkeys(internal.parameters[1:]))


@pytest.mark.parametrize("internal", SCHEDULER_CALLS, ids=lambda i: i.target.rsplit(".", 1)[1])
def test_our_calls_of_the_scheduler_hide_none_of_sglangs(internal: Internal) -> None:
    owner, name = internal.target.rsplit(".", 1)
    assert not hasattr(pkgutil.resolve_name(owner), name)
    assert callable(pkgutil.resolve_name(internal.replacement))


@pytest.mark.parametrize("internal", CPU_REPLACEMENTS, ids=lambda i: i.target.rsplit(".", 1)[1])
def test_replacement_takes_the_same_arguments(internal: Internal) -> None:
    replacement = pkgutil.resolve_name(internal.replacement)
    ours = list(inspect.signature(replacement).parameters)
    if internal.parameters in (("self",), ("model_runner",)):  # called by position
        assert len(ours) == 1
    else:
        assert tuple(ours) == internal.parameters


@pytest.mark.parametrize("internal", CPU_MISSING, ids=lambda i: i.target.rsplit(".", 1)[1])
def test_missing_operations_are_still_missing(internal: Internal) -> None:
    from sglang_ext.adapter.activation import has_accelerator

    module, name = internal.target.rsplit(".", 1)
    assert hasattr(pkgutil.resolve_name(module), name)
    assert has_accelerator() or getattr(pkgutil.resolve_name(module), name) is None
    assert callable(pkgutil.resolve_name(internal.replacement))


def test_the_filter_that_verification_calls_is_still_there() -> None:
    """`sampling.verify_plain_distribution` lends it another function for the time of a call."""
    from sglang.srt.speculative import eagle_utils

    source = inspect.getsource(eagle_utils.eagle_sample)
    assert source.count("top_k_renorm_prob(") == source.count("if sampling_info.need_top_k_sampling:") == 1
    for internal in (TOP_K_FILTER, CHAIN_VERIFICATION):
        assert hasattr(eagle_utils, internal.target.rsplit(".", 1)[1])


def test_entry_points_are_installed() -> None:
    assert any(e.value == "sglang_ext.adapter.plugin:register" for e in entry_points(group="sglang.srt.plugins"))
    assert any(e.value == "sglang_ext.adapter.activation:activate" for e in entry_points(group="sglang.srt.platforms"))


def test_platform_steps_aside_for_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from sglang_ext.adapter import activation

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert activation.activate() is None


def test_platform_is_active_here_without_an_accelerator() -> None:
    from sglang.srt.platforms import current_platform

    from sglang_ext.adapter.activation import has_accelerator
    from sglang_ext.adapter.engine import assert_plugin_active

    assert_plugin_active()
    assert (type(current_platform).__module__ == "sglang_ext.adapter.cpu.platform") == (not has_accelerator())


def overridden() -> set[str]:
    """What classes of the adapter have in place of SGLang's, read from the classes."""
    found = set()
    for module in pkgutil.walk_packages(adapter.__path__, f"{adapter.__name__}."):
        for ours in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(ours) or ours.__module__ != module.name:
                continue
            for name in vars(ours):
                has_it = (c for c in ours.__mro__[1:] if name in {*vars(c), *inspect.get_annotations(c)})
                theirs = next((c for c in has_it if c.__module__.startswith("sglang.")), None)
                if theirs is not None and not name.startswith(("__", "_abc_")):
                    found.add(f"{theirs.__module__}.{theirs.__qualname__}.{name}")
    return found


def test_all_that_is_overridden_is_listed() -> None:
    """And is there: SGLang would go on without calling ours if it gave it another name."""
    listed = {f"{owner}.{name}" for owner, names in OVERRIDDEN.items() for name in names}
    found = overridden()
    assert listed - found == set(), "SGLang has them no longer, or nothing overrides them; take them out"
    replaced = {i.target for i in WITH_SIGNATURE + WORKERS}
    assert found - listed - replaced == set(), "add them to OVERRIDDEN in sglang_ext/adapter/internals.py"
