"""Ranking, FR-Spec and VocabTrim, and what a target says of its vocabulary. The token ids are made up."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rayspec.calibration.drafter import ReferenceDrafter
from rayspec.calibration.rules import parse_rule
from rayspec.calibration.rules.ranking import coverage, rank
from rayspec.calibration.rules.truncation import FrSpec, VocabTrim
from rayspec.calibration.vocabulary import Vocabulary
from rayspec.entries import entry_of
from sglang_ext.heads import head_from_target, parse_head

# stop tokens in the middle and at the end, one of them never counted; special and padding rows, one of them counted
WORDS = Vocabulary(target="toy", size=12, tokenizer_sha256="0", stop_ids=(4, 11), unusable_ids=(2, 9, 10))
COUNTS = torch.tensor([5, 0, 70, 5, 1, 9, 0, 5, 20, 0, 0, 0])
RANKED = [4, 11, 8, 5, 0, 3, 7, 1, 6, 2, 9, 10]


def ids_of(rule: FrSpec | VocabTrim, counts_V: Tensor = COUNTS, vocabulary: Vocabulary = WORDS) -> list[int]:
    made = rule.make(counts_V, vocabulary, ReferenceDrafter("", vocabulary))
    assert made.figures["k"] == len(made.tensors["ids"])
    return made.tensors["ids"].tolist()


def test_rank_is_stops_then_counts_then_unseen_then_unusable() -> None:
    assert rank(COUNTS, WORDS).tolist() == RANKED


@pytest.mark.parametrize("seed", range(3))
def test_rank_keeps_ties_in_order_of_id(seed: int) -> None:
    counts_V = torch.randint(0, 4, (5000,), generator=torch.Generator().manual_seed(seed))
    vocabulary = Vocabulary(target="toy", size=5000, tokenizer_sha256="0", stop_ids=(17,), unusable_ids=(3, 4999))
    ids_V = rank(counts_V, vocabulary)
    assert torch.equal(ids_V.sort().values, torch.arange(5000))
    middle = [(-int(counts_V[i]), int(i)) for i in ids_V[1:-2]]
    assert middle == sorted(middle)
    assert torch.equal(rank(counts_V.clone(), vocabulary), ids_V)


def test_coverage_grows_to_one() -> None:
    share_V = coverage(COUNTS, rank(COUNTS, WORDS))
    assert bool((share_V.diff() >= 0).all())
    assert share_V[-1] == 1.0
    assert share_V[3].item() == (1 + 0 + 20 + 9) / 115


@pytest.mark.parametrize("size", [2, 3, 7, 9, 12], ids=["stops", "one_more", "seen", "with_unseen", "everything"])
def test_top_k_takes_a_prefix_with_every_stop_token(size: int) -> None:
    assert ids_of(FrSpec(top_k=size)) == ids_of(VocabTrim(top_k=size)) == RANKED[:size]


@pytest.mark.parametrize("size", [1, 10, 11, 13], ids=["no_room_for_stops", "special", "padding", "over"])
def test_top_k_that_no_head_may_have_is_refused(size: int) -> None:
    for rule in (FrSpec(top_k=size), VocabTrim(top_k=size)):
        with pytest.raises(ValueError, match=rf"rule.top_k must be in 2 .*\.\.9 .*or 12 .*got {size}"):
            rule.check(WORDS)


@pytest.mark.parametrize("rule", [FrSpec, VocabTrim])
def test_top_k_of_nothing_is_refused(rule: type[FrSpec | VocabTrim]) -> None:
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        rule(top_k=0)


@pytest.mark.parametrize(
    ("share", "size"),
    # of 45 usable tokens: the stop tokens make up 1, and then 20, 9, 5, 5, 5
    [(0.01, 2), (21 / 45, 3), (21 / 45 + 1e-9, 4), (30 / 45, 4), (1.0, 7)],
    ids=["stops_suffice", "reached_exactly", "just_missed", "two", "all_that_was_seen"],
)
def test_top_p_is_the_smallest_prefix_that_reaches_the_share(share: float, size: int) -> None:
    assert ids_of(VocabTrim(top_p=share)) == RANKED[:size]


@pytest.mark.parametrize(("least", "size"), [(1, 7), (5, 7), (6, 4), (21, 2)])
def test_min_count_keeps_stops_and_what_is_frequent(least: int, size: int) -> None:
    assert ids_of(VocabTrim(min_count=least)) == RANKED[:size]


@pytest.mark.parametrize("kept", [5, 8], ids=["stop_tokens_frequent", "stop_tokens_rare"])
def test_every_prefix_with_room_for_them_has_the_stop_tokens(kept: int) -> None:
    counts_V = COUNTS.clone()
    counts_V[list(WORDS.stop_ids)] = 1000 if kept == 5 else 0
    ids = ids_of(VocabTrim(top_k=kept), counts_V)
    assert all(set(WORDS.stop_ids) <= set(ids[:n]) for n in range(len(WORDS.stop_ids), kept + 1))


def test_the_whole_vocabulary_is_the_full_head() -> None:
    weight_VH = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    hidden_TH = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor(ids_of(FrSpec(top_k=12)))
    full = head_from_target(parse_head({"kind": "full"}), weight_VH)
    kept = head_from_target(parse_head({"kind": "truncated", "size": 12}), weight_VH, {"ids": ids})
    torch.testing.assert_close(kept.target_logits(hidden_TH), full.target_logits(hidden_TH), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"kind": "frspek"},
            r"rule.kind must be one of frspec, vocabtrim, bcl, kmeans, contiguous, bigram, got 'frspek'",
        ),
        ({"kind": "frspec", "top_p": 0.5}, r"unknown key 'rule.top_p'; known under rule: top_k"),
        ({"kind": "frspec", "top_k": "many"}, r"rule.top_k must be a whole number, got 'many'"),
        ({"kind": "frspec"}, r"rule.top_k"),
        ({"kind": "vocabtrim"}, r"needs exactly one of top_k, top_p and min_count, got none"),
        ({"kind": "vocabtrim", "top_k": 3, "top_p": 0.5}, r"exactly one of .*got \['top_k', 'top_p'\]"),
        ({"kind": "vocabtrim", "top_p": 1.5}, r"rule.top_p must be in \(0, 1\], got 1.5"),
        ({"kind": "bcl", "search": "grid"}, r"rule.search must be one of scan, tpe, got 'grid'"),
        ({"kind": "kmeans", "clusters": 0}, r"rule.clusters must be at least 1, got 0"),
        ({"kind": "kmeans", "clusters": 4, "max_size": 0.5}, r"rule.max_size must be at least 1 .*got 0.5"),
    ],
)
def test_wrong_rule_is_refused(entry: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rule(entry)


def test_rule_with_its_defaults_reads_back() -> None:
    rule = parse_rule({"kind": "bcl", "weight": 0.7})
    entry = entry_of(rule.kind, rule)
    assert entry["min_coverage"] == 0.9
    assert parse_rule(entry) == rule


def test_vocabulary_of_a_target_folder(tiny_target_folder: Path, tmp_path: Path) -> None:
    """Every place that names a stop token counts; rows without a token are padding."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    tokens = config["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": tokens + 3}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    vocabulary = Vocabulary.load(folder, "toy")
    assert vocabulary.size == tokens + 3
    assert set(vocabulary.stop_ids) == {7, 9, config["eos_token_id"]}
    assert vocabulary.unusable_ids == (tokens, tokens + 1, tokens + 2)
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": tokens - 1}))
    with pytest.raises(ValueError, match="use the tokenizer that belongs to the model"):
        Vocabulary.load(folder, "toy")


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer.json and config.json"):
        Vocabulary.load(tmp_path, "toy")


def test_target_without_a_stop_token_is_refused(tiny_target_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_folder, folder)
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, key: None}))
    (folder / "generation_config.json").unlink()
    with pytest.raises(ValueError, match="names no stop token"):
        Vocabulary.load(folder, "toy")
