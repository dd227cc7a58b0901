"""Work in which two processes wait for each other: where one fails, the other neither waits for it nor goes on."""

import json
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.distributed.parallel_state import GroupCoordinator
from torch import distributed, multiprocessing, set_num_threads

from sglang_ext.adapter.ranks import in_step

BARRIERS = 3
OTHERS = "the log says why"


def _rank(rank: int, folder: str, fails_after: tuple[int | None, int | None]) -> None:
    """Capture, with barriers of SGLang's between what may fail; say how it ended, and after how many of them."""
    set_num_threads(1)  # a forked process has none of its parent's threads, and would wait for them
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    group = SimpleNamespace(world_size=2, cpu_group=distributed.group.WORLD)
    passed = 0

    def out_of_memory() -> None:
        if passed == fails_after[rank]:
            raise MemoryError(f"out of memory on {rank}")

    def capture() -> str:
        nonlocal passed
        try:
            out_of_memory()
            for _ in range(BARRIERS):
                GroupCoordinator.barrier(group)
                passed += 1
                out_of_memory()
        except Exception as error:
            raise RuntimeError(OTHERS) from error
        return "captured"

    try:
        ended = in_step(group, capture)
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    GroupCoordinator.barrier(group)  # SGLang's own, behind a call of the scheduler
    Path(folder, f"{rank}.json").write_text(json.dumps([ended, passed]))
    distributed.destroy_process_group()


ON_1 = "RanksDiffer: on tensor-parallel rank 1: out of memory on 1"


@pytest.mark.parametrize(
    ("fails_after", "expected"),
    [
        pytest.param((None, None), [["captured", 3]] * 2, id="none"),
        pytest.param((None, 0), [[ON_1, 0]] * 2, id="before the first barrier"),
        pytest.param((None, 2), [[ON_1, 2]] * 2, id="between two"),
        pytest.param((None, 3), [[ON_1, 3]] * 2, id="behind the last"),
        pytest.param((2, 1), [[ON_1, 1]] * 2, id="the first that fails"),
        pytest.param((1, 1), [[f"RuntimeError: {OTHERS}", 1]] * 2, id="both"),
    ],
)
def test_over_two_processes(
    fails_after: tuple[int | None, int | None], expected: list[list[str | int]], tmp_path: Path
) -> None:
    multiprocessing.start_processes(_rank, (str(tmp_path), fails_after), nprocs=2, start_method="fork")
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == expected


def _exchanging_rank(rank: int, folder: str) -> None:
    """Rank 1 fails where rank 0 goes on to an exchange of SGLang's in the same group, as its custom all-reduce does
    when a capture ends."""
    set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=6)
    )
    group = SimpleNamespace(world_size=2, cpu_group=distributed.group.WORLD)

    def capture() -> str:
        GroupCoordinator.barrier(group)
        if rank == 1:
            raise MemoryError("out of memory on 1")
        handles: list[str | None] = [None, None]
        distributed.all_gather_object(handles, "handles")
        Path(folder, "read").write_text(json.dumps(handles))
        return "captured"

    with suppress(Exception):
        in_step(group, capture)
    Path(folder, f"{rank} ended").touch()


def test_what_ranks_say_is_not_taken_for_what_sglang_exchanges(tmp_path: Path) -> None:
    """The exchange waits for the one that failed until its own time is over."""
    multiprocessing.start_processes(_exchanging_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    assert {file.name for file in tmp_path.iterdir()} - {"meet"} == {"0 ended", "1 ended"}, "nothing was read"
