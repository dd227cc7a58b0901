import pytest
import torch
from torch import Tensor

from rayspec.calibration.drafter import DrafterFlops, ReferenceDrafter, drafter_flops
from rayspec.calibration.rules.bcl import Bcl, search_tpe
from rayspec.calibration.rules.ranking import coverage, rank
from rayspec.calibration.vocabulary import Vocabulary
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.eagle3 import Eagle3Config
from sglang_ext.drafters.eagle3.config import Eagle3Options
from sglang_ext.drafters.eagle3.training import config_for

FLOPS = DrafterFlops(body=1000, per_row=20)


class Drafter(ReferenceDrafter):
    """Of known cost, from no folder."""

    flops = FLOPS  # type: ignore[assignment]


def zipf(size: int, exponent: float = 1.2) -> Tensor:
    """Counts as text has them, in an order that is not that of the ids."""
    counts_V = (1e6 / torch.arange(1, size + 1).double() ** exponent).long()
    return counts_V[torch.randperm(size, generator=torch.Generator().manual_seed(0))]


def vocabulary(size: int, unusable: tuple[int, ...] = ()) -> Vocabulary:
    return Vocabulary(target="toy", size=size, tokenizer_sha256="0", stop_ids=(1,), unusable_ids=unusable)


def size_of(rule: Bcl, counts_V: Tensor, words: Vocabulary) -> int:
    return len(rule.make(counts_V, words, Drafter("", words)).tensors["ids"])


def by_hand(rule: Bcl, counts_V: Tensor, words: Vocabulary) -> int:
    """The definition, one size after the other."""
    counts, order = counts_V.tolist(), rank(counts_V, words).tolist()
    best, found = float("-inf"), 0
    for k in [*range(1, words.num_usable + 1), words.size]:
        covered = sum(counts[i] for i in order[:k]) / sum(counts)
        cost = (1000 + 20 * k) / (1000 + 20 * words.size)
        utility = rule.weight * covered + (1 - rule.weight) * (1 - cost)
        if covered >= rule.min_coverage and utility > best:
            best, found = utility, k
    return found


@pytest.mark.parametrize(
    "rule",
    [Bcl(), Bcl(min_coverage=0.5), Bcl(weight=0.9), Bcl(weight=0.2, min_coverage=0.0)],
    ids=["coverage_binds", "coverage_half", "coverage_dear", "cost_dear"],
)
def test_scan_is_the_definition(rule: Bcl) -> None:
    words = vocabulary(300, unusable=(0, 5, 299))
    counts_V = zipf(300)
    counts_V[[0, 5, 299]] = 0
    assert size_of(rule, counts_V, words) == by_hand(rule, counts_V, words)


def test_utility_at_a_size_worked_out_by_hand() -> None:
    words = vocabulary(4)
    counts_V = torch.tensor([30, 10, 0, 60])  # the stop token, 1, comes first
    utility_V = Bcl(weight=0.25, min_coverage=0.5).utility(counts_V, words, FLOPS)
    # k = 2 keeps 1 and 3: coverage 0.7, FLOPs 1040 of 1080
    assert utility_V[0] == float("-inf")
    assert utility_V[1].item() == pytest.approx(0.25 * 0.7 + 0.75 * (1 - 1040 / 1080), abs=1e-12)
    assert utility_V[3].item() == pytest.approx(0.25)


@pytest.mark.parametrize("least", [0.5, 0.8, 0.95, 1.0])
def test_with_cost_alone_the_fewest_tokens_that_cover_enough_are_kept(least: float) -> None:
    words, counts_V = vocabulary(200), zipf(200)
    size = size_of(Bcl(weight=0.0, min_coverage=least), counts_V, words)
    share_V = coverage(counts_V, rank(counts_V, words))
    assert share_V[size - 1] >= least
    assert share_V[size - 2] < least


def test_with_coverage_alone_nothing_unseen_is_kept() -> None:
    counts_V = zipf(200)
    counts_V[counts_V < 20_000] = 0
    assert size_of(Bcl(weight=1.0), counts_V, vocabulary(200)) == len(counts_V.nonzero()) + int(counts_V[1] == 0)


@pytest.mark.parametrize("exponent", [0.8, 1.2], ids=["flat", "steep"])
@pytest.mark.parametrize("least", [0.0, 0.9])
def test_tpe_agrees_with_the_scan(exponent: float, least: float) -> None:
    """100 calls among thousands of sizes do not hit the best one, but one as good."""
    words, counts_V = vocabulary(16_384), zipf(16_384, exponent)
    scan, tpe = (Bcl(min_coverage=least, search=s).make(counts_V, words, Drafter("", words)) for s in ("scan", "tpe"))
    assert scan.figures["utility"] - 1e-3 <= tpe.figures["utility"] <= scan.figures["utility"]
    assert tpe.figures["coverage"] >= least


def test_tpe_finds_the_best_of_few_sizes_and_repeats_itself() -> None:
    words, counts_V = vocabulary(40), zipf(40)
    rule = Bcl(search="tpe", min_coverage=0.3)
    assert size_of(rule, counts_V, words) == by_hand(rule, counts_V, words)
    utility_V = rule.utility(zipf(2000), vocabulary(2000), FLOPS)
    assert search_tpe(utility_V, calls=20, seed=3) == search_tpe(utility_V, calls=20, seed=3)


def test_head_share_of_the_published_drafter() -> None:
    """EAGLE-3 for Llama-3.1-8B: the paper gives 64.2% of the drafter's work to the head."""
    config = Eagle3Config(
        hidden_size=4096,
        target_hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tap_layers=(2, 16, 29),
    )
    flops = drafter_flops(config)
    assert flops.per_row == 2 * 4096
    assert 1 - flops.body / (flops.body + flops.per_row * 128256) == pytest.approx(0.642, abs=0.001)
    assert flops.share(128256, 128256) == 1.0


def test_flops_of_a_target_without_reading_its_weights(tiny_target: FrozenTarget) -> None:
    words = Vocabulary.load(tiny_target.folder, "tiny")
    assert ReferenceDrafter(tiny_target.folder, words).flops == drafter_flops(config_for(tiny_target, Eagle3Options()))
