"""What the interpreter cannot show: that kernels compile for a GPU, and what they do under its graphs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from packaging import version

from rayspec_kernels.common import bench
from rayspec_kernels.common.shapes import SMALL
from rayspec_kernels.gather_dot.bench import cases as gather_dot_cases
from rayspec_kernels.grouped_rmsnorm.bench import cases as grouped_rmsnorm_cases
from rayspec_kernels.head_topk.bench import cases as head_topk_cases
from rayspec_kernels.indexed_head.bench import cases as indexed_head_cases
from rayspec_kernels.quantized_linear.bench import cases as quantized_linear_cases
from rayspec_kernels.router_topk.bench import cases as router_topk_cases
from rayspec_kernels.slim_head.bench import cases as slim_head_cases
from rayspec_kernels.slim_posterior.bench import cases as slim_posterior_cases
from rayspec_kernels.tree_prune.bench import cases as tree_prune_cases

HEAD = "_tile_each_kernel"
LOOPS = {HEAD, "_linear_kernel", "_hidden_kernel", "_scores_kernel", "_gather_dot_kernel", "_gemv_kernel"}
# bytes a thread: Triton before 3.8 lacks a few registers in three versions (docs/results/loop-instructions.md)
MOST_SPILLED = 0 if version.parse(triton.__version__) >= version.parse("3.8") else 16
SMALL_SHARED = 99 * 1024  # bytes that compute capability 8.6, 8.9 and 12.0 give a program
IN_FLOAT32 = ("_gather_dot_kernel", "_gemv_kernel")  # a row at a time without tensor cores: their numbers are converted


def compiled(capability: int) -> list[dict[str, Any]]:
    """What the compiler and the assembler say of each; both come with Triton, and so does the disassembler."""
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump").exists():
        pytest.skip("this Triton comes without cuobjdump, which reads what was compiled")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_hopper.py")
    command = [sys.executable, script, str(capability)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    return [json.loads(line) for line in out.stdout.splitlines()]


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    return compiled(90)


def test_int4_becomes_numbers_without_conversions(kernels: list[dict[str, Any]]) -> None:
    """Converted one by one, the nibbles of a turn would take a third more instructions, slow ones."""
    int4 = [kernel for kernel in kernels if kernel["format"] == "int4" and kernel["name"] not in IN_FLOAT32]
    assert {kernel["name"] for kernel in int4} == {HEAD, "_linear_kernel", "_hidden_kernel"}
    assert [kernel for kernel in int4 if kernel["conversions"]] == []


def test_kernels_compile_for_hopper_without_spilling(kernels: list[dict[str, Any]]) -> None:
    names = {kernel["name"] for kernel in kernels}
    assert len(names) == 16, names
    assert [kernel for kernel in kernels if kernel["spilled"] > MOST_SPILLED] == []
    # CUDA's assemblers before 13.3 overwrite registers that a wgmma still reads (common/rows_dot.py)
    assert [kernel for kernel in kernels if kernel["wgmma"] == "registers"] == []
    assert sum(kernel["wgmma"] == "shared" for kernel in kernels if kernel["name"] == HEAD) == 10  # those of 16 bits


def test_every_loop_copies_ahead(kernels: list[dict[str, Any]]) -> None:
    """Also where 16 does not divide the width: scalar loads would wait in registers."""
    assert {kernel["name"] for kernel in kernels} >= LOOPS
    assert [kernel for kernel in kernels if kernel["name"] in LOOPS and not kernel["copies"]] == []


def test_small_gpus_have_the_shared_memory() -> None:
    assert [kernel for kernel in compiled(89) if kernel["shared"] > SMALL_SHARED] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA GPU")
@pytest.mark.parametrize(
    "cases",
    [head_topk_cases, slim_head_cases, indexed_head_cases, gather_dot_cases, quantized_linear_cases, router_topk_cases,
     grouped_rmsnorm_cases, slim_posterior_cases, tree_prune_cases],
    ids=lambda cases: cases.__module__.split(".")[1],
)  # fmt: skip
def test_graph_replay_follows_its_inputs(cases: Callable[..., list[bench.Case]], device: torch.device) -> None:
    """Captured once, replayed on new values in the same memory: nothing may have been decided by the first ones."""
    for case in cases(SMALL[0], 3):
        inputs, fresh = (case.make(bench.generator(device, seed)) for seed in (0, 1))
        case.kernel(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = case.kernel(*inputs)
        for old, new in zip(bench.tensors(inputs), bench.tensors(fresh), strict=True):
            old.copy_(new)
        graph.replay()
        case.check(inputs, out)
