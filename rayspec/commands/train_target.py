"""Train and export the demo target: rayspec train_target --config configs/train/target.yaml [key=value ...]

The same command continues after an interruption. Exits 0 when the target is exported, 2 for a config that cannot run.
"""

import argparse
import sys

from rayspec.config import load_config
from rayspec.job import problem, set_up


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rayspec train_target", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", metavar="FILE", default="configs/train/target.yaml", help="YAML of the training")
    parser.add_argument("--plan", action="store_true", help="print what would be done and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
    set_up()

    try:
        from rayspec.training.target_config import TargetTrainConfig  # imports transformers
        from sglang_ext.artefacts import TRAINED_TARGET
        from sglang_ext.folders import check_place

        config = load_config(TargetTrainConfig, options.config, options.overrides)
        print(config.describe(), flush=True)
        check_place(config.export_folder, TRAINED_TARGET)  # before hours of training
        if not options.plan:
            from rayspec.training.target import train
            from rayspec.training.target_export import export

            export(config, train(config))
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    return 0
