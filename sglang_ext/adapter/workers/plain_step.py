"""A step without drafts as SGLang's plain decoding takes it, for a policy's worker whose drafter rests.

SGLang sends such a step through verification, of a tree that is the root alone. What verification does beside the
target's pass (slots, the mask, accepting) is Python and small operations, which on a CPU are part of each step's time.
On an accelerator it stays: there a speculative engine has captured graphs of verification, and none of plain decoding.
"""

from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode


def can_decode_plainly(batch: Any, ranks: int) -> bool:
    """Whether a step of these requests comes out as a verification would: with masks of grammars, log probabilities or
    hidden states it has another form, custom logit processors act in SGLang's sampler alone, and only verification
    tells all tensor-parallel ranks what the first one has drawn."""
    info = batch.sampling_info
    asks_more = batch.has_grammar or batch.return_logprob or batch.return_hidden_states
    return not asks_more and not info.has_custom_logit_processor and (ranks == 1 or info.is_all_greedy)


def decode_plainly(target_worker: Any, batch: Any) -> GenerationBatchResult:
    """What a verification of the roots gives: the next token of each of B requests.

    Each operation counts: the target's weights have just passed through the caches, so that one on a handful of numbers
    takes ten times what it does in a loop.

    Args:
        target_worker: SGLang's worker of the target.
        batch: SGLang's, of a decode step, with its draft input and a slot reserved for each request. It changes as in a
            verification; SGLang's scheduler puts it back.
    """
    draft_input, length_B = batch.spec_info, batch.seq_lens
    batch.input_ids, batch.spec_info = draft_input.bonus_tokens, None
    batch.out_cache_loc = batch.req_to_token_pool.req_to_token[batch.req_pool_indices, length_B].long()
    batch.seq_lens = batch.seq_lens_cpu = length_B + 1  # plain decoding counts the token that it reads
    batch.seq_lens_sum = None
    result = target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.NULL)
    result.new_seq_lens, result.accept_lens = batch.seq_lens, torch.ones_like(length_B)
    result.speculative_num_draft_tokens = 1
    draft_input.bonus_tokens = result.next_token_ids
    result.next_draft_input = draft_input
    return result
