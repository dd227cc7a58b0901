"""How many instructions the loops of the fused heads have, as compiled for an H100, on a machine without a GPU.

    PYTHONPATH=.:tests/kernels python docs/experiments/loop_instructions.py

Prints a line for each kernel of a low-rank head and of one in int4, one stream, Llama 3's sizes: all instructions, and
of each loop, innermost first, its instructions and how many of them a branch may leave out.
"""

import json
import re
import subprocess
import tempfile
from typing import Any

import compile_for_hopper as hopper
import torch

from rayspec_kernels.common.quantized import Quantized

V, H, R = 128256, 4096, 512
BRANCH = re.compile(r"\bBRA\b.*0x([0-9a-f]+)")


def launch_heads() -> None:
    empty = hopper.empty
    int4 = Quantized(empty(V, H // 2, dtype=torch.uint8), empty(V, H // 64, 2))
    hopper.head_topk_kernel(empty(1, H), int4, 8)
    for k in (1, 8):
        hopper.slim_head_kernel(empty(1, H), empty(R, H), empty(V, R), k)


def loops(cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [hopper.CUOBJDUMP, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]
    jumps = [(at, int(found[1], 16)) for at, what in lines if (found := BRANCH.search(what))]
    found = []
    for end, begin in jumps:
        if begin < end:
            skips = [(to - at) // 16 for at, to in jumps if begin <= at < to <= end]
            found.append({"instructions": (end - begin) // 16 + 1, "left_out_by_branches": skips})
    return {"instructions": len(lines), "loops": found}


def main() -> None:
    resources = hopper.resources

    def printing(cubin: bytes) -> tuple[int, int]:
        print(json.dumps(loops(cubin)))
        return resources(cubin)

    hopper.launch_everything, hopper.resources = launch_heads, printing
    hopper.main()


if __name__ == "__main__":
    main()
