"""SGLang's draft worker with a draft loop in which the head itself hands over its candidates.

Stock EAGLE computes logits of the whole vocabulary and searches them at every step. Here the head is asked for its k
best tokens at a given draft position, so that what a head saves is really saved. The extends that produce position 0
are SGLang's; only their top-k is replaced by the head's. Drafters that are not ours run SGLang's loop. A drafter with a
draft_tree hands on all candidates of the loop, and its pruner instead of EAGLE-2 chooses what is verified.
"""

import gc
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import organize_draft_results, per_step_draft_out_cache_loc
from sglang.srt.speculative.eagle_worker_common import prepare_for_draft
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_utils import select_top_k_tokens
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker
from torch import Tensor

from sglang_ext.adapter.activation import has_accelerator
from sglang_ext.adapter.models.hosted_head import HeadRequest, HostsHead
from sglang_ext.adapter.workers.captured import Captured
from sglang_ext.adapter.workers.extend_graphs import HeadExtendGraphs
from sglang_ext.adapter.workers.resident import GraphSet, Resident
from sglang_ext.adapter.workers.sampling import draw_drafts
from sglang_ext.adapter.workers.tree_verify import tree_verify_input
from sglang_ext.drafters.checkpoint_config import CheckpointInfo
from sglang_ext.trees import Expansion, Pruner

logger = logging.getLogger(__name__)


