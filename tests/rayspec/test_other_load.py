"""What other programs use of the machine, told apart from what is our own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from rayspec.farm.other_load import OtherLoad

SPIN = "import time; end = time.monotonic() + 300\nwhile time.monotonic() < end: pass"


@pytest.fixture
def core() -> Iterator[int]:
    """One core that this process and what it starts are bound to, so that load on the others does not count."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield min(before)
    os.sched_setaffinity(0, before)


def test_a_program_of_others_is_seen(core: int) -> None:
    """Started by a shell that ends at once, so that it is nobody's child."""
    shell = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -c '{SPIN}' >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, check=True
    )
    other = psutil.Process(int(shell.stdout))
    try:
        load = OtherLoad()
        time.sleep(2)
        assert other.pid not in {p.pid for p in psutil.Process().children(recursive=True)}
        assert load.share() > 0.3
    finally:
        other.kill()


def test_our_own_are_counted_as_ours(core: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        load, before = OtherLoad(), psutil.Process(child.pid).cpu_times().user
        deadline, used = time.monotonic() + 250, 0.0
        while used < 0.5 and time.monotonic() < deadline:  # a busy machine gives it little time
            time.sleep(0.5)
            used = psutil.Process(child.pid).cpu_times().user - before
        assert used >= 0.5
        assert load._read()[2] - load._start[2] >= used - 1e-6  # sums of hundredths
    finally:
        child.kill()
        child.wait()


def test_what_a_child_used_is_ours_after_its_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", SPIN])
    used, deadline = 0.0, time.monotonic() + 250
    while used < 0.5 and time.monotonic() < deadline:
        time.sleep(0.5)
        used = psutil.Process(child.pid).cpu_times().user
    load = OtherLoad()
    child.kill()
    child.wait()
    assert used >= 0.5
    assert load._start[2] >= used - 1e-6  # sums of hundredths
    assert load._read()[2] >= load._start[2] - 1e-6
