"""All steps of a recipe, from a model's name to a champion: rayspec recipe MODEL RECIPE NAME [--plan]

RECIPE is a folder of configs, such as configs/recipes/llama-3.1-8b-instruct. Each step is a command of its own, which
makes nothing twice: run again after anything, the same command goes on where it stopped. What the champion is served
by is printed last. Exits as the first step that fails does, 2 for a recipe that lacks a config.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rayspec.config import shipped_or
from rayspec.job import set_up

CONFIGS = ("train", "calibrate", "train_truncated", "heads", "sweep")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rayspec recipe", description=__doc__.split("\n\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a name of the Hugging Face hub, a folder, or a packaged target")
    parser.add_argument("recipe", metavar="RECIPE", help="a folder such as configs/recipes/llama-3.1-8b-instruct")
    parser.add_argument("name", metavar="NAME", help="what sweep and champion are called")
    parser.add_argument("--plan", action="store_true", help="print the steps and stop; each has a --plan of its own")
    options = parser.parse_args(arguments)
    set_up()
    files = [f"{options.recipe}/{config}.yaml" for config in CONFIGS]
    missing = [file for file in files if not shipped_or(Path(file)).is_file()]
    if missing:
        said = f"there is no {', '.join(missing)}; give a folder such as configs/recipes/llama-3.1-8b-instruct"
        print(f"error: {options.recipe} is no recipe: {said}", file=sys.stderr)
        return 2
    *steps, serving = steps_of(options.model, options.recipe, options.name)
    for step in steps:
        print(shlex.join(["rayspec", *step]), flush=True)
        if not options.plan and (status := run([sys.executable, "-m", "rayspec.cli", *step])) != 0:
            print(f"error: that step exited {status}; the same command goes on with it", file=sys.stderr)
            return status
    print(f"to serve the champion: {shlex.join(['rayspec', *serving])}")
    return 0


def steps_of(model: str, recipe: str, name: str) -> list[list[str]]:
    """The commands from a model's name to its server."""
    train, calibrate, train_truncated, heads, sweep = (f"{recipe}/{config}.yaml" for config in CONFIGS)
    return [
        ["fetch", model],
        ["train", "--config", train, f"target={model}"],
        ["calibrate", "--config", calibrate, f"target={model}"],
        ["train", "--config", train_truncated, f"target={model}"],
        ["train", "--config", heads, f"target={model}"],
        ["sweep", "--config", sweep, f"target={model}", f"name={name}", "--once"],
        ["report", "--sweep", name, "--promote", "--once", "--model", name],
        ["serve", f"models:/{name}@champion"],
    ]


def run(command: Sequence[str]) -> int:
    """The exit status of a command, of a signal as a shell says it. In a process of its own, so that a step leaves no
    Ray and no run of MLflow to the next; ended with this one."""
    process = subprocess.Popen(command)
    try:
        status = process.wait()
        return status if status >= 0 else 128 - status
    except SystemExit:  # SIGTERM, which Ray sends to the step as well, and others to this process alone
        process.terminate()
        process.wait()
        raise
    except KeyboardInterrupt:  # which the step has got too
        process.wait()
        raise
