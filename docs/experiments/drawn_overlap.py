"""What drafters of one body could have accepted along answers that were drawn: sum over tokens of min(p, q), by draft.

    python docs/experiments/drawn_overlap.py --work-dir WORK_DIR --out FILE FOLDER FOLDER ...

WORK_DIR is where rayspec train left held-out answers, some of them drawn (held_out.greedy_share below 1), at whatever
temperature. p is the target's distribution at temperature 1 and q the drafter's, both after the answer's own tokens:
the chance that a draft of that position is accepted, without the noise of drawing it. All drafters meet the same
answers. The differences to the first drafter have intervals: percentile bootstrap over the conversations, paired.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from rayspec.provenance import provenance
from rayspec.shipped import target_path
from rayspec.training.acceptance import measure
from rayspec.training.data.answers import read_answers
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.whole import write_whole

STEPS, DRAWS = 4, 4000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", type=Path)
    parser.add_argument("--work-dir", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--target", default="smollm2-135m")
    options = parser.parse_args()
    target = FrozenTarget.load(str(target_path(options.target)), torch.float32)
    answers = read_answers(options.work_dir / "held_out")
    tokens_N = answers.length_N - answers.prompt_length_N
    drawn_R = ((answers.temperature_N > 0) & (tokens_N > STEPS + 1)).nonzero().squeeze(1)
    tokens_R = tokens_N[drawn_R].numpy()
    picks = np.random.default_rng(0).integers(len(drawn_R), size=(DRAWS, len(drawn_R)))
    found, first_RK = dict[str, object](), np.zeros(0)
    for folder in options.drafters:
        drafter, _ = load_drafter(folder)
        settings = {"num_steps": STEPS, "batch_size": 1, "chunk_rows": 256}
        each_R = tqdm(drawn_R.split(1), folder.name, leave=False)
        rows = [measure(drafter, target, answers, sequences=one, **settings).overlap for one in each_R]
        sums_RK = np.array(rows) * tokens_R[:, None]
        first_RK = first_RK if len(first_RK) else sums_RK
        ratios = sums_RK[picks].sum(axis=1) / first_RK[picks].sum(axis=1)
        found[folder.name] = {
            "overlap": (sums_RK.sum(axis=0) / tokens_R.sum()).round(4).tolist(),
            "of_the_first": (sums_RK.sum(axis=0) / first_RK.sum(axis=0)).round(4).tolist(),
            "of_the_first_95": np.percentile(ratios, [2.5, 97.5], axis=0).T.round(4).tolist(),
        }
        print(folder.name, found[folder.name], flush=True)
    head = {"command": " ".join(["python", *sys.argv]), **provenance(), "answers": answers.sha256}
    counted = {"sequences": len(drawn_R), "answer_tokens": int(tokens_R.sum())}
    write_whole(options.out, json.dumps({**head, **counted, "drafters": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
