"""All kernels on one GPU in one command: right first, then how fast. Needs torch and triton alone; at most 8 minutes.

    python jobs/gpu_suite.py --out results/             # on a GPU
    python jobs/gpu_suite.py --interpret --out results/ # results alone, on a CPU, in Triton's interpreter
    python jobs/gpu_suite.py --report results/          # the report again from results.json, figures included
    python jobs/gpu_suite.py --engines --out results/   # second half: every head in SGLang, where it is installed
    python jobs/gpu_suite.py --engines --report results/ --tau full=3.1 slimspec=3.0  # with taus measured elsewhere

Exit status 1 where any result is wrong, 2 for what cannot be run; a wrong kernel is not timed. The second half costs a
start of SGLang a head (`--engines full slimspec` names some) and runs on a CPU too, with `--shape tiny`.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPS = ("head_topk", "slim_head", "indexed_head", "gather_dot", "quantized_linear", "router_topk", "grouped_rmsnorm",
       "slim_posterior", "tree_prune")  # fmt: skip
LIMIT_S = 7 * 60  # of timing; what did not fit is named in the report


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for results.json and report.md (default: gpu_suite)")
    parser.add_argument("--interpret", action="store_true", help="check small sizes in Triton's interpreter")
    parser.add_argument("--ops", nargs="+", choices=OPS)
    parser.add_argument("--report", type=Path, help="write the report of this folder's results.json again, and no more")
    parser.add_argument(
        "--engines", nargs="*", metavar="HEAD", help="SGLang with these heads (default: all), and no more"
    )
    parser.add_argument("--shape", help="of --engines: llama-3.1-8b (default), smollm2-135m or tiny")
    parser.add_argument("--batches", nargs="+", type=_batch, help="of --engines (default: 1 4 16 64)")
    parser.add_argument(
        "--at-once", type=_count, metavar="N",
        help="of --engines: engines that start side by side, as many as the card holds (default: 1; of llama-3.1-8b, 5 "
        "fit onto an H200); they are measured one after the other",
    )  # fmt: skip
    parser.add_argument(
        "--tau", nargs="+", type=_tau, default=[], metavar="HEAD=TAU",
        help="of --engines: tokens of a step that trained drafters reach, to predict their speed-up by",
    )  # fmt: skip
    args = parser.parse_args(arguments)
    unused = _unused(args)
    if unused:
        parser.error(unused)
    try:
        return _run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _unused(args: argparse.Namespace) -> str | None:
    """What of the options would be ignored beside the others."""
    given = {name for name, value in vars(args).items() if value}
    of_engines = given & {"shape", "batches", "tau", "at_once"}
    if args.engines is None and of_engines:
        return f"--{min(of_engines).replace('_', '-')} must be given with --engines, which it is of"
    if args.engines is not None and given & {"ops", "interpret"}:
        return f"--{min(given & {'ops', 'interpret'})} is of the kernels alone; leave it out with --engines"
    without = {"out", "ops", "interpret", "engines", "batches", "at_once"}
    if args.report and given & without:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given & without))
        return f"--report writes what is stored; leave {options} out"
    return None


def _run(args: argparse.Namespace) -> int:
    args.out, args.ops = args.out or Path("gpu_suite"), args.ops or OPS
    args.shape, args.batches = args.shape or "llama-3.1-8b", args.batches or [1, 4, 16, 64]
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    sys.path.insert(0, str(ROOT / "kernels"))  # runs from a copy of the files, without an installation
    if args.engines is not None:
        return engines(args)
    from rayspec_kernels.common.report import write_report, write_whole

    if args.report:
        with _of_this_suite(args.report):
            write_report(stored(args.report, "results.json"), args.report)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)

    def save(results: dict[str, Any]) -> None:
        write_whole(args.out / "results.json", json.dumps(results, indent=1))

    results = run(args.ops, args.interpret, save)
    save(results)
    write_report(results, args.out)
    wrong = [c for c in results["checks"] if c["error"]]
    print(f"{len(results['checks'])} results checked, {len(wrong)} wrong, {len(results['timings'])} timed: {args.out}")
    return 1 if wrong else 0


def run(ops: Iterable[str], is_interpreted: bool, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """`save` is given what there is after every case, so that whatever ends the run, its results stay."""
    import torch

    from rayspec_kernels.common import bench, shapes

    if not is_interpreted and not torch.cuda.is_available():
        raise ValueError("no CUDA GPU here; --interpret checks the kernels without one")
    device = torch.device("cpu" if is_interpreted else "cuda")
    start = time.monotonic()
    results: dict[str, Any] = {"provenance": provenance(is_interpreted), "ceilings": None, "checks": [], "timings": [],
                               "left_out": {}}  # fmt: skip
    ceilings = None if is_interpreted else bench.ceilings(device)
    results["ceilings"] = vars(ceilings) if ceilings else None
    small = list(_cases(ops, shapes.SMALL, shapes.SMALL_BATCHES))
    cases = [*small, *([] if is_interpreted else _cases(ops, shapes.MODELS, shapes.BATCHES))]
    why = ""
    for number, case in enumerate(cases, 1):
        if not why and not is_interpreted and time.monotonic() - start > LIMIT_S:
            why = f"{LIMIT_S} s were over"
        if why:
            results["left_out"][case.name] = why
            continue
        said = one(case, ceilings if number > len(small) else None, device, results)
        print(f"[{number}/{len(cases)}] {case.name}: {said}", flush=True)
        if bench.is_lost(device):
            why = f"the GPU was lost in {case.name}"
            results["checks"].append({"name": case.name, "error": "the GPU was lost"})
        save(results)
    return results


def one(case: Any, ceilings: Any, device: Any, results: dict[str, Any]) -> str:
    """Check a case and, where there are ceilings, time what is right of it. In a few words, what came of it."""
    import torch

    from rayspec_kernels.common import bench

    try:
        wrong = bench.check(case, device)
        error = "; ".join(f"{launch}: {why}" for launch, why in wrong.items())
        results["checks"].append({"name": case.name, "error": error or None})
        if ceilings is None or bench.KERNEL in wrong:
            return f"WRONG: {error}" if error else "right"
        right = {name: call for name, call in case.alternatives.items() if name not in wrong}
        timing = bench.measure(replace(case, alternatives=right), ceilings, device)
        results["timings"].append(timing.as_dict())
        return f"{timing.seconds * 1e6:.1f} us" + (f", WRONG: {error}" if error else "")
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        results["left_out"][case.name] = "does not fit into this card's memory"
    except Exception as error:  # no case may cost the others their results
        if [check["name"] for check in results["checks"][-1:]] != [case.name]:  # it did not come as far as a launch
            results["checks"].append({"name": case.name, "error": bench.described(error)})
        results["left_out"][case.name] = f"not timed: {bench.described(error)}"
    return f"left out: {results['left_out'][case.name]}"


def engines(args: argparse.Namespace) -> int:
    """Exit status 1 where an engine failed."""
    sys.path.insert(0, str(ROOT))
    from rayspec.engine_suite.curves import measure_engines, write_curves
    from rayspec.engine_suite.models import SHAPES, head_specs

    if args.shape not in SHAPES:
        raise ValueError(f"--shape must be one of {', '.join(SHAPES)}, got {args.shape}")
    known = head_specs(SHAPES[args.shape])
    for option, names in (("--engines", args.engines), ("--tau", [name for name, _ in args.tau])):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"{option} must be of {', '.join(known)}, got {', '.join(unknown)}")
    if args.report:
        with _of_this_suite(args.report):
            found = stored(args.report, "engines.json")
            write_curves({**found, "tau": found.get("tau", {}) | dict(args.tau)}, args.report)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    made_by = provenance(is_interpreted=False)

    def save(found: dict[str, Any]) -> None:
        write_curves({**found, "provenance": made_by, "tau": dict(args.tau)}, args.out)

    heads = args.engines or list(known)
    found = measure_engines(args.shape, heads, batches=args.batches, save=save, at_once=args.at_once or 1)
    print(f"{len(found['rows'])} engines measured, {len(found['failed'])} failed: {args.out}")
    return 1 if found["failed"] else 0


def stored(folder: Path, name: str) -> dict[str, Any]:
    if not (folder / name).is_file():
        raise ValueError(f"--report must be the --out folder of an earlier run; {folder} has no {name}")
    try:
        return json.loads((folder / name).read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--report: {folder / name} is no JSON that this suite wrote ({error})") from error


@contextlib.contextmanager
def _of_this_suite(folder: Path) -> Iterator[None]:
    """A ValueError that says so where stored results are not what this suite writes."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"--report: what {folder} holds was not written by this suite ({error!r})") from error


def _batch(text: str) -> int:
    return _count(text, "requests")


def _count(text: str, what: str = "engines") -> int:
    if text.isdecimal() and 1 <= len(text) <= 6 and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a number of {what} from 1 to 999999, got {text[:40]!r}")


def _tau(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        if name and 1 <= float(value) < float("inf"):
            return name, float(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be HEAD=TAU with a tau of 1 or more, such as slimspec=2.9, got {text!r}")


def _cases(ops: Iterable[str], sizes: Iterable[Any], batches: Iterable[int]) -> Iterator[Any]:
    benches = [importlib.import_module(f"rayspec_kernels.{op}.bench") for op in ops]
    return (case for batch in batches for size in sizes for bench in benches for case in bench.cases(size, batch))


def provenance(is_interpreted: bool) -> dict[str, str]:
    import torch
    import triton

    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    commit = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "GPU": "none (interpreter)" if is_interpreted else _device_name(),
        "driver": "none" if is_interpreted else driver,
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}",
        "commit": os.environ.get("RAYSPEC_COMMIT", commit),  # a copy of the files has no history
        "command": shlex.join(["python", "jobs/gpu_suite.py", *sys.argv[1:]]),
    }


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"none ({platform.processor() or 'CPU'})"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
