"""Drafters on the last hidden state, trained for seconds: enough to be accepted now and then.

N = sequences, L = their longest length.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fixture_models import CALIBRATIONS
from small_world import untrained

from rayspec.artifacts import load_artifacts
from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.ttt import backward_batch
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.shared.last_hidden import LastHiddenDrafter
from sglang_ext.drafters.training import Batch
from sglang_ext.trees import CandidateTree
from sglang_ext.trees.slim import SlimOptions, SlimTree
from sglang_ext.trees.static import StaticTree, greedy_paths


def as_answers(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> AnswerSet:
    """What rayspec train would have stored of these prompts and greedy answers."""
    rows = [torch.tensor([*p, *a], dtype=torch.int32) for p, a in zip(prompts, answers, strict=True)]
    length_N = torch.tensor([len(row) for row in rows])
    prompt_N = torch.tensor([len(p) for p in prompts])
    ids_NL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    place_L = torch.arange(ids_NL.shape[1])
    mask_NL = (place_L >= prompt_N[:, None]) & (place_L < length_N[:, None])
    return AnswerSet("made", "", ids_NL, mask_NL, prompt_N, length_N, torch.zeros(len(rows)))


def train(
    drafter: LastHiddenDrafter,
    target: FrozenTarget,
    answers: AnswerSet,
    *,
    steps: int,
    batch_size: int,
    lr: float = 3e-3,
) -> None:
    """AdamW on all of its parameters, from a fixed order of the answers."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = Batch.of(answers, torch.randperm(len(answers), generator=generator)[:batch_size])
        backward_batch(drafter, target, batch, num_steps=drafter.config.positions, decay=0.9, chunk_rows=256)
        optimizer.step()
        optimizer.zero_grad()


SLIM = {"kind": "slimspec", "rank": 32}
DEMO: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "medusa": ("medusa", {"positions": 3}, SLIM),
    "medusa_truncated": ("medusa", {"positions": 3}, {"kind": "truncated", "size": 1024}),
    "medusa_routed": (  # its own loss trains the router alone, so that it is hardly ever right
        "medusa",
        {"positions": 3, "shared_head": True},
        {"kind": "dynaspec", "clusters": 128, "first": 32, "later": 16, "rule": "fixed", "router_width": 64},
    ),
    "hydra": ("hydra", {"positions": 3}, {"kind": "full", "bias": True}),  # as published ones
}
ACCURACY = [[0.5, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1], [0.3, 0.2]]  # made up: any tree must be lossless


def demo_drafters(
    folder: Path, target: FrozenTarget, answers: AnswerSet, names: Sequence[str] = tuple(DEMO)
) -> dict[str, Path]:
    """Drafters for the demo target, trained on the very answers that they are to draft."""
    ids, _ = load_artifacts(CALIBRATIONS / "vocabtrim-2048")
    clusters, _ = load_artifacts(CALIBRATIONS / "clusters-128")
    artifacts = {"ids": ids["ids"], "cluster_of": clusters["cluster_of"]}
    made = {}
    for name in names:
        kind, options, head = DEMO[name]
        torch.manual_seed(0)
        drafter = untrained(target, kind, options, head, artifacts)
        train(drafter, target, answers, steps=5, batch_size=16)
        made[name] = save(folder / name, drafter, target, StaticTree(greedy_paths(ACCURACY, 20)))
    return made


def slim_on(folder: Path, base: Path, answers: AnswerSet, **options: Any) -> Path:
    """A trained Medusa or EAGLE-3 drafter with SLiM's tree, by the pairs of these very answers."""
    drafter, info = load_drafter(base)
    assert info.target is not None
    rows = [ids[mask] for ids, mask in zip(answers.token_ids_NL, answers.loss_mask_NL, strict=True)]
    pairs = torch.cat([torch.stack([row[:-1], row[1:]]) for row in rows], dim=1).long()
    V = info.body.vocab_size
    key, counts = (pairs[0] * V + pairs[1]).unique(return_counts=True)
    indptr = torch.zeros(V + 1, dtype=torch.int64)
    indptr[1:] = (key // V).bincount(minlength=V).cumsum(0)
    drafter.draft_tree = SlimTree.with_counts(SlimOptions(pairs=len(key), **options), indptr, key % V, counts)
    save_drafter(folder, drafter, info.target, {"recipe": "some seconds"}, share_with=base)
    return folder


def save(folder: Path, drafter: LastHiddenDrafter, target: FrozenTarget, tree: CandidateTree | None) -> Path:
    drafter.draft_tree = tree
    save_drafter(folder, drafter, target.info(tap_layers=drafter.config.tap_layers), {"recipe": "some seconds"})
    return folder
