"""Imports SGLang, which takes half a minute on a busy machine, without what no engine on a CPU uses."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# optional for SGLang and transformers, which ask whether they are there, and a quarter of the time: flashinfer is for
# GPUs, and scikit-learn (with SciPy's statistics and pandas) for one kind of assisted generation of transformers' own
UNUSED = ("flashinfer", "sklearn")


@contextmanager
def quick_imports(skip: bool) -> Iterator[None]:
    """Within it nothing looks for garbage among thousands of modules that stay, which is a sixth of the time; with
    `skip`, what is UNUSED and not imported yet counts as not installed."""
    was_enabled = gc.isenabled()
    gc.disable()
    hidden = [name for name in UNUSED if skip and name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: Python's word for it
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        if was_enabled:
            gc.enable()
