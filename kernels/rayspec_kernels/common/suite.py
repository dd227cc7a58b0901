"""All kernels on one device: right first, then how fast. Needs torch and triton alone (rayspec gpu-suite)."""

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from rayspec_kernels.common import ahead, bench, shapes

LIMIT_S = 7 * 60  # seconds of compiling, checking and timing; what did not fit is named in the report


def run(
    ops: Sequence[str], is_interpreted: bool, made_by: dict[str, str], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """`save` is given what there is after every case, so that whatever ends the run, its results stay."""
    if not is_interpreted and not torch.cuda.is_available():
        raise ValueError("no CUDA GPU here; --interpret checks the kernels without one")
    device = torch.device("cpu" if is_interpreted else "cuda")
    start = time.monotonic()
    results: dict[str, Any] = {"provenance": made_by, "ceilings": None, "checks": [], "timings": [],
                               "left_out": {}, "case_s": {}}  # fmt: skip
    ceilings = None if is_interpreted else bench.ceilings(device)
    results["ceilings"] = vars(ceilings) if ceilings else None
    if not is_interpreted:
        results["compiled_ahead_s"] = round(ahead.compile_ahead(ops), 1)
    small = list(ahead.cases(ops, shapes.SMALL, shapes.SMALL_BATCHES))
    cases = small if is_interpreted else ahead.all_cases(ops)
    why = ""
    for number, case in enumerate(cases, 1):
        if not why and not is_interpreted and time.monotonic() - start > LIMIT_S:
            why = f"{LIMIT_S} s were over"
        if why:
            results["left_out"][case.name] = why
            continue
        begin = time.monotonic()
        said = one(case, ceilings if number > len(small) else None, device, results)
        results["case_s"][case.name] = round(time.monotonic() - begin, 2)
        print(f"[{number}/{len(cases)}] {case.name}: {said}", flush=True)
        if bench.is_lost(device):
            why = f"the GPU was lost in {case.name}"
            results["checks"].append({"name": case.name, "error": "the GPU was lost"})
        save(results)
    return results


def one(case: Any, ceilings: Any, device: Any, results: dict[str, Any]) -> str:
    """Check a case and, where there are ceilings, time what is right of it. In a few words, what came of it."""
    try:
        found = bench.check(case, device)
        wrong = {launch: why for launch, why in found.items() if why != bench.NO_ROOM}
        error = "; ".join(f"{launch}: {why}" for launch, why in wrong.items())
        results["checks"].append({"name": case.name, "error": error or None})
        if ceilings is None or bench.KERNEL in wrong:
            return f"WRONG: {error}" if error else "right"
        timing, failed = bench.measure(bench.without(case, found), ceilings, device)
        results["timings"].append(timing.as_dict())
        no_room = {launch: why for launch, why in found.items() if launch not in wrong}
        results["left_out"] |= {f"{case.name}, {launch}": why for launch, why in (no_room | failed).items()}
        return f"{timing.seconds * 1e6:.1f} us" + (f", WRONG: {error}" if error else "")
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        results["left_out"][case.name] = bench.NO_ROOM
    except Exception as error:  # no case may cost the others their results
        if [check["name"] for check in results["checks"][-1:]] != [case.name]:  # it did not come as far as a launch
            results["checks"].append({"name": case.name, "error": bench.described(error)})
        results["left_out"][case.name] = f"not timed: {bench.described(error)}"
    return f"left out: {results['left_out'][case.name]}"


def provenance(is_interpreted: bool) -> dict[str, str]:
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    checkout = Path(__file__).parents[3]  # an installation, or a copy of the files, has no history
    is_checkout = (checkout / ".git").exists()
    commit = _output("git", "-C", str(checkout), "describe", "--always", "--dirty") if is_checkout else "unknown"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "GPU": "none (interpreter)" if is_interpreted else _device_name(),
        "driver": "none" if is_interpreted else driver,
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}",
        "commit": os.environ.get("RAYSPEC_COMMIT", commit),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"none ({platform.processor() or 'CPU'})"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
