"""Where the counters of replicas are collected on a cluster of several nodes, and what is said once they are lost."""

import os
import time
from contextlib import suppress
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from servers import two_ray_nodes

from rayspec.farm.actor import cluster
from rayspec.serving.cluster import RayStage
from rayspec.serving.deployed import _only_board
from rayspec.serving.figures import Totals


@pytest.mark.slow
def test_the_board_lies_on_the_node_of_the_command() -> None:
    """In a process of its own: one that has used Ray keeps its token, and this cluster has none."""
    with two_ray_nodes() as (variables, _):
        command = get_context("spawn").Process(target=look_for_boards, args=(variables,))
        command.start()
        command.join()
    assert command.exitcode == 0, "the output above says why"


def look_for_boards(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    champion: Any = SimpleNamespace(name="a")
    nothing: Any = None
    live: Any = SimpleNamespace(folder="m-1")
    serving: Any = SimpleNamespace(follows_policy=False, scale=None)
    with cluster(None):
        for _ in range(4):
            board = _only_board()
            place = board.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
            assert ray.get(place) == ray.get_runtime_context().get_node_id()
            stage = RayStage("m", nothing, serving, board, live)
            ray.get(board.put.remote("a", "x", Totals(requests=1.0)))
            assert stage.totals(champion) == Totals(requests=1.0)
            ray.kill(board)
            wait_for_its_end(board)
            assert stage.totals(champion) is None


def wait_for_its_end(board: Any) -> None:
    """It may answer for a moment after it was told to end."""
    deadline = time.monotonic() + 60
    with suppress(ray.exceptions.RayActorError):
        while True:
            assert time.monotonic() < deadline, "it still answers"
            ray.get(board.__ray_ready__.remote(), timeout=60)
