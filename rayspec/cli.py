"""The command `rayspec`: names its subcommands and hands on to one, without importing the others."""

import argparse
import importlib
from importlib.metadata import version
from types import ModuleType
from typing import NoReturn

from rayspec.job import run

COMMANDS = {
    "fetch": "bring a target model to this machine",
    "prepare": "make what drafters are trained on: the target's answers",
    "train": "train draft heads on the target's own answers",
    "calibrate": "count what reduced heads keep: vocabularies, clusters, affinities",
    "sweep": "measure drafters against plain decoding",
    "recipe": "all steps from a model's name to a champion, as a recipe has them",
    "report": "show a sweep, and register its winner",
    "gate": "compare two drafters, champions or endpoints; fails on a regression",
    "serve": "serve a champion through SGLang's endpoint",
    "export": "write drafters in the form that SGLang serves without rayspec",
    "convert": "read and write other projects' drafters and token lists",
    "gpu-suite": "check and time the kernels, and heads and drafters in SGLang, on this machine's GPU",
    "pack": "write drafters without the rows of their target's head",
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rayspec",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<14}{what}" for name, what in COMMANDS.items()),
    )
    parser.add_argument("--version", action="version", version=f"rayspec {version('rayspec')}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below; each has --help")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")
    options = parser.parse_args(arguments)
    return module_of(options.command).main(options.arguments)


def module_of(command: str) -> ModuleType:
    return importlib.import_module(f"rayspec.commands.{command.replace('-', '_')}")


def command() -> NoReturn:
    """The console script."""
    run(main)


def script(name: str) -> NoReturn:
    """What jobs/NAME.py is for `ray job submit`: the command of that name."""
    run(lambda arguments: main([name, *arguments]))


if __name__ == "__main__":
    command()
