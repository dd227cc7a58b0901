"""What SpecFormer's training needs at its peak: losses of one draft position after the other (`backward_head`), or all
at once. Each measurement is a process of its own, on the default target with a full head.

python docs/experiments/accumulation.py --out FOLDER

writes FOLDER/accumulation.json and FOLDER/accumulation.png.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

from rayspec.plotting import STYLE, colour, panels, plt
from rayspec.provenance import provenance
from rayspec.shipped import target_path
from rayspec.targets.catalogue import DEFAULT_TARGET
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.ttt import backward_head, roll_out
from sglang_ext.drafters.specformer import SpecFormerDrafter
from sglang_ext.drafters.specformer.config import SpecFormerOptions
from sglang_ext.drafters.specformer.training import config_for, init_body
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import head_from_target
from sglang_ext.heads.full import FullConfig

POSITIONS = (2, 4, 8)
MODES = {"one": "one position after the other", "all": "all positions at once"}
SEQUENCES, TOKENS = 4, 160


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("MODE", "POSITIONS"))
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], int(options.measure[1]))))
        return
    found: dict[str, dict[int, dict[str, float]]] = {mode: {} for mode in MODES}
    for mode, positions in tqdm([(m, p) for p in POSITIONS for m in MODES], desc="measure"):
        command = [sys.executable, __file__, "--measure", mode, str(positions)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[mode][positions] = json.loads(done.stdout.splitlines()[-1])
    for positions in POSITIONS:
        one, other = (found[mode][positions]["gradient_norm"] for mode in MODES)
        assert abs(one - other) < 1e-4 * one, "the gradients are the same"
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"command": "python docs/experiments/accumulation.py --out FOLDER", **provenance(), "peak": found}
    (options.out / "accumulation.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(found, options.out / "accumulation.png")
    print(json.dumps(found))


def measure(mode: str, positions: int) -> dict[str, float]:
    """Peak of resident memory in MiB while the gradients of a batch are made, above what there was before; and their
    norm."""
    target = FrozenTarget.load(target_path(DEFAULT_TARGET), torch.float32)
    config = config_for(target, SpecFormerOptions(positions=positions))
    torch.manual_seed(0)
    drafter = SpecFormerDrafter(config, config.heads(lambda: head_from_target(FullConfig(), target.head_VG)))
    ids_BT = torch.randint(len(target.head_VG), (SEQUENCES, TOKENS))
    rows = torch.ones(SEQUENCES, TOKENS - 1, dtype=torch.bool)
    rows[:, : positions + 1] = False
    batch = Batch(ids_BT, *rows.nonzero(as_tuple=True))
    init_body(drafter, target, batch, seed=0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = psutil.Process().memory_info().rss
    all_rows = roll_out(drafter, target, batch, positions)
    if mode == "one":
        weights, rows = [1.0] * positions, len(batch.position_N)
        grad_KNH, _ = backward_head(drafter.lm_head, all_rows, target, weights=weights, chunk_rows=rows)
        all_rows.hidden_KNH.backward(grad_KNH)
    else:
        p_NV = target.distribution(all_rows.last_hidden_NG, torch.float32)
        losses = [drafter.lm_head.loss(h, i, None, p_NV).mean() for i, h in enumerate(all_rows.hidden_KNH)]
        torch.stack(losses).sum().backward()
    squares = [p.grad.square().sum() for p in drafter.parameters() if p.grad is not None]
    return {"mib": (_peak_bytes() - before) / 2**20, "gradient_norm": float(torch.stack(squares).sum().sqrt())}


def _peak_bytes() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def draw(found: dict[str, dict[int, dict[str, float]]], file: Path) -> None:
    with plt.rc_context(STYLE):
        figure, (axis,) = panels(1, width=5, height=3.4)
        for i, (mode, label) in enumerate(MODES.items()):
            values = [found[mode][p]["mib"] for p in POSITIONS]
            axis.plot(POSITIONS, values, color=colour(i), marker="o", label=label)
        axis.set_xticks(POSITIONS)
        axis.set_ylim(bottom=0)
        axis.set(xlabel="draft positions", ylabel="peak memory of a batch's gradients (MiB)")
        axis.legend(loc="best", fontsize=9)
        figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
