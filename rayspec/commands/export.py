"""Stock EAGLE-3 checkpoints of drafters: rayspec export drafters=[full,slimspec-r64] output_dir=DIR [--plan]

Writes each drafter (a shipped name or a folder) to output_dir/<name>/ as SGLang's own LlamaForCausalLMEagle3, which is
served without rayspec. Exits 0 when every drafter is there, 2 for one that the stock form cannot express.
"""

import argparse
import sys

from rayspec.config import load_config
from rayspec.job import problem
from rayspec.shipped import leaving_nothing


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rayspec export", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", metavar="FILE", help="YAML of the job; defaults alone without it")
    parser.add_argument("--plan", action="store_true", help="print what would be done and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)

    try:
        from rayspec.export import ExportConfig, prepare, write  # imports torch

        with leaving_nothing(options.plan):
            exports = prepare(load_config(ExportConfig, options.config, options.overrides))
            print("\n".join(export.describe() for export in exports), flush=True)
        for export in exports:
            if not (options.plan or export.is_done):
                write(export)
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    return 0
