"""Drafters of the toy target, of every family and head that the tests of distributions meet: trained for seconds,
enough to be accepted now and then."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from eagle_cases import trained_eagle
from independent_cases import save_with_heads, trained_drafter
from last_hidden_cases import as_answers, save, slim_on, train
from small_world import untrained
from toy import CLUSTERS, DRAFT_STEPS, DYNASPEC, HEADS, IDS, TRUNCATED, Toy, V

from rayspec.training.data.answers import AnswerSet
from sglang_ext.trees.static import StaticTree, greedy_paths

FULL = {"kind": "full"}
ARTIFACTS = {"ids": IDS, "cluster_of": CLUSTERS}
FEATURE_HEADS: dict[str, dict[str, Any]] = {"truncated": TRUNCATED, "full": FULL, "routed": DYNASPEC}
LAST_HIDDEN: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", FULL),
    "medusa_truncated": ("medusa", TRUNCATED),
    "medusa_routed": ("medusa", DYNASPEC),
    "hydra": ("hydra", FULL),
}
SPECFORMER: dict[str, dict[str, Any]] = {"full": FULL, "truncated": TRUNCATED}
HYDRA_PREFIX: dict[str, dict[str, Any]] = {"full": FULL, "truncated": TRUNCATED}
SLIM_TREES: dict[str, dict[str, Any]] = {
    "slim": {"hypotheses": 4},
    "slim_longest": {"hypotheses": 1, "length_bonus": 2.0},
    "slim_zero": {"hypotheses": 6, "unseen": "zero"},
}


def texts(count: int, prompt: int, answer: int) -> AnswerSet:
    """Random ones of these numbers of tokens."""
    generator = torch.Generator().manual_seed(0)
    return as_answers(*(torch.randint(V, (count, n), generator=generator).tolist() for n in (prompt, answer)))


def _eagle3(toy: Toy, folder: Path) -> dict[str, Path]:
    made = {head: toy.save_drafter(folder / head, head) for head in HEADS}
    few = texts(16, 5, 11)  # few pairs, so that many were never seen
    trees = {name: slim_on(folder / name, made["full"], few, **options) for name, options in SLIM_TREES.items()}
    return made | trees


def _eagle(toy: Toy, folder: Path) -> dict[str, Path]:
    drafter = trained_eagle(toy.target, texts(256, 4, 12), steps=60, batch_size=32)
    return save_with_heads(folder, drafter, toy.target, FEATURE_HEADS, ARTIFACTS)


def _independent(toy: Toy, folder: Path) -> dict[str, Path]:
    options = {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48}
    drafter = trained_drafter(toy.target, texts(256, 3, 13), options, steps=120, batch_size=32)
    return save_with_heads(folder, drafter, toy.target, FEATURE_HEADS, ARTIFACTS)


def _last_hidden(toy: Toy, folder: Path) -> dict[str, Path]:
    answers, tree = texts(256, 5, 11), StaticTree(greedy_paths([[0.5, 0.3, 0.2]] * DRAFT_STEPS, 12))
    made = {}
    for name, (kind, head) in LAST_HIDDEN.items():
        options = {"positions": DRAFT_STEPS, "shared_head": head is DYNASPEC}
        drafter = untrained(toy.target, kind, options, head, ARTIFACTS)
        train(drafter, toy.target, answers, steps=50, batch_size=32)
        made[name] = save(folder / name, drafter, toy.target, tree)
    return made | {"slim": slim_on(folder / "slim", made["medusa"], answers, hypotheses=5)}


def _specformer(toy: Toy, folder: Path) -> dict[str, Path]:
    answers, made = texts(256, 5, 11), {}
    for name, head in SPECFORMER.items():
        torch.manual_seed(0)
        drafter = untrained(toy.target, "specformer", {"positions": DRAFT_STEPS + 1}, head, ARTIFACTS)
        train(drafter, toy.target, answers, steps=50, batch_size=32)
        made[name] = save(folder / name, drafter, toy.target, None)
    return made


def _hydra_prefix(toy: Toy, folder: Path) -> dict[str, Path]:
    answers, tree = texts(256, 5, 11), StaticTree(greedy_paths([[0.5, 0.3, 0.2]] * DRAFT_STEPS, 12))
    options, made = {"positions": DRAFT_STEPS, "prefix_layer": True, "mlp_layers": 2}, {}
    for name, head in HYDRA_PREFIX.items():
        torch.manual_seed(0)
        drafter = untrained(toy.target, "hydra", options, head, ARTIFACTS)
        train(drafter, toy.target, answers, steps=50, batch_size=32)
        made[name] = save(folder / name, drafter, toy.target, tree)
    return made


MAKERS: Mapping[str, Callable[[Toy, Path], dict[str, Path]]] = {
    "eagle3": _eagle3,
    "eagle": _eagle,
    "independent": _independent,
    "last_hidden": _last_hidden,
    "hydra_prefix": _hydra_prefix,
    "specformer": _specformer,
}


def toy_drafters(toy: Toy, family: str, folder: Path) -> dict[str, Path]:
    """All of a family, the same whatever was made before them."""
    torch.manual_seed(0)
    return MAKERS[family](toy, folder)
