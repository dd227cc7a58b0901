"""Per-request seeds on the CPU platform, and the flag of greedy batches, both kept in SGLang's SamplingBatchInfo.

SGLang honours a request's `sampling_seed` only under --enable-deterministic-inference, which needs CUDA kernels, and
gives every request without one the same seed then. Here a request with a seed has it honoured, whatever batch it runs
in and however many nodes that verifies; requests without one stay random, and batches without any keep SGLang's
unseeded path.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _fresh_seeds(count: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64)


def make_with_seeds(original: Callable[..., Any], cls: type, batch: Any, vocab_size: int) -> Any:
    """AROUND SamplingBatchInfo.from_schedule_batch: attach the seeds that sampled requests of the batch ask for."""
    info = original(cls, batch, vocab_size)
    asked = [None if req.sampling_params.top_k <= 1 else req.sampling_params.sampling_seed for req in batch.reqs]
    if any(seed is not None for seed in asked):
        info.sampling_seed = _fresh_seeds(len(asked))
        for row, seed in enumerate(asked):
            if seed is not None:
                info.sampling_seed[row] = seed
    return info


def merge_with_seeds(original: Callable[..., Any], self: Any, other: Any) -> None:
    """AROUND SamplingBatchInfo.merge_batch, which expects seeds on both sides or on neither."""
    if (self.sampling_seed is None) != (other.sampling_seed is None):
        unseeded = self if self.sampling_seed is None else other
        unseeded.sampling_seed = _fresh_seeds(len(unseeded))
    original(self, other)


def filter_and_see_greedy(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND SamplingBatchInfo.filter_batch, which leaves the flag as it was: greedy requests would go on paying for
    a sampled one that has left."""
    original(self, *args, **kwargs)
    self.is_all_greedy = bool((self.top_ks <= 1).all())


def coins_of_any_width(
    original: Callable[..., Any], *, sampling_seed: Tensor, seq_lens: Tensor, draft_token_num: int, device: Any
) -> tuple[Tensor, Tensor]:
    """AROUND eagle_utils._seeded_verify_coins, whose final draw has the number of nodes for its key: a request must not
    see how many nodes the largest tree of its batch has (tree_verify.py)."""
    from sglang.srt.runtime_context import get_spec

    coins_BN, final_coins_B = original(
        sampling_seed=sampling_seed,
        seq_lens=seq_lens,
        draft_token_num=get_spec().speculative_num_draft_tokens,
        device=device,
    )
    return coins_BN[:, :draft_token_num].contiguous(), final_coins_B