class HeadDraftWorker(Captured, EagleDraftWorker):
    """Draft worker for EAGLE-3 drafters."""

    speculative_num_draft_tokens: int
    carries_drafts = True  # the first of a step comes from the step before
    resident = 0  # drafters that may stay beside the running one
    _residents: tuple[Resident, ...] = ()  # the last that ran comes last
    _left: GraphSet  # of the one before what was hosted last

    @property
    def _is_ours(self) -> bool:
        return isinstance(self.draft_runner.model, HostsHead)

    @property
    def _pruner(self) -> Pruner | None:
        return self.draft_runner.model.pruner if self._is_ours else None

    def check_swappable(self) -> None:
        """Raise ValueError where this drafter cannot be replaced in the running scheduler."""
        if not self._is_ours:
            raise ValueError(
                f"the running drafter is a {type(self.draft_runner.model).__name__}; only rayspec drafters can be "
                "swapped live"
            )
        if get_spec().speculative_adaptive or (get_spec().speculative_adaptive_config and has_accelerator()):
            raise ValueError(
                "--speculative-adaptive and a policy (--speculative-adaptive-config) keep graphs of other draft "
                "lengths, which hold the running head; leave them out to swap drafters live"
            )

    def held(self, origins: Mapping[str, str]) -> set[str]:
        """Names of another drafter's tensors that need not be read for it."""
        return self.draft_runner.model.held(origins)

    def stays(self, info: CheckpointInfo, origins: Mapping[str, str]) -> bool:
        """Whether a drafter of these very files is here already, running or beside the running one."""
        return self.refusal is None and any(
            (h.info, h.origins) == (info, origins)
            for h in (self.draft_runner.model.hosted, *(r.hosted for r in self._residents))
        )

    def run_again(self, info: CheckpointInfo, origins: Mapping[str, str]) -> None:
        """Host one that stays."""
        running = self._running()
        every = {id(r): r for r in (running, *self._residents)}
        found = next(r for r in every.values() if (r.hosted.info, r.hosted.origins) == (info, origins))
        if found is not running:
            self._residents = (*(r for r in self._residents if r is not found), running)
            self.draft_runner.model.take_over(found.hosted)
            found.graphs.put_in(self)
        self._let_go(self.resident)

    def _running(self) -> Resident:
        return Resident(hosted=self.draft_runner.model.hosted, graphs=GraphSet.of(self))

    def _let_go(self, kept: int) -> None:
        """All but so many of those that stay, the oldest first."""
        gone = max(0, len(self._residents) - kept)
        for resident in self._residents[:gone]:
            resident.graphs.free()
        self._residents = self._residents[gone:]

    def host(self, info: CheckpointInfo, tensors: dict[str, Tensor], origins: Mapping[str, str]) -> None:
        """Take another drafter of the same body shapes; `capture` follows. Raises ValueError; the running one is then
        unchanged."""
        before = self._running()
        keeps = self.resident > 0 and self.refusal is None
        self._left = before.graphs
        if self._taken(info, tensors, origins) and keeps:
            self._residents = (*self._residents, before)
        self._let_go(self.resident if keeps else 0)
        self._refuse_until_captured(info.path)

    def _taken(self, *drafter: Any) -> bool:
        """Whether the body has stayed. Those that stood on another go, and all of them where there is no memory for
        another head."""
        try:
            stays = self.draft_runner.model.swap(*drafter)
        except torch.OutOfMemoryError:  # before anything has changed
            if not self._residents or get_parallel().tp_size > 1:
                raise
            stays = None
        if stays is None:
            self._make_room()
            stays = self.draft_runner.model.swap(*drafter)
        if not stays:
            self._let_go(0)
        return bool(stays)

    def _capture_hosted(self) -> None:
        if not (self._residents and self._is_captured_beside(self._left)):
            self._capture_again()

    def _make_room(self) -> None:
        self._let_go(0)
        gc.collect()  # runners and their backends name each other
        if has_accelerator():
            torch.cuda.empty_cache()

    def _is_captured_beside(self, before: GraphSet) -> bool:
        """Capture beside those that stay, the one that ran as `before` among them. Whether that has succeeded: where it
        has not, for want of memory for the most part, all of them have gone. Several ranks would not know of each
        other, so that there the error is raised."""
        if not before.runners:  # a device without graphs
            return True
        try:
            with self._capturing():
                self.init_attention_backend()
                self._capture_cuda_graphs()
            return True
        except Exception as error:  # SGLang makes one of its own of what CUDA raises
            logger.warning("%d drafters cannot stay beside the running one (%s)", len(self._residents), error)
            failed, said = GraphSet.of(self), error if get_parallel().tp_size > 1 else None
        # behind the handler, whose traceback holds what was half made
        if failed.runners != before.runners:
            failed.free()
        before.without_graphs().put_in(self)
        if said is not None:
            raise said
        self._make_room()
        return False

    def _capture_again(self) -> None:
        """The graphs that hold addresses of a head, in the place of the running ones. Those of prefills stay: they hold
        the body alone, whose new weights were written where the old ones were."""
        GraphSet.of(self).free()
        with self._capturing():
            self._capture_cuda_graphs()

    def _answering(self, request: HeadRequest) -> AbstractContextManager[None]:
        return self.draft_runner.model.logits_processor.answering(request)

    def _request(self, step: int, sampling_info: Any) -> HeadRequest:
        return HeadRequest(step, self.topk, sampling_info.temperatures if _draws(sampling_info) else None)

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_ours:
            return super()._draft_extend_for_prefill(batch, *args, **kwargs)
        self.check_captured()
        request = self._request(0, batch.sampling_info)
        with self._answering(request):
            draft_input = super()._draft_extend_for_prefill(batch, *args, **kwargs)
        self._take_answer(draft_input, request, batch.sampling_info, batch.seq_lens)
        return draft_input

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, **kwargs: Any) -> None:
        if not self._is_ours:
            super()._draft_extend_for_decode(batch, batch_result, **kwargs)
            return
        request = self._request(0, batch.sampling_info)
        with self._answering(request), self._extending_by(batch_result.speculative_num_draft_tokens):
            super()._draft_extend_for_decode(batch, batch_result, **kwargs)
        graphs = self.cuda_graph_runner_for_draft_extend
        if isinstance(graphs, HeadExtendGraphs):  # a replay asks nothing anew
            graphs.answer(request)
        self._take_answer(batch_result.next_draft_input, request, batch.sampling_info, batch_result.new_seq_lens)

    @contextmanager
    def _extending_by(self, num_nodes: int) -> Iterator[None]:
        """SGLang's extend takes the worker's number of nodes for that of the step, which may have verified fewer."""
        full, self.speculative_num_draft_tokens = self.speculative_num_draft_tokens, num_nodes
        try:
            yield
        finally:
            self.speculative_num_draft_tokens = full

    def _take_answer(self, draft_input: Any, request: HeadRequest, sampling_info: Any, positions_B: Tensor) -> None:
        """Give SGLang's input of the next draft the head's own first drafts."""
        if request.probs_TV is not None:
            draft_input.draft_probs, draft_input.topk_index, draft_input.topk_p = draw_drafts(
                request.probs_TV, sampling_info, positions_B, request.step
            )
        elif request.best is not None:
            draft_input.topk_p, draft_input.topk_index = request.best
            if get_spec().speculative_use_rejection_sampling:  # sampled requests may join before the next draft
                ids_B1, vocab_size = request.best.token_ids_Tk, self.draft_runner.model.info.body.vocab_size
                certain_BV = torch.zeros(len(ids_B1), vocab_size, device=ids_B1.device)
                draft_input.draft_probs = certain_BV.scatter_(1, ids_B1, 1.0)

    def draft(self, batch: Any, *, with_topology: bool = False) -> Any:
        """SGLang's, or its loop with the pruner's choice of the candidates."""
        pruner = self._pruner
        if pruner is None or batch.forward_mode.is_idle():
            return super().draft(batch, with_topology=with_topology)
        assert not with_topology, "a pipeline was refused with the pruner"
        forward_batch, is_captured, _ = prepare_for_draft(
            batch.spec_info,
            self.req_to_token_pool,
            batch,
            self.cuda_graph_runner,
            self.draft_runner,
            self.topk,
            self.speculative_num_steps,
        )
        if is_captured:
            *expansion, _ = self.cuda_graph_runner.execute(forward_batch)
        else:
            if self.speculative_num_steps > 1:
                self.draft_attn_backend.init_forward_metadata(forward_batch)
                forward_batch.mark_forward_metadata_ready()
            *expansion, _ = self.draft_forward(forward_batch)
        return tree_verify_input(
            batch,
            pruner.prune(batch.spec_info.bonus_tokens.long(), Expansion(*expansion)),
            self.target_worker.model_runner,
            draft_steps=self.speculative_num_steps,
            topk=self.topk,
        )

    def draft_forward(self, forward_batch: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """(parents, numbers of the chosen candidates, their tokens, q [B, steps, V] or None), as SGLang's; with a
        pruner the expansion, and None.

        q is made for sampled requests under rejection sampling alone.
        """
        if not self._is_ours or forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)
        spec, info = forward_batch.spec_info, forward_batch.sampling_info
        distributions = [spec.draft_probs] if _draws(info) else []
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
            request = self._request(step + 1, info)
            context = ForwardContext(attn_backend=self.draft_attn_backend.attn_backends[step])
            with forward_context(context, forward_batch=forward_batch):
                # SGLang's runner and logits processor would cost a small drafter as much as its layer does
                hidden = self.draft_runner.model.draft_step(forward_batch, request)
            if request.probs_TV is not None:
                probs_BV, ids_Bk, p_Bk = draw_drafts(request.probs_TV, info, forward_batch.positions + 1, step + 1)
                distributions.append(probs_BV)
            else:
                assert request.best is not None, "the head was asked"
                p_Bk, ids_Bk = request.best
            forward_batch.positions.add_(1)
        scores, tokens, parents = map(list, zip(*trees, strict=True))
        probs = torch.stack(distributions, dim=1) if distributions else None
        if self.topk == 1:
            B = len(tokens[0])
            kept = (self._topk1_parents_prealloc, self._topk1_score_indices_prealloc)
            return (*(_rows_of(rows, B) for rows in kept), torch.cat(tokens, dim=1), probs)
        if self._pruner is not None:
            return (*_expansion(scores, tokens, parents), None)
        return (*organize_draft_results(scores, tokens, parents, self.speculative_num_draft_tokens), probs)


class StandaloneHeadDraftWorker(HeadDraftWorker, StandaloneDraftWorker):
    """For independent drafters. SGLang gives them nothing of the target, no hidden state between steps."""


def _rows_of(rows: Tensor, B: int) -> Tensor:
    """So many of equal rows: the first of them, which a graph then keeps (a captured copy would read them at each
    replay, when a policy may have put others in their place), or more where there are not enough."""
    return rows[:B] if len(rows) >= B else rows[:1].expand(B, -1).contiguous()


def _expansion(scores: list[Tensor], tokens: list[Tensor], parents: list[Tensor]) -> Expansion:
    """The expansion, from what SGLang records of each draft step; the last one's beam has no children."""
    no_parents = parents[0][:, :0]
    return Expansion(
        torch.cat([no_parents, *parents[:-1]], dim=1), torch.cat(scores, dim=1).flatten(1), torch.cat(tokens, dim=1)
    )


def _draws(sampling_info: Any) -> bool:
    """Rejection sampling draws the drafts of a batch with sampled requests; all others are the head's best tokens."""
    return get_spec().speculative_use_rejection_sampling and not sampling_info.is_all_greedy
