"""Sampled tokens on targets of other architectures, drafted for by reduced heads, against their distribution by Hugging
Face: windows and sinks of GPT-OSS, scaled embeddings and capped logits of Gemma 3; by the rules of
test_distributions.py."""

from pathlib import Path

import pytest
from distributions import check_distributions, check_greedy_in_a_mixed_batch
from engines import running_engine
from target_kinds import TARGETS, random_model
from test_distributions import FEWER_PAIRS, FILTERS, REQUESTS, check_pairs
from toy import DRAFT_STEPS, Toy, V, toy_of

from sglang_ext.adapter.engine import swap_drafter


def make(folder: Path, name: str) -> Toy:
    config = TARGETS[name]()
    config.vocab_size = V
    return toy_of(random_model(config), folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3"])
def test_distribution_with_reduced_heads(name: str, tmp_path: Path) -> None:
    """Drafts are drawn of the head's distribution; a swap leaves the target's distribution alone."""
    toy = make(tmp_path / "target", name)
    truncated, slim = (toy.save_drafter(tmp_path / head, head) for head in ("truncated", "slimspec"))
    options = {"draft_steps": DRAFT_STEPS, "max_running_requests": 128, "speculative_use_rejection_sampling": True}
    with running_engine(truncated, target=toy.folder, skip_tokenizer_init=True, **options) as engine:
        check_distributions(
            engine, toy, {name: FILTERS[name] for name in ("top_k_and_top_p", "all")}, requests=REQUESTS
        )
        check_greedy_in_a_mixed_batch(engine, toy)
        swap_drafter(engine, str(slim))
        check_pairs(engine, toy, FEWER_PAIRS)
