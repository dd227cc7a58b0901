"""Which tests come first, and what workers may do side by side."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# engines are held to float32 oracles token by token, which a GPU's 16 bits are not; `make test-gpu` asks for the card
if os.environ.get("RAYSPEC_TESTS") != "gpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

pytest.register_assert_rewrite("shared_fixtures")  # which another conftest.py may import before pytest does

# files whose tests start Ray's clusters, which would find each other on one machine, or that measure its load
RAY = {
    "calibrate", "disasters", "faults", "gate_engine", "hostile_client", "hostile_schema", "lifeline", "local_ray",
    "nodes", "other_load", "prepare", "remote_journal", "runtime", "search", "served", "smollm2", "sweep",
    "sweep_trace", "tracking_server", "train", "train_workers", "your_model_killed",
}  # fmt: skip


# what `make check` leaves out: what starts SGLang or a server (modules import it, a test asks for it, or a file runs
# commands that do), and the recipes of published models, which are planned and trained at their vocabularies' sizes
STARTERS = (
    "running_engine", "kept_engine", "server_process", "limited_server", "start_mlflow", "openai_server", "Runtime"
)  # fmt: skip
STARTED = {"oracle", "eagle3_chain"}
LONG = {
    "engine_suite", "internals", "new_family", "recipes", "serve_command", "server_process", "serving_logs",
    "your_model",
}  # fmt: skip


class ByResource(LoadScopeScheduling):
    """What workers may do side by side (`make test`): one runs Ray's clusters, the others take file by file of the
    rest, and all do at the end."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def scope_of(nodeid: str) -> str:
    return "ray" if stem_of(nodeid) in RAY else nodeid.split("::")[0]


def stem_of(nodeid: str) -> str:
    """`sweep` of a test in test_sweep.py."""
    return Path(nodeid.split("::")[0]).stem.removeprefix("test_")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByResource:
    config.option.loadscopereorder = False  # by the number of tests; ours are in order of time
    return ByResource(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """The process that hands tests out runs none, and its workers start when this has ended."""
    gc.disable()  # until all tests are found: what is imported and found stays
    if "PYTEST_XDIST_WORKER" in os.environ or not config.option.numprocesses:
        config.pluginmanager.import_plugin("shared_fixtures")


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """What takes longest comes first, so that no worker is left with it at the end, and of a file what needs the same
    engine comes together. What starts SGLang, a server or Ray is marked, since `make check` leaves it out."""
    starting = set()  # files
    for item in items:
        starts = STARTED & set(item.fixturenames) or any(hasattr(item.module, name) for name in STARTERS)
        if starts or stem_of(item.nodeid) in RAY | LONG:
            item.add_marker("engine")
            starting.add(item.path)
    items.sort(key=lambda item: _turn(item, item.path in starting))


def pytest_collection_finish() -> None:
    """What is imported by now stays. Looking through it again and again took a twentieth of the time of five files."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _turn(item: Any, is_of_engines: bool) -> tuple[Any, ...]:
    scope, params = scope_of(item.nodeid), getattr(item, "callspec", None)
    engine = str(params.params.get("engine", "")) if params else ""
    return scope != "ray", "/sglang_ext/" not in item.nodeid, not is_of_engines, item.path, engine
