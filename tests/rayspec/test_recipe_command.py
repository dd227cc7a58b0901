"""A step of `rayspec recipe` is ended with the command, and its clean-up is not cut off."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEP = """
import sys, time
from pathlib import Path
from rayspec.job import set_up
set_up()
folder = Path(sys.argv[1])
try:
    (folder / "begun").touch()
    time.sleep(60)
finally:
    (folder / "ending").touch()
    time.sleep(0.5)
    (folder / "clean").touch()
"""
COMMAND = """
import sys
from rayspec.commands.recipe import run
from rayspec.job import set_up
set_up()
sys.exit(run([sys.executable, "-c", sys.argv[2], sys.argv[1]]))
"""


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_is_ended_with_the_command_and_cleans_up(times: int, tmp_path: Path) -> None:
    """The second signal comes while the step cleans up, as Ray's and the command's do."""
    command = subprocess.Popen([sys.executable, "-c", COMMAND, str(tmp_path), STEP])
    for what in ("begun", "ending")[:times]:
        while not (tmp_path / what).exists():
            assert command.poll() is None
            time.sleep(0.01)
        command.send_signal(signal.SIGTERM)
    assert command.wait(30) == 128 + signal.SIGTERM
    assert (tmp_path / "clean").exists()


def test_a_signal_is_told_as_a_shell_does(tmp_path: Path) -> None:
    from rayspec.commands.recipe import run

    assert run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]) == 128 + 9
    assert run([sys.executable, "-c", "raise SystemExit(3)"]) == 3
