"""What SLiM's correlations are worth, and how many answers they must be counted in: greedy decoding along the target's
held-out answers with the trees of one Medusa drafter, without a server. The first 40 of these answers, by which the
demo's strength and smoothing were chosen, are left out.

python docs/experiments/correlations.py --out FOLDER [--drafter medusa] [--work-dir WORK_DIR]

writes FOLDER/correlations.json and FOLDER/correlations.png. WORK_DIR is where rayspec train left the target's answers.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from rayspec.calibration.counting import PairCounts, add_up_pairs, pair_ids, partial_counts
from rayspec.calibration.sources.kinds import TENSORS
from rayspec.home import home
from rayspec.plotting import STYLE, colour, panels, plt
from rayspec.provenance import provenance
from rayspec.shipped import drafter_path, target_path
from rayspec.targets.catalogue import DEFAULT_TARGET
from rayspec.training.data.answers import AnswerSet, read_answers
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.tree_acceptance import measure_tree
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.trees import CandidateTree
from sglang_ext.trees.slim import SlimOptions, SlimTree

STEPS, TOPK, NODES = 4, 10, 64
HYPOTHESES = (1, 5, 10, 20, 40)
CHOSEN_BY = 40  # held-out answers
UNCORRELATED = "r = 1"
CORRELATIONS: dict[str, dict[str, Any]] = {
    UNCORRELATED: {"correlation": False},
    "r, 1 for unseen pairs": {},
    "r^0.4, smoothed": {"unseen": "smoothed", "smoothing": 0.1, "strength": 0.4},
}
BUDGETS = (8, 16, 32, 64)
COUNTED = 20  # hypotheses of the trees that tell corpora apart: SLiM-S
SUBSETS = 3  # of a corpus that is small enough

Point = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafter", default="medusa")
    parser.add_argument("--work-dir", type=Path, default=home() / "training" / DEFAULT_TARGET)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = FrozenTarget.load(target_path(DEFAULT_TARGET), torch.float32)
    drafter, _ = load_drafter(drafter_path(options.drafter))
    answers, held_out = (read_answers(options.work_dir / name) for name in ("answers", "held_out"))
    held_out = replace(held_out, **{name: getattr(held_out, name)[CHOSEN_BY:] for name in TENSORS})
    static, vocab_size = drafter.draft_tree, len(target.head_VG)
    if static is None:
        raise SystemExit(f"--drafter {options.drafter} has no tree of its own to compare with")

    def measured(tree: CandidateTree, num_nodes: int = NODES) -> Point:
        proposer = tree.fit(STEPS, TOPK, num_nodes, torch.device("cpu"))
        return measure_tree(drafter, proposer, target, held_out, draft_steps=STEPS).to_dict()

    whole = pairs(answers, 0, len(answers), vocab_size)
    found: dict[str, Any] = {"static": {}, "trees": {name: {} for name in CORRELATIONS}, "corpora": {}}
    for budget in tqdm(BUDGETS, desc="static"):
        found["static"][budget] = measured(static, budget)
    for count in tqdm(HYPOTHESES, desc="hypotheses"):
        for name, correlation in CORRELATIONS.items():
            found["trees"][name][count] = measured(slim(whole, vocab_size, count, correlation))
    corpora = found["corpora"] = {name: {} for name in CORRELATIONS if name != UNCORRELATED}
    for size in tqdm(corpus_sizes(len(answers)), desc="corpora"):
        starts = [i * size for i in range(SUBSETS) if (i + 1) * size <= len(answers)]
        counted = [pairs(answers, start, start + size, vocab_size) for start in starts]
        for name, points in corpora.items():
            points[size] = [measured(slim(counts, vocab_size, COUNTED, CORRELATIONS[name])) for counts in counted]

    options.out.mkdir(parents=True, exist_ok=True)
    command = f"python docs/experiments/correlations.py --out FOLDER --drafter {Path(options.drafter).name}"
    sizes = {"draft_steps": STEPS, "topk": TOPK, "num_nodes": NODES, "held_out_answers": len(held_out)}
    result = {"command": command, **provenance(), **sizes, "correlations": CORRELATIONS, **found}
    (options.out / "correlations.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(found, options.out / "correlations.png")


def corpus_sizes(most: int) -> list[int]:
    sizes = [64 * 2**i for i in range(12)]
    return [size for size in sizes if size < most] + [most]


def pairs(answers: AnswerSet, start: int, stop: int, vocab_size: int) -> PairCounts:
    """As the rule `bigram` of rayspec calibrate counts them."""
    mask = answers.loss_mask_NL[start:stop, 1:]
    first, second = answers.token_ids_NL[start:stop, :-1][mask], answers.token_ids_NL[start:stop, 1:][mask]
    return add_up_pairs([partial_counts(pair_ids(first.numpy(), second.numpy()))], vocab_size, f"{stop - start}")


def slim(counts: PairCounts, vocab_size: int, hypotheses: int, correlation: Mapping[str, Any]) -> SlimTree:
    if not correlation.get("correlation", True):
        return SlimTree(SlimOptions(hypotheses=hypotheses, **correlation), vocab_size)
    return SlimTree.with_counts(SlimOptions(hypotheses=hypotheses, pairs=len(counts.ids_P), **correlation), *counts)


def draw(found: dict[str, Any], file: Path) -> None:
    colours = {name: colour(i + 1) for i, name in enumerate(CORRELATIONS)}
    with plt.rc_context(STYLE):
        figure, (trees, corpora) = panels(2, width=5, height=3.8)
        own = found["static"].values()
        trees.plot([p["nodes"] for p in own], [p["tau"] for p in own], "o-", color=colour(0), label="Medusa's tree")
        for name, points in found["trees"].items():
            own = points.values()
            trees.plot([p["nodes"] for p in own], [p["tau"] for p in own], "o-", color=colours[name], label=name)
        for count, point in found["trees"][name].items():
            trees.annotate(
                f"K={count}", (point["nodes"], point["tau"]), (-4, 7), textcoords="offset points", fontsize=8
            )
        trees.set(xlabel="verified tokens of a step, with the root", ylabel="tau (tokens of a verify step)")
        trees.legend(loc="lower right", fontsize=9)
        for name, sizes in found["corpora"].items():
            means = [sum(p["tau"] for p in points) / len(points) for points in sizes.values()]
            corpora.plot(list(sizes), means, "-", color=colours[name], label=f"{name}, K={COUNTED}")
            for size, points in sizes.items():
                corpora.plot([size] * len(points), [p["tau"] for p in points], "o", ms=4, color=colours[name])
        base = found["trees"][UNCORRELATED][COUNTED]["tau"]
        corpora.axhline(base, color=colours[UNCORRELATED], linestyle="--", label=UNCORRELATED)
        corpora.set_xscale("log", base=2)
        corpora.set_xticks(list(sizes), [str(size) for size in sizes], rotation=45, fontsize=8)
        corpora.set(xlabel="answers in which pairs were counted", ylabel="tau (tokens of a verify step)")
        corpora.legend(loc="upper left", fontsize=9)
        figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
