"""Drafters as they ship: rayspec pack TARGET_FOLDER OUTPUT_FOLDER DRAFTER_FOLDER...

Writes each drafter to OUTPUT_FOLDER/<name> without the rows that it has from the target's head. Exits 0 when all are
there, 2 for what cannot be packed.
"""

import argparse
import sys
from pathlib import Path

from rayspec.job import problem


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rayspec pack", description=__doc__.split("\n\n")[0])
    parser.add_argument("target", type=Path, help="the target's folder")
    parser.add_argument("output", type=Path, help="where the packed drafters go")
    parser.add_argument("drafters", type=Path, nargs="+", help="folders of trained drafters")
    options = parser.parse_args(arguments)

    from rayspec.packing import pack  # imports torch

    try:
        for drafter in options.drafters:
            size = pack(drafter, options.output / drafter.name, options.target)
            print(f"{drafter.name}: {size / 2**20:.2f} MiB")
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    return 0
