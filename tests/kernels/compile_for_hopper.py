"""Compile every kernel for an H100 or H200 (or for the compute capability that is named: 89 is 8.9) on a machine
without a GPU, and print what compiler and assembler say of each.

The interpreter finds wrong results; this finds what only the compiler refuses, and registers that spill. The host code
runs as it is: only the last step, the launch, is left out. One line a kernel: {name, format, registers, spilled,
shared, copies, wgmma, conversions}; format is that of the weights, shared how many bytes of shared memory it takes,
copies how many instructions copy into it ahead, wgmma "none" or where its left operand comes from, "shared" or
"registers", and conversions how many instructions of the loops turn integers into numbers (counted for int4 alone).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rayspec_kernels.common.best import MAX_K
from rayspec_kernels.common.logits_topk import logits_topk
from rayspec_kernels.common.quantized import GROUP_SIZES, Quantized
from rayspec_kernels.gather_dot.kernel import gather_dot_kernel
from rayspec_kernels.grouped_rmsnorm.kernel import grouped_rmsnorm_backward_kernel, grouped_rmsnorm_kernel
from rayspec_kernels.head_topk.kernel import head_topk_kernel
from rayspec_kernels.indexed_head.kernel import indexed_head_kernel
from rayspec_kernels.indexed_head.reference import Tiles
from rayspec_kernels.quantized_linear.kernel import linear_kernel, tiled_kernel
from rayspec_kernels.router_topk.kernel import router_topk_kernel, union_tiles_kernel
from rayspec_kernels.router_topk.reference import Router
from rayspec_kernels.slim_head.kernel import slim_head_kernel
from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.slim_posterior.kernel import slim_posterior_kernel
from rayspec_kernels.slim_posterior.reference import MAX_SIZES, Sizes
from rayspec_kernels.tree_prune.kernel import tree_prune_kernel
from rayspec_kernels.tree_prune.reference import Expansion

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
BRANCH = re.compile(r"\bBRA\b.*0x([0-9a-f]+)")
V, H, R, M = 128256, 4096, 512, 512
MOST_PROGRAMS = 65_535  # along the second and third axis of a launch


class NoDevice(CudaDriver):  # type: ignore[misc]
    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def launch_everything() -> None:
    int4 = Quantized(empty(V, H // 2, dtype=torch.uint8), empty(V, H // 64, 2))
    int8 = Quantized(empty(V, H, dtype=torch.int8), empty(V))
    fp8 = Quantized(empty(V, H, dtype=torch.float8_e4m3fn), empty(V))
    for batch in (1, 64):
        slim_head_kernel(empty(batch, H), empty(R, H), empty(V, R), 8)
        head_topk_kernel(empty(batch, H), int4, 8)
    logits_topk(empty(4, V, dtype=torch.float32), 8)
    for group in GROUP_SIZES:
        for batch in (1, 64):
            head_topk_kernel(empty(batch, H), Quantized(int4.values, empty(V, H // group, 2)), 8)
    head_topk_kernel(empty(1, H), int8, 8)
    for rank in (360, 180):  # of gpt-oss-20b's low-rank heads: 8 and 4 divide them
        head_topk_kernel(empty(1, rank), empty(V, rank), 8)
        head_topk_kernel(empty(1, rank), Quantized(empty(V, rank, dtype=torch.int8), empty(V)), 8)
    head_topk_kernel(empty(64, H, dtype=torch.float16), empty(V, H, dtype=torch.float16), 8)
    wide_BH = empty(64, H, dtype=torch.float32)
    for weight in (empty(V, H, dtype=torch.float32), int8, fp8):
        head_topk_kernel(wide_BH, weight, 8)
    head_topk_kernel(empty(16, H), empty(V, H), MAX_K)
    head_topk_kernel(empty(1, H), empty(V, H), 1)
    for batch in (1, 64):
        head_topk_kernel(empty(batch, H), fp8, 1)
    ids_V, ranges_t2 = empty(V, dtype=torch.int32), empty(400, 2, dtype=torch.int32)
    indexed_head_kernel(empty(4, H), empty(V, H), ids_V, 8, Tiles(ranges_t2, 128))
    indexed_head_kernel(empty(4, H), int4, ids_V, 8, Tiles(ranges_t2, 256))
    for groups in (4, 64):  # rows of their own, as `sglang_ext` asks for them
        of_groups = Tiles(ranges_t2, 64, empty(400, groups, dtype=torch.int8))
        for weight in (empty(V, H), int8, int4):
            indexed_head_kernel(empty(groups, H), weight, ids_V, 8, of_groups)
    for weight in (empty(V, H), int8, fp8, int4):
        gather_dot_kernel(empty(2, H), weight, empty(2, 2048, dtype=torch.int64))
    gather_dot_kernel(empty(70_000, 72), empty(V, 72), empty(70_000, 8, dtype=torch.int64))
    for weight in (
        Quantized(empty(V, R, dtype=torch.int8), empty(V)),
        Quantized(empty(V, R // 2, dtype=torch.uint8), empty(V, R // 64, 2)),
    ):
        linear_kernel(empty(1, R), weight)
        linear_kernel(empty(64, R), weight)
    linear_kernel(empty(1, 360), empty(R, 360))
    for weight in (empty(R, H), Quantized(empty(R, H // 2, dtype=torch.uint8), empty(R, H // 64, 2))):
        for batch in (1, 4, 64):
            linear_kernel(empty(batch, H), weight)
        tiled_kernel(empty(16, H), weight, parts=4)
    x_BH, starts = empty(4, H), empty(M + 2, dtype=torch.int32)
    few = (
        Quantized(empty(R, H, dtype=torch.uint8), empty(R, H // 32, 2)),
        Quantized(empty(M, R, dtype=torch.int8), empty(M)),
    )
    for into, out in ((empty(R, 2 * H), empty(M, R)), few):
        router = Router(into, empty(R), out, empty(M))
        router_topk_kernel(x_BH, x_BH, router, 100, starts, 128, 400, 1e-5)
    for groups in (2, 64):
        union_tiles_kernel(empty(64, M, dtype=torch.float32), 100, starts, 64, 400, groups)
    x_NC, weight_C = empty(8, 4 * H), empty(4 * H)
    grouped_rmsnorm_kernel(x_NC, weight_C, 4, 1e-5)
    grouped_rmsnorm_backward_kernel(x_NC, x_NC, weight_C, empty(8, 4, dtype=torch.float32))
    one_V = empty(V, dtype=torch.float32)
    correlations = Correlations(empty(10**6, dtype=torch.int64), empty(10**6, dtype=torch.float32), one_V, one_V)
    for D, k, count, nodes in (Sizes(1, 1, 1, 2), Sizes(4, 8, 40, 64), MAX_SIZES):
        ids_BDk, log_p_BDk = empty(4, D, k, dtype=torch.int64), empty(4, D, k, dtype=torch.float32)
        slim_posterior_kernel(empty(4, dtype=torch.int64), ids_BDk, log_p_BDk, correlations, 0.0, count, nodes)
    root_B = empty(4, dtype=torch.int64)
    for depth, topk, count, nodes in ((1, 1, 1, 2), (4, 10, 40, 64), (8, 16, 64, 256)):
        C, entries = topk + (depth - 1) * topk**2, 1 + (depth - 1) * topk
        parents_BP, tokens_BC = empty(4, entries, dtype=torch.int64), empty(4, C, dtype=torch.int64)
        p_BC = empty(4, C, dtype=torch.float32)
        tree_prune_kernel(root_B, Expansion(parents_BP, p_BC, tokens_BC), correlations, 0.5, topk, depth, count, nodes)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes a thread that spilled to memory)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        out = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", out)
    assert found, out
    return int(found[1]), int(found[2]) + int(found[3])


class Loop(NamedTuple):
    """From the target of a backward branch to the branch."""

    instructions: list[str]
    left_out_by_branches: list[int]  # how many instructions each branch inside may leave out


def disassembled(cubin: bytes) -> tuple[list[str], list[Loop]]:
    """All instructions of a kernel, and its loops, innermost first."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]
    assert lines, "an instruction of another form"
    jumps = [(at, int(found[1], 16)) for at, what in lines if (found := BRANCH.search(what))]
    loops = []
    for end, begin in jumps:
        if begin < end:
            skips = [(to - at) // 16 for at, to in jumps if begin <= at < to <= end]
            loops.append(Loop([what for at, what in lines if begin <= at <= end], skips))
    return [what for _, what in lines], loops


def conversions(loops: list[Loop]) -> int:
    return sum("I2F" in instruction for loop in loops for instruction in loop.instructions)


def left_operand(ptx: str) -> str:
    """Of `wgmma.mma_async {sums}, left, right`: a descriptor of shared memory, or {registers}."""
    lefts = re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\},\s*(\S)", ptx)
    assert len(lefts) == ptx.count("wgmma.mma_async"), "an instruction of another form"
    return "registers" if "{" in lefts else "shared" if lefts else "none"


def main(capability: int = 90) -> None:
    assert os.environ.get("TRITON_INTERPRET", "0") != "1", "the interpreter compiles nothing"
    driver.set_active(NoDevice(capability))
    for module in list(sys.modules.values()):
        if hasattr(module, "multiprocessors"):  # each that imported it
            module.multiprocessors = lambda device: 132
    compiled = {}
    run = JITFunction.run

    def without_launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        assert max(grid[1:], default=1) <= MOST_PROGRAMS, (self.fn.__name__, grid)
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled[kernel.hash] = (self.fn.__name__, options.get("FORMAT"), kernel)
        return kernel

    JITFunction.run = without_launch
    launch_everything()
    for name, form, kernel in compiled.values():
        registers, spilled = resources(kernel.asm["cubin"])
        found = {
            "name": name,
            "format": form,
            "registers": registers,
            "spilled": spilled,
            "shared": kernel.metadata.shared,
            "copies": kernel.asm["ptx"].count("cp.async.c"),
            "wgmma": left_operand(kernel.asm["ptx"]),
            "conversions": conversions(disassembled(kernel.asm["cubin"])[1]) if form == "int4" else None,
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
