"""What a low-rank head keeps of a trained body's full head before any training, by how it is factored.

    python docs/experiments/low_rank_starts.py --work-dir WORK_DIR --out FILE DRAFTER

WORK_DIR is where rayspec train left answers and held-out answers; DRAFTER is a folder of a drafter with a full head.
Plain: the SVD of the head. Whitened: weighted by the states that the head reads along the first 128 training answers.
By token: by what the target's distributions there ask for, too, which is how `slimspec` starts. Counted is how often
the best token is the next one of a greedy held-out answer, over all positions and four draft steps, each given the
tokens that are really before it. Intervals: percentile bootstrap over the conversations, paired.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from rayspec.provenance import provenance
from rayspec.shipped import target_path
from rayspec.targets.catalogue import DEFAULT_TARGET
from rayspec.training.acceptance import greedy_sequences
from rayspec.training.data.answers import read_answers
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.moments import head_moments
from rayspec.training.ttt import roll_out
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.training import Batch
from sglang_ext.heads.slimspec import low_rank
from sglang_ext.whole import write_whole

STEPS, DRAWS, ROWS = 4, 4000, 256
SHARES = (2, 4, 8, 16)  # ranks, as divisors of the hidden size
STARTS = {"plain": (), "whitened": ("hidden_moment",), "by token": ("hidden_moment", "token_share")}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--work-dir", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--target", default=DEFAULT_TARGET)
    options = parser.parse_args()
    target = FrozenTarget.load(str(target_path(options.target)), torch.float32)
    drafter, _ = load_drafter(options.drafter)
    weight_VH = drafter.lm_head.at(0).as_matrix()[0]
    met = head_moments(target, read_answers(options.work_dir / "answers"), drafter, STEPS)
    factors = {"full": (torch.eye(weight_VH.shape[1]), weight_VH)}
    for share in SHARES:
        for name, weights in STARTS.items():
            artifacts = {key: met[key] for key in weights}
            factors[f"H/{share} {name}"] = low_rank(weight_VH, weight_VH.shape[1] // share, artifacts)

    held_out = read_answers(options.work_dir / "held_out")
    rows, right = list[int](), {name: list[list[int]]() for name in factors}
    for index in tqdm(greedy_sequences(held_out), "held-out answers"):
        batch = Batch.of(held_out, index[None], target.device)
        hidden_KNH = roll_out(drafter, target, batch, STEPS).hidden_KNH
        rows.append(hidden_KNH.shape[1])
        for name, pair in factors.items():
            right[name].append([_right(hidden_NH, pair, batch.next_ids_N) for hidden_NH in hidden_KNH])

    head = {"command": " ".join(["python", *sys.argv]), **provenance(), "held_out": held_out.sha256}
    found = _figures(np.array(rows), {name: np.array(counts) for name, counts in right.items()})
    counted = {"conversations": len(rows), "positions": sum(rows), "draft_steps": STEPS}
    write_whole(options.out, json.dumps({**head, **counted, "heads": found}, indent=1) + "\n")


def _right(hidden_NH: Tensor, factors: tuple[Tensor, Tensor], next_N: Tensor) -> int:
    """How many of the rows have the next token as their best."""
    down_rH, up_Vr = factors
    parts = zip(hidden_NH.split(ROWS), next_N.split(ROWS), strict=True)
    return sum(int((((part @ down_rH.T) @ up_Vr.T).argmax(dim=1) == ids).sum()) for part, ids in parts)


def _figures(rows_R: np.ndarray, right: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Of counts [R, K] of R conversations: the share, at each step and in all, and what is kept of the full head's."""
    picks = np.random.default_rng(0).integers(len(rows_R), size=(DRAWS, len(rows_R)))
    full_R = right["full"].sum(axis=1)
    found = dict[str, object]()
    for name, right_RK in right.items():
        ratios = right_RK.sum(axis=1)[picks].sum(axis=1) / full_R[picks].sum(axis=1)
        found[name] = {
            "share": round(float(right_RK.sum() / (rows_R.sum() * right_RK.shape[1])), 4),
            "by_step": (right_RK.sum(axis=0) / rows_R.sum()).round(4).tolist(),
            "of_the_full": round(float(right_RK.sum() / full_R.sum()), 4),
            "of_the_full_95": np.percentile(ratios, [2.5, 97.5]).round(4).tolist(),
        }
        print(name, found[name], flush=True)
    return found


if __name__ == "__main__":
    main()
