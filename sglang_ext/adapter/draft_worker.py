"""SGLang's draft worker with a draft loop in which the head itself hands over its candidates.

Stock EAGLE computes logits of the whole vocabulary and searches them at every step. Here the head is asked for its k
best tokens at a given draft position, so that what a head saves is really saved. The extends that produce position 0
are SGLang's; only their top-k is replaced by the head's. Drafters that are not ours run SGLang's loop.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_utils import organize_draft_results, per_step_draft_out_cache_loc
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_utils import sample_draft_proposal, select_top_k_tokens
from torch import Tensor

from sglang_ext.adapter.models.eagle3 import Question, RaySpecEagle3


class HeadDraftWorker(EagleDraftWorker):
    @property
    def _is_ours(self) -> bool:
        return isinstance(self.draft_runner.model, RaySpecEagle3)

    def _asking(self, question: Question) -> AbstractContextManager[None]:
        return self.draft_runner.model.logits_processor.asking(question)

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_ours or get_spec().speculative_use_rejection_sampling:
            return super()._draft_extend_for_prefill(batch, *args, **kwargs)
        question = Question(step=0, k=self.topk)
        with self._asking(question):
            draft_input = super()._draft_extend_for_prefill(batch, *args, **kwargs)
        return _with_answer(draft_input, question)

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, **kwargs: Any) -> None:
        if not self._is_ours or get_spec().speculative_use_rejection_sampling:
            super()._draft_extend_for_decode(batch, batch_result, **kwargs)
            return
        question = Question(step=0, k=self.topk)
        with self._asking(question):
            super()._draft_extend_for_decode(batch, batch_result, **kwargs)
        _with_answer(batch_result.next_draft_input, question)

    def draft_forward(self, forward_batch: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """(parents, numbers of the chosen candidates, their tokens, q [B, steps, V] or None), as SGLang's.

        q is made for sampled requests under rejection sampling alone.
        """
        if not self._is_ours or forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)
        spec = forward_batch.spec_info
        samples = get_spec().speculative_use_rejection_sampling and not forward_batch.sampling_info.is_all_greedy
        laws = [spec.draft_probs] if samples else []
        slots = per_step_draft_out_cache_loc(
            forward_batch.out_cache_loc, forward_batch.batch_size, self.topk, self.speculative_num_steps
        )
        p_Bk, ids_Bk, hidden = spec.topk_p, spec.topk_index, spec.hidden_states
        path_scores: Tensor | None = None
        trees: list[tuple[Tensor, Tensor, Tensor]] = []
        for step in range(self.speculative_num_steps):
            if self.topk == 1:
                input_ids = ids_Bk.flatten()
                trees.append((p_Bk, ids_Bk, ids_Bk))
            else:
                input_ids, hidden, path_scores, tree = select_top_k_tokens(
                    step, p_Bk, ids_Bk, hidden, path_scores, self.topk
                )
                trees.append(tree)
            if step == self.speculative_num_steps - 1:
                break
            forward_batch.input_ids = input_ids
            forward_batch.out_cache_loc = slots[step]
            spec.hidden_states = hidden
            question = Question(step=step + 1, k=None if samples else self.topk)
            context = ForwardContext(attn_backend=self.draft_attn_backend.attn_backends[step])
            with forward_context(context, forward_batch=forward_batch):
                # SGLang's runner and logits processor would cost a small drafter as much as its layer does
                answer, hidden = self.draft_runner.model.draft_step(forward_batch, question)
            if samples:
                law_BV, p_Bk, ids_Bk = self._sample(answer, forward_batch, step + 1)
                laws.append(law_BV)
            else:
                p_Bk, ids_Bk = answer
            forward_batch.positions.add_(1)
        scores, tokens, parents = map(list, zip(*trees, strict=True))
        law = torch.stack(laws, dim=1) if samples else None
        if self.topk == 1:
            B = len(tokens[0])
            rows = (self._topk1_parents_prealloc, self._topk1_score_indices_prealloc)
            return (*(row[:1].expand(B, -1).contiguous() for row in rows), torch.cat(tokens, dim=1), law)
        return (*organize_draft_results(scores, tokens, parents, self.speculative_num_draft_tokens), law)

    @staticmethod
    def _sample(logits_BV: Tensor, forward_batch: Any, step: int) -> tuple[Tensor, Tensor, Tensor]:
        info = forward_batch.sampling_info
        return sample_draft_proposal(
            logits_BV,
            info.temperatures,
            info.top_ks,
            sampling_seed=info.sampling_seed,
            positions=forward_batch.positions + 1,
            draft_step=step,
        )


def _with_answer(draft_input: Any, question: Question) -> Any:
    """SGLang's input of the next draft with the head's own top-k; a replayed graph asks no head."""
    if question.answer is not None:
        draft_input.topk_p, draft_input.topk_index = question.answer
    return draft_input
