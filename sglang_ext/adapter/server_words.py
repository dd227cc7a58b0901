"""Asks SGLang's own parser whether its server takes the words of a command line.

It is asked in a process of its own: SGLang takes ten seconds to import, and leaves variables and loggers behind.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from sglang_ext.adapter.patches import hooks_of


def check_taken(words: Sequence[str]) -> None:
    """Raise ValueError with what SGLang says of words that its server does not take."""
    asked = subprocess.run([sys.executable, "-m", __name__, *words], capture_output=True, text=True, check=False)
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or [f"its parser ended with status {asked.returncode}"]
        raise ValueError(
            f"SGLang's server does not take this: {_without_values(said[-1])}; python -m sglang.launch_server --help "
            "lists its flags"
        )


def _without_values(said: str) -> str:
    """What was mistyped may be a flag whose value is a secret."""
    begins, found, words = said.partition("unrecognized arguments: ")
    flags = [word.partition("=")[0] for word in words.split(" ") if word.startswith("-")]
    return f"{begins}{found}{' '.join(flags) or 'words without a flag'}" if found else said


def parse(words: Sequence[str]) -> None:
    """Exit with status 2 and a message where SGLang's server would."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    with hooks_of(ServerArgs.__module__):  # those of others would import all of SGLang, some four seconds
        load_plugins()  # ours names the algorithms
    parser = argparse.ArgumentParser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    parser.parse_args(list(words))


if __name__ == "__main__":
    parse(sys.argv[1:])
