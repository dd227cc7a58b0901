"""A driver whose Ray node dies is told, in time to close what it has open."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRIVER = """
import sys, time, psutil, ray
from rayspec.farm.actor import cluster
from rayspec.farm.lifeline import NodeLost

try:
    with cluster(None):
        (raylet,) = (p for p in psutil.Process().children(recursive=True) if p.name() == "raylet")
        raylet.kill()
        start = time.monotonic()
        try:
            while time.monotonic() < start + 60:
                ray.wait([ray.ObjectRef.from_random()], timeout=1)
        except Exception as error:
            print("swallowed", error)
except NodeLost as error:
    print(f"told after {time.monotonic() - start:.0f} s:", error, flush=True)
"""


def test_the_death_of_the_raylet_raises() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "this machine's Ray node is gone: its raylet process has ended" in done.stdout, done.stdout + done.stderr
    assert "swallowed" not in done.stdout
    assert time.monotonic() - start < 600
