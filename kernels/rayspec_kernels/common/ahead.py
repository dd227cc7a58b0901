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

import torch

from rayspec_kernels.common import bench, shapes

LIMIT_S = 150.0
PROCESS_BYTES = 14 * 2**30  # of the card: a context, and the largest inputs while they are made (Gemma's rows in int64)


def cases(ops: Iterable[str], sizes: Iterable[shapes.Shape], batches: Iterable[int]) -> Iterator[bench.Case]:
    benches = [importlib.import_module(f"rayspec_kernels.{op}.bench") for op in ops]
    return (case for batch in batches for size in sizes for own in benches for case in own.cases(size, batch))


def all_cases(ops: Sequence[str]) -> list[bench.Case]:
    """What is checked on a card, and then what is timed."""
    return [*cases(ops, shapes.SMALL, shapes.SMALL_BATCHES), *cases(ops, shapes.MODELS, shapes.BATCHES)]


def share_of(ops: Sequence[str], share: int, shares: int) -> list[bench.Case]:
    """What one of so many processes compiles."""
    return all_cases(ops)[share::shares]


def compile_ahead(ops: Sequence[str], limit_s: float = LIMIT_S) -> float:
    """Compile the kernels of all cases; returns the seconds that it took, `limit_s` at most. What fails is left to the
    process that checks and times, which says why."""
    free, _ = torch.cuda.mem_get_info()
    shares = max(1, min(os.cpu_count() or 1, free // PROCESS_BYTES))
    own = [sys.executable, "-m", __name__]
    print(f"compiling the kernels in {shares} processes, at most {limit_s:g} s", flush=True)
    begin = time.monotonic()
    whole = run_side_by_side([[*own, str(share), str(shares), *ops] for share in range(shares)], limit_s)
    taken = time.monotonic() - begin
    print(f"compiled in {taken:.0f} s; {shares - whole} processes were ended or met an error", flush=True)
    return taken


def run_side_by_side(commands: Iterable[Sequence[str]], limit_s: float) -> int:
    """Run the commands at once until all have ended, or are ended after `limit_s`; returns how many came to their end
    without an error."""
    begin = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # perhaps not installed
    nowhere = subprocess.DEVNULL
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            running.append(subprocess.Popen(command, env=environment, stdout=nowhere, stderr=nowhere))
        while time.monotonic() - begin < limit_s and any(process.poll() is None for process in running):
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return sum(process.returncode == 0 for process in running)


def launch_all(found: Iterable[bench.Case], device: torch.device) -> int:
    """Launch each case as the dispatch chooses and otherwise, once, on inputs of its own. Returns how many launches
    failed, a case whose inputs cannot be made counting as one."""
    failed = 0
    for case in found:
        try:
            inputs = case.make(bench.generator(device))
        except Exception:  # no room on the card, say
            failed += 1
            continue
        for launch in (case.kernel, *case.alternatives.values()):
            try:
                launch(*inputs)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            except Exception:  # a compiler's, a card's
                failed += 1
        del inputs
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return failed


if __name__ == "__main__":
    share, shares, *ops = sys.argv[1:]
    sys.exit(launch_all(share_of(ops, int(share), int(shares)), torch.device("cuda")) > 0)
