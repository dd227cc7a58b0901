"""Compiles kernels before they are timed, from many processes: Triton keeps what it compiles on disk, and a process
that compiles one after the other leaves the card idle for minutes.

python -m rayspec_kernels.common.ahead SHARE SHARES OP...  compiles every SHARES-th case of these operations.
"""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import torch

from rayspec_kernels.common import bench, shapes

LIMIT_S = 150.0
PROCESS_BYTES = 6 * 2**30  # of the card: a context, and the largest inputs while they are made


def cases(ops: Iterable[str], sizes: Iterable[shapes.Shape], batches: Iterable[int]) -> Iterator[bench.Case]:
    benches = [importlib.import_module(f"rayspec_kernels.{op}.bench") for op in ops]
    return (case for batch in batches for size in sizes for own in benches for case in own.cases(size, batch))


def compile_ahead(ops: Sequence[str], limit_s: float = LIMIT_S) -> float:
    """Compile the kernels of all cases at the models' sizes; returns the seconds that it took, `limit_s` at most. What
    fails is left to the process that checks and times, which says why."""
    free, _ = torch.cuda.mem_get_info()
    shares = max(1, min(os.cpu_count() or 1, free // PROCESS_BYTES))
    own = [sys.executable, "-m", __name__]
    print(f"compiling the kernels in {shares} processes, at most {limit_s:g} s", flush=True)
    return run_side_by_side([[*own, str(share), str(shares), *ops] for share in range(shares)], limit_s)


def run_side_by_side(commands: Iterable[Sequence[str]], limit_s: float) -> float:
    """Run the commands at once until all have ended, or are ended after `limit_s`; returns the seconds."""
    begin = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # perhaps not installed
    nowhere = subprocess.DEVNULL
    running = [subprocess.Popen(c, env=environment, stdout=nowhere, stderr=nowhere) for c in commands]
    try:
        while time.monotonic() - begin < limit_s and any(process.poll() is None for process in running):
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return time.monotonic() - begin


def launch_all(found: Iterable[bench.Case], device: torch.device) -> None:
    """Launch each case as the dispatch chooses and otherwise, once, on inputs of its own."""
    for case in found:
        with suppress(Exception):  # a compiler's, a card's
            inputs = case.make(bench.generator(device))
            for launch in (case.kernel, *case.alternatives.values()):
                with suppress(Exception):
                    launch(*inputs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)


if __name__ == "__main__":
    share, shares, *ops = sys.argv[1:]
    every = list(cases(ops, shapes.MODELS, shapes.BATCHES))
    launch_all(every[int(share) :: int(shares)], torch.device("cuda"))
