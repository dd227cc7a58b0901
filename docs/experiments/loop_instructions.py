"""How many instructions the loops of the fused heads have, as compiled for an H100, on a machine without a GPU.

    PYTHONPATH=.:tests/kernels python docs/experiments/loop_instructions.py

Prints a line for each kernel of a low-rank head and of one in int4, one stream, Llama 3's sizes: all instructions, and
of each loop, innermost first, its instructions, how many of them turn integers into numbers, and how many a branch may
leave out.
"""

import json
from typing import Any

import compile_for_hopper as hopper
import torch

from rayspec_kernels.common.quantized import Quantized

V, H, R = 128256, 4096, 512


def launch_heads() -> None:
    empty = hopper.empty
    int4 = Quantized(empty(V, H // 2, dtype=torch.uint8), empty(V, H // 64, 2))
    hopper.head_topk_kernel(empty(1, H), int4, 8)
    for k in (1, 8):
        hopper.slim_head_kernel(empty(1, H), empty(R, H), empty(V, R), k)


def counted(cubin: bytes) -> dict[str, Any]:
    instructions, loops = hopper.disassembled(cubin)
    found = [
        {
            "instructions": len(loop.instructions),
            "conversions": hopper.conversions([loop]),
            "left_out_by_branches": loop.left_out_by_branches,
        }
        for loop in loops
    ]
    return {"instructions": len(instructions), "loops": found}


def main() -> None:
    resources = hopper.resources

    def printing(cubin: bytes) -> tuple[int, int]:
        print(json.dumps(counted(cubin)))
        return resources(cubin)

    hopper.launch_everything, hopper.resources = launch_heads, printing
    hopper.main()


if __name__ == "__main__":
    main()
