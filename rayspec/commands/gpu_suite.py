"""All kernels on one GPU, right first, then how fast: rayspec gpu-suite --out FOLDER

At most 8 minutes. From a copy of the files, python jobs/gpu_suite.py needs torch and triton alone.

    rayspec gpu-suite --out results/             # on a GPU; from a copy of the files, python jobs/gpu_suite.py
    rayspec gpu-suite --interpret --out results/ # results alone, on a CPU, in Triton's interpreter
    rayspec gpu-suite --report results/          # the report again from results.json, figures included
    rayspec gpu-suite --engines --out results/   # second half: SGLang with every head and drafter
    rayspec gpu-suite --engines --report results/ --tau full=3.1 slimspec=3.0  # with taus measured elsewhere

Exit status 1 where any result is wrong, 2 for what cannot be run; a wrong kernel is not timed. The second half costs a
start of SGLang each (`--engines full slimspec` names some) and runs on a CPU too, with `--shape tiny`. What attends and
samples is SGLang's choice, as in a sweep; `--server-args attention_backend=triton` where FlashAttention is missing.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayspec.job import INTERRUPTED

OPS = ("head_topk", "slim_head", "indexed_head", "gather_dot", "quantized_linear", "router_topk", "grouped_rmsnorm",
       "slim_posterior", "tree_prune")  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rayspec gpu-suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for results.json and report.md (default: gpu_suite)")
    parser.add_argument("--interpret", action="store_true", help="check small sizes in Triton's interpreter")
    parser.add_argument("--ops", nargs="+", choices=OPS)
    parser.add_argument("--report", type=Path, help="write the report of this folder's results.json again, and no more")
    parser.add_argument(
        "--engines", nargs="*", metavar="HEAD", help="SGLang with these heads and drafters (default: all), and no more"
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
    parser.add_argument(
        "--limit-seconds", type=_seconds, metavar="S",
        help="of --engines: for the start of an engine, and again for measuring it (default: 240)",
    )  # fmt: skip
    parser.add_argument(
        "--server-args", nargs="+", type=_field, default=[], metavar="FIELD=VALUE",
        help="of --engines: fields of SGLang's ServerArgs, of every engine",
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
    except KeyboardInterrupt:
        print(
            f"cut off; what was measured until then is in {args.report or args.out}; a run begins anew", file=sys.stderr
        )
        return INTERRUPTED


def _unused(args: argparse.Namespace) -> str | None:
    """What of the options would be ignored beside the others."""
    given = {name for name, value in vars(args).items() if value}
    of_engines = given & {"shape", "batches", "tau", "at_once", "limit_seconds", "server_args"}
    if args.engines is None and of_engines:
        return f"--{min(of_engines).replace('_', '-')} must be given with --engines, which it is of"
    if args.engines is not None and given & {"ops", "interpret"}:
        return f"--{min(given & {'ops', 'interpret'})} is of the kernels alone; leave it out with --engines"
    without = {"out", "ops", "interpret", "engines", "batches", "at_once", "limit_seconds", "server_args"}
    if args.report and given & without:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given & without))
        return f"--report writes what is stored; leave {options} out"
    return None


def _run(args: argparse.Namespace) -> int:
    args.out, args.ops = args.out or Path("gpu_suite"), args.ops or OPS
    args.shape, args.batches = args.shape or "llama-3.1-8b", args.batches or [1, 4, 16, 64]
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    if args.engines is not None:
        return engines(args)
    from rayspec_kernels.common import suite
    from rayspec_kernels.common.report import report_text
    from sglang_ext.whole import write_whole

    if args.report:
        with _of_this_suite(args.report):
            write_whole(args.report / "report.md", report_text(stored(args.report, "results.json"), args.report))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)

    def save(results: dict[str, Any]) -> None:
        write_whole(args.out / "results.json", json.dumps(results, indent=1))

    results = suite.run(args.ops, args.interpret, suite.provenance(args.interpret), save)
    save(results)
    write_whole(args.out / "report.md", report_text(results, args.out))
    wrong = [c for c in results["checks"] if c["error"]]
    print(f"{len(results['checks'])} results checked, {len(wrong)} wrong, {len(results['timings'])} timed: {args.out}")
    return 1 if wrong else 0


def engines(args: argparse.Namespace) -> int:
    """Exit status 1 where an engine failed."""
    from rayspec.engine_suite.curves import LIMIT_S, measure_engines, write_curves
    from rayspec.engine_suite.models import SHAPES, draftings
    from rayspec_kernels.common import suite
    from sglang_ext.adapter.server_fields import check_overrides

    check_overrides(dict(args.server_args), "--server-args")
    if args.shape not in SHAPES:
        raise ValueError(f"--shape must be one of {', '.join(SHAPES)}, got {args.shape}")
    known = draftings(SHAPES[args.shape])
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
    made_by = suite.provenance(is_interpreted=False)

    def save(found: dict[str, Any]) -> None:
        write_curves({**found, "provenance": made_by, "tau": dict(args.tau)}, args.out)

    heads = args.engines or list(known)
    found = measure_engines(
        args.shape,
        heads,
        batches=args.batches,
        save=save,
        limit_s=args.limit_seconds or LIMIT_S,
        at_once=args.at_once or 1,
        server_args=dict(args.server_args),
    )
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


def _seconds(text: str) -> int:
    return _count(text, "seconds")


def _field(text: str) -> tuple[str, Any]:
    """A value is what JSON says, or else text."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be FIELD=VALUE, such as attention_backend=triton, got {text!r}")
    with contextlib.suppress(ValueError, RecursionError):
        return name, json.loads(value)
    return name, value


def _tau(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        if name and 1 <= float(value) < float("inf"):
            return name, float(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"must be HEAD=TAU with a tau of 1 or more, such as slimspec=2.9, got {text!r}")
