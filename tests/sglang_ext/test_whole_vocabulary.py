"""A reduced head that is given the whole vocabulary drafts what the full head drafts, token for token, in SGLang."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ids, Oracle, generate, output_ids
from fixture_models import DRAFTERS, VOCABULARY
from volume import volume

from sglang_ext.adapter.engine import swap_drafter
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.heads import head_from_target, parse_head

V, CLUSTERS = VOCABULARY, 12
SPECS: dict[str, dict[str, Any]] = {
    "truncated": {"kind": "truncated", "size": V},
    "specvocab": {"kind": "specvocab", "rank": 8, "size": V},
    "dynaspec": {
        "kind": "dynaspec",
        "clusters": CLUSTERS,
        "first": CLUSTERS,
        "later": CLUSTERS,
        "rule": "fixed",
        "router_width": 8,
    },
    "coral": {"kind": "coral", "clusters": CLUSTERS, "top": CLUSTERS},
    "rdk": {"kind": "rdk", "base": {"kind": "full"}, "neighbours": 2, "self_weight": 1.0},
}


def counts(answers: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(a["meta_info"]["spec_verify_ct"], a["meta_info"]["spec_num_correct_drafts"]) for a in answers]


@pytest.mark.parametrize("kind", SPECS)
def test_the_whole_vocabulary_is_the_full_head(
    eagle3_chain: Any, kind: str, prompts: list[Ids], oracle: Oracle, tmp_path: Path
) -> None:
    some = prompts[: volume(24, 8)]
    full_counts = counts(generate(eagle3_chain, some))
    drafter, info = load_drafter(DRAFTERS["full"])
    assert info.target is not None
    maps = {
        "ids": torch.arange(V),
        "cluster_of": torch.arange(V) % (CLUSTERS + 1),
    }  # token 0, the stop token, is pinned
    drafter.lm_head = head_from_target(parse_head(SPECS[kind]), drafter.lm_head.weight.data, maps)
    save_drafter(tmp_path / kind, drafter, info.target, share_with=DRAFTERS["full"])
    swap_drafter(eagle3_chain, str(tmp_path / kind))
    answers = generate(eagle3_chain, some)
    assert output_ids(answers) == oracle.answers[: len(some)]
    assert counts(answers) == full_counts
