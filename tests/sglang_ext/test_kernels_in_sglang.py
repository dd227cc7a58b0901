"""The kernels compile beside SGLang, which puts functions of its own into Triton's module (`triton.next_power_of_2`, in
srt/utils/common.py). A kernel that calls such a function compiles everywhere but in SGLang."""

import json
import os
import subprocess
import sys

# in a process of its own: the tests run kernels in Triton's interpreter, where nothing is compiled
LOOK = """
import importlib, json, pkgutil, sys
import sglang.srt.utils.common as theirs
import rayspec_kernels, triton
from triton.runtime.jit import JITFunction

assert triton.next_power_of_2 is theirs.next_power_of_2, "SGLang no longer does what this test is for"
modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(rayspec_kernels.__path__, "rayspec_kernels.")]
kernels = {f"{m.__name__}.{name}": f for m in modules for name, f in vars(m).items() if isinstance(f, JITFunction)}
wrong = {}
for name, kernel in kernels.items():
    try:
        kernel.cache_key  # looks up all that the kernel names
    except RuntimeError as error:
        wrong[name] = str(error)
json.dump({"kernels": len(kernels), "wrong": wrong}, sys.stdout)
"""


def test_no_kernel_calls_what_sglang_replaces() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run([sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kernels"] > 40
    assert found["wrong"] == {}
