"""Train and export the demo target: python jobs/train_target.py --config configs/train/target.yaml key=value ..."""

from __future__ import annotations

import argparse
from pathlib import Path

from rayspec.config import load_config
from rayspec.training.target import train
from rayspec.training.target_config import TargetTrainConfig
from rayspec.training.target_export import TARGET, export
from sglang_ext.folders import check_place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--config", default="configs/train/target.yaml", help="YAML that says what differs from defaults"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. token_budget=2000000 corpus.min_bytes=500"
    )
    arguments = parser.parse_args()
    config = load_config(TargetTrainConfig, arguments.config, arguments.overrides)
    check_place(Path(config.export_dir), TARGET)  # before hours of training
    export(config, train(config))


if __name__ == "__main__":
    main()
