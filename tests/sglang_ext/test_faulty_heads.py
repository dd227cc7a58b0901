"""A drafter folder whose head is wrong stops with a message that names folder, setting, value and way out."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from head_cases import CORAL, DYNASPEC, SPECS, SPECVOCAB, STOPS, TRUNCATED, H, V, make_head, toy_body, toy_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.folder_kinds import WEIGHTS

BODY = toy_body(H, V)
TARGET = toy_target(H, V)


def nothing(found: Any) -> None:
    """As it was."""


def set_to(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(entry: dict[str, Any]) -> None:
        for key in keys[:-1]:
            entry = entry[key]
        entry[keys[-1]] = value

    return change


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return edit


class Fault(NamedTuple):
    """What is done to a sound drafter with this head, and what loading then says."""

    spec: dict[str, Any]
    config: Callable[[dict[str, Any]], Any]
    tensors: Callable[[dict[str, Tensor]], Any]
    message: str


def config_fault(spec: dict[str, Any], change: Callable[[dict[str, Any]], Any], message: str) -> Fault:
    return Fault(spec, change, nothing, message)


def tensor_fault(spec: dict[str, Any], name: str, change: Callable[[Tensor], Tensor], message: str) -> Fault:
    return Fault(spec, nothing, tensor(f"lm_head.{name}", change), message)


def as_stock(config: dict[str, Any]) -> None:
    del config["draft_head"], config["rayspec"]
    config.update(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=V + 1)


FULL, RDK = {"kind": "full"}, SPECS["rdk_full"]
OTHER_SIZE = "Correct config.json, or export the drafter again with rayspec train"
LOOSE = (
    "could make them unreachable; calibrate the clusters again with the tokenizer and generation config of this target"
)
PARTITION = "the cluster map is no partition of the vocabulary into {} clusters and the pinned one: "
VOCABULARY = {
    "not_the_targets": config_fault(
        FULL, set_to("vocab_size", value=54), "vocab_size is 54, but rayspec.target.vocab_size is 53; both must be the"
    ),
    "target_of_another": config_fault(
        FULL, set_to("rayspec", "target", "vocab_size", value=54), "rayspec.target.vocab_size is 54; both must be the"
    ),
    "weights_of_another": config_fault(
        FULL,
        lambda c: (c.update(vocab_size=54), c["rayspec"]["target"].update(vocab_size=54)),
        f"lm_head.weight has shape [53, 24], expected [54, 24]. {OTHER_SIZE}",
    ),
    "a_row_missing": tensor_fault(
        FULL, "weight", lambda t: t[:-1], f"lm_head.weight has shape [52, 24], expected [53, 24]. {OTHER_SIZE}"
    ),
    "an_id_outside": tensor_fault(
        TRUNCATED,
        "ids",
        lambda t: t.where(t != t.max(), 60),
        "must be distinct and in 0..52, got 60; calibrate it again",
    ),
    "an_id_negative": tensor_fault(TRUNCATED, "ids", lambda t: t - 1, "in 0..52, got -1; calibrate it again"),
    "an_id_twice": tensor_fault(
        TRUNCATED,
        "ids",
        lambda t: t.where(t != t.max(), 0),
        "in 0..52, got 0, which is there 2 times; calibrate it again",
    ),
    "a_neighbour_outside": tensor_fault(
        RDK, "neighbour_ids", lambda t: t.index_fill(0, torch.tensor([7]), 53), "neighbour_ids must be in 0..52, got 53"
    ),
    "weights_of_neighbours": tensor_fault(
        RDK, "neighbour_weights", lambda t: 2 * t, "rows that sum to 1, got sums of 2 to 2; make the head again"
    ),
}
STOP = {  # tokens 0 and 38 end an answer
    "not_kept": tensor_fault(
        TRUNCATED,
        "ids",
        lambda t: t.where(t != 38, next(v for v in range(V) if v not in t)),
        "the truncated head of 19 ids lacks the stop tokens [38], so its drafts could never end; calibrate it again",
    ),
    "kept_at_the_first_step_alone": tensor_fault(
        SPECS["truncated_by_step"], "ids", lambda t: t.flip(0), "head of 5 ids lacks the stop tokens [0, 38]"
    ),
    "not_pinned_dynaspec": tensor_fault(
        DYNASPEC,
        "cluster_of",
        lambda t: t.index_fill(0, torch.tensor([38]), 4),
        f"the stop tokens [38] are not in the pinned cluster 0, so a router {LOOSE}",
    ),
    "not_pinned_coral": tensor_fault(CORAL, "cluster_of", lambda t: t.clamp(min=1), LOOSE),
    "not_pinned_rdk": tensor_fault(SPECS["rdk_dynaspec"], "base.cluster_of", lambda t: t.clamp(min=1), LOOSE),
}
CLUSTERS = {
    "a_cluster_is_empty": tensor_fault(
        DYNASPEC,
        "cluster_of",
        lambda t: t.where(t != 3, 1),
        PARTITION.format(11) + "cluster 3 has no token; every token needs a cluster in 0..11",
    ),
    "a_token_has_none": tensor_fault(
        CORAL,
        "cluster_of",
        lambda t: t.index_fill(0, torch.tensor([7]), -1),
        PARTITION.format(5) + "token 7 is in cluster -1",
    ),
    "a_token_has_one_too_high": tensor_fault(
        CORAL,
        "cluster_of",
        lambda t: t.index_fill(0, torch.tensor([7]), 6),
        PARTITION.format(5) + "token 7 is in cluster 6",
    ),
    "a_token_is_missing": tensor_fault(
        DYNASPEC, "cluster_of", lambda t: t[:-1], f"lm_head.cluster_of has shape [52], expected [53]. {OTHER_SIZE}"
    ),
    "of_the_base": tensor_fault(
        SPECS["rdk_dynaspec"],
        "base.cluster_of",
        lambda t: t.where(t != 3, 1),
        PARTITION.format(11) + "cluster 3 has no",
    ),
}
ROUTER = {
    "said_wider": config_fault(
        DYNASPEC,
        set_to("draft_head", "router_width", value=11),
        "'router_width': 11}): lm_head.router_in has shape [10, 48], expected [11, 48]; lm_head.router_in_bias has",
    ),
    "input_narrower": tensor_fault(
        DYNASPEC,
        "router_in",
        lambda t: t[:, :H],
        f"lm_head.router_in has shape [10, 24], expected [10, 48]. {OTHER_SIZE}",
    ),
    "output_shorter": tensor_fault(
        DYNASPEC,
        "router_out",
        lambda t: t[:-1],
        f"lm_head.router_out has shape [10, 10], expected [11, 10]. {OTHER_SIZE}",
    ),
    "of_coral_narrower": tensor_fault(
        CORAL, "router", lambda t: t[:, 1:], f"lm_head.router has shape [5, 23], expected [5, 24]. {OTHER_SIZE}"
    ),
    "of_coral_for_other_groups": config_fault(
        CORAL,
        set_to("draft_head", "clusters", value=6),
        "'clusters': 6, 'union': False, 'top': 2}): lm_head.router has",
    ),
    "of_another_rank": config_fault(
        SPECVOCAB,
        set_to("draft_head", "rank", value=6),
        "lm_head.down has shape [5, 24], expected [6, 24]; lm_head.up has shape [53, 5], expected [53, 6]",
    ),
}
TOO_MANY = {
    "truncated": config_fault(
        TRUNCATED, set_to("draft_head", "size", value=54), "draft_head.size must be in 1..53 (the vocabulary), got 54"
    ),
    "at_a_step": config_fault(
        SPECS["truncated_by_step"],
        set_to("draft_head", "step_sizes", value=[19, 20]),
        "draft_head.step_sizes must be a list of sizes in 1..19 (size), got [19, 20]",
    ),
    "shortlist": config_fault(
        SPECVOCAB, set_to("draft_head", "size", value=54), "draft_head.size must be in 1..53 (the vocabulary), got 54"
    ),
    "rank": config_fault(
        SPECVOCAB,
        set_to("draft_head", "rank", value=25),
        "draft_head.rank must be in 1..24 (the smaller of hidden and vocabulary), got 25",
    ),
    "clusters": config_fault(
        CORAL,
        set_to("draft_head", "clusters", value=54),
        "draft_head.clusters must be in 1..53 (the vocabulary), got 54",
    ),
    "groups": config_fault(
        CORAL, set_to("draft_head", "top", value=6), "draft_head.top must be in 1..5 (clusters), got 6"
    ),
    "first": config_fault(
        DYNASPEC, set_to("draft_head", "first", value=12), "draft_head.first must be in 1..11 (clusters), got 12"
    ),
    "of_the_base": config_fault(
        SPECS["rdk_truncated"],
        set_to("draft_head", "base", "size", value=54),
        "draft_head.base.size must be in 1..53 (the vocabulary), got 54",
    ),
    "stock": config_fault(FULL, as_stock, "draft_vocab_size must be in 1..53 (vocab_size), got 54"),
}
FAULTS = {
    f"{about}-{name}": fault
    for about, faults in (
        ("vocabulary", VOCABULARY),
        ("stop", STOP),
        ("clusters", CLUSTERS),
        ("router", ROUTER),
        ("too_many", TOO_MANY),
    )
    for name, fault in faults.items()
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_head_is_named(name: str, tmp_path: Path) -> None:
    fault, folder = FAULTS[name], tmp_path / "faulty"
    save_drafter(folder, Eagle3Drafter(BODY, make_head(fault.spec)), TARGET)
    load_drafter(folder, stop_ids=STOPS)
    config = json.loads((folder / "config.json").read_text())
    fault.config(config)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / WEIGHTS)
    fault.tensors(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ValueError, match=re.escape(fault.message)) as caught:
        load_drafter(folder, stop_ids=STOPS)
    assert str(folder) in str(caught.value)
