"""Other projects' drafters, in and out: rayspec convert FROM TO --target TARGET [--format F] [--to F] [--plan]

Reads EAGLE-3 (SafeAILab, SpecForge, speculators, ModelOpt), Medusa, Hydra, FR-Spec's token lists, or a drafter of ours,
and writes TO in our form, SGLang's or speculators', whole or not at all, every tensor's bits as they were. Exits 0 when
TO is there, 2 for what cannot be converted, with the reason.
"""

import argparse
import sys
from pathlib import Path

from rayspec.job import problem, set_up


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rayspec convert", description=__doc__.split("\n\n")[0])
    parser.add_argument("source", type=Path, metavar="FROM", help="a published folder, or a file of tokens")
    parser.add_argument("folder", type=Path, metavar="TO", help="the folder to write")
    parser.add_argument("--target", required=True, help="the target that it is for: a folder, or a fetched name")
    parser.add_argument("--format", default="auto", help="what FROM is, where auto does not see it (docs/formats.md)")
    parser.add_argument("--to", default="rayspec", help="rayspec, sglang or speculators")
    parser.add_argument("--plan", action="store_true", help="read and check everything, and write nothing")
    parser.add_argument(
        "--allow-weights-only-pickle", action="store_true", help="read .pt and .bin by torch's reader of tensors alone"
    )
    options = parser.parse_args(arguments)
    set_up()

    from rayspec.convert import prepare, write  # imports torch

    try:
        conversion = prepare(
            options.source,
            options.folder,
            options.target,
            format=options.format,
            to=options.to,
            allow_pickle=options.allow_weights_only_pickle,
        )
        print(conversion.describe(), flush=True)
        if not options.plan:
            write(conversion)
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    return 0
