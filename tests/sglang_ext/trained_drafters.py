"""Drafters of the demo target, of every family that the engine tests meet. EAGLE-3's ship with the tests, the others
are trained for seconds on the very answers that they are to draft."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from eagle_cases import trained_eagle
from fixture_models import CALIBRATIONS, DRAFTERS
from independent_cases import save_with_heads, trained_drafter
from last_hidden_cases import ACCURACY, SLIM, demo_drafters, save, slim_on, train
from small_world import untrained
from torch import Tensor

from rayspec.artifacts import load_artifacts
from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.trees.slim import SlimOptions, SlimTree
from sglang_ext.trees.static import StaticTree, greedy_paths

EAGLE3_NODES = 12
EAGLE3_TREES: dict[str, tuple[str, dict[str, Any]]] = {
    "s": ("full", {"hypotheses": 6}),
    "ss": ("slimspec", {"hypotheses": 1, "length_bonus": 0.5}),
    "l": ("truncated_by_step", {"hypotheses": 40, "unseen": "smoothed"}),
    # steps of another width: often nothing but the root is left to verify
    "zero": ("full", {"hypotheses": 12, "unseen": "zero"}),
}
ROUTED = {"kind": "dynaspec", "clusters": 128, "first": 64, "later": 32, "rule": "fixed", "router_width": 64}
FEATURE_HEADS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "truncated": {"kind": "truncated", "size": 1024},
    "slimspec": {"kind": "slimspec", "rank": 64},
    "routed": ROUTED,
}
SPECFORMER_POSITIONS = 4
SPECFORMER: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # options, head, steps of training
    "specformer": ({}, SLIM, 5),
    "truncated": ({}, {"kind": "truncated", "size": 1024}, 5),
    "routed": ({}, {**ROUTED, "first": 32, "later": 16}, 1),
    "causal": ({"causal": True}, SLIM, 1),
}
HYDRA_PREFIX: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "slimspec": ({"mlp_layers": 2}, SLIM, 5),
    "truncated": ({"mlp_layers": 2}, {"kind": "truncated", "size": 1024}, 5),
    "short_mlp": ({}, SLIM, 1),
    "no_prefix": ({"prefix_layer": False, "mlp_layers": 2}, SLIM, 1),
}


def artifacts() -> dict[str, Tensor]:
    return {
        "ids": load_artifacts(CALIBRATIONS / "vocabtrim-2048")[0]["ids"],
        "cluster_of": load_artifacts(CALIBRATIONS / "clusters-128")[0]["cluster_of"],
    }


def _eagle3(target: FrozenTarget, answers: AnswerSet, folder: Path) -> dict[str, Path]:
    made = {
        name: slim_on(folder / name, DRAFTERS[base], answers, **options)
        for name, (base, options) in EAGLE3_TREES.items()
    }
    drafter, info = load_drafter(DRAFTERS["full"])
    assert info.target is not None
    drafter.draft_tree = SlimTree(SlimOptions(correlation=False, hypotheses=EAGLE3_NODES - 1), info.body.vocab_size)
    save_drafter(folder / "eagle2", drafter, info.target, share_with=DRAFTERS["full"])
    return DRAFTERS | made | {"eagle2": folder / "eagle2"}


def _eagle(target: FrozenTarget, answers: AnswerSet, folder: Path) -> dict[str, Path]:
    drafter = trained_eagle(target, answers, steps=15, batch_size=16)
    save_drafter(folder / "to_export", drafter, target.info(tap_layers=()), {"freeze_head": True})
    made = save_with_heads(folder, drafter, target, FEATURE_HEADS, artifacts())
    pruned = slim_on(folder / "pruned", made["full"], answers, hypotheses=6)
    return made | {"pruned": pruned, "to_export": folder / "to_export"}


def _independent(target: FrozenTarget, answers: AnswerSet, folder: Path) -> dict[str, Path]:
    drafter = trained_drafter(target, answers, {}, steps=15, batch_size=16)
    heads = FEATURE_HEADS | {"slimspec": {"kind": "slimspec", "rank": 32}}
    return save_with_heads(folder, drafter, target, heads, artifacts())


def _last_hidden(target: FrozenTarget, answers: AnswerSet, folder: Path) -> dict[str, Path]:
    made = demo_drafters(folder, target, answers)
    made["slim"] = slim_on(folder / "slim", made["medusa"], answers, hypotheses=8)
    # steps of another width: often nothing but the root is left to verify
    made["slim_zero"] = slim_on(folder / "slim_zero", made["medusa"], answers, hypotheses=12, unseen="zero")
    prefix = untrained(target, "hydra", {"positions": 3, "prefix_layer": True}, SLIM)
    made["hydra_prefix"] = save(folder / "hydra_prefix", prefix, target, None)
    return made


def _specformer(target: FrozenTarget, answers: AnswerSet, folder: Path) -> dict[str, Path]:
    made = {}
    for name, (options, head, steps) in SPECFORMER.items():
        torch.manual_seed(0)
        options = {"positions": SPECFORMER_POSITIONS, **options}
        drafter = untrained(target, "specformer", options, head, artifacts())
        train(drafter, target, answers, steps=steps, batch_size=16, lr=1e-3)
        made[name] = save(folder / name, drafter, target, None)
    return made


def _hydra_prefix(target: FrozenTarget, answers: AnswerSet, folder: Path) -> dict[str, Path]:
    made, tree = {}, StaticTree(greedy_paths(ACCURACY, 20))
    for name, (options, head, steps) in HYDRA_PREFIX.items():
        torch.manual_seed(0)
        options = {"positions": 3, "prefix_layer": True, **options}
        drafter = untrained(target, "hydra", options, head, artifacts())
        train(drafter, target, answers, steps=steps, batch_size=16)
        made[name] = save(folder / name, drafter, target, tree)
    return made


MAKERS: Mapping[str, Callable[[FrozenTarget, AnswerSet, Path], dict[str, Path]]] = {
    "eagle3": _eagle3,
    "eagle": _eagle,
    "independent": _independent,
    "last_hidden": _last_hidden,
    "hydra_prefix": _hydra_prefix,
    "specformer": _specformer,
}


def trained_drafters(family: str, target: FrozenTarget, answers: AnswerSet, folder: Path) -> dict[str, Path]:
    """All of a family, the same whatever was made before them."""
    torch.manual_seed(0)
    return MAKERS[family](target, answers, folder)
