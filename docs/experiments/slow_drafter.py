"""A plugin of SGLang for aa_sweep.py and gate_series.py: a drafter whose folder is called `slow` makes every pass of
the engine longer."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_ext.adapter.patches import wrap

SLOW = "slow"
SLOWDOWN = "SLOW_DRAFTER_SLOWDOWN"  # environment variable: share of every pass's time that is added to it
PLUGIN = "[sglang.srt.plugins]\nslow_drafter = slow_drafter:register\n"
TARGET = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"


def install(folder: Path, slowdown: float) -> dict[str, str]:
    """Environment variables under which SGLang finds the plugin, whose metadata is written into `folder`."""
    plugin = folder / "slow_drafter-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: slow_drafter\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(PLUGIN)
    paths = [str(folder), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), SLOWDOWN: str(slowdown)}


def register() -> None:
    wrap(TARGET, create_worker)


def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    from sglang_ext.adapter.workers.timed import TimedEagleWorker

    worker = original(algorithm, server_args)
    forward, slowdown = TimedEagleWorker.forward_batch_generation, float(os.environ[SLOWDOWN])

    def forward_slowed(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = forward(self, *args, **kwargs)
        if Path(self.draft_worker.draft_runner.model.info.path).name == SLOW:
            end = time.perf_counter() + slowdown * (time.perf_counter() - start)
            while time.perf_counter() < end:  # a sleep is longer than was asked for
                pass
        return result

    TimedEagleWorker.forward_batch_generation = forward_slowed  # type: ignore[method-assign]
    return worker
