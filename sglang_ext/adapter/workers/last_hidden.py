"""The worker of drafters that read the target's last hidden state: SGLang's EAGLE worker without a draft model.

Between two steps a request carries one hidden state, that of its last verified token before the root; all drafting is
done from it at the start of the next step. So there is no draft cache, no draft pass and no extend: the "extends" below
select rows. Verification, sampling and cache moves are SGLang's own, as for EAGLE's trees.
B = requests, N = verified nodes of a request, H = hidden size, V = vocabulary.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.runtime_context import get_device, get_spec
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.frozen_kv_mtp_utils import select_last_extend_hidden
from torch import Tensor

from rayspec_kernels.cpu.sibling_distribution import Siblings
from sglang_ext.adapter.activation import has_accelerator
from sglang_ext.adapter.algorithms import checked_info
from sglang_ext.adapter.longest_draft import LongestDraft
from sglang_ext.adapter.models.sharded_head import all_shared_over_ranks
from sglang_ext.adapter.served_target import served_stop_ids, served_target
from sglang_ext.adapter.step_clock import CLOCK
from sglang_ext.adapter.workers.captured import Captured
from sglang_ext.adapter.workers.propose_graphs import ProposeGraphs, has_graphs
from sglang_ext.adapter.workers.sampling import draw_drafts
from sglang_ext.adapter.workers.timed import TimedEagleWorker
from sglang_ext.adapter.workers.tree_verify import tree_verify_input
from sglang_ext.drafters import family
from sglang_ext.drafters.checkpoint import HEAD_PREFIX, check_loaded, check_tensors, load_sharing, origins, read_tensors
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, empty_drafter, naming
from sglang_ext.drafters.shared.last_hidden import LastHiddenDrafter
from sglang_ext.heads import DraftHead
from sglang_ext.trees import Draft, Proposer
from sglang_ext.trees.base import Picked, most_likely
from sglang_ext.trees.static import StaticProposer, chain_paths


class CarriedDrafting(Captured):
    """A draft worker whose drafts are made at the start of a step from the one vector that each request carries."""

    carries_drafts = False
    info: CheckpointInfo
    origins: Mapping[str, str] = MappingProxyType({})  # of its tensors (`sglang_ext.drafters.checkpoint.origins`)
    drafter: LastHiddenDrafter
    proposers: dict[int, Proposer]  # by the number of draft steps
    siblings: Siblings | None = None  # of the tree, where its nodes are drawn
    longest: LongestDraft
    target_worker: Any
    device: str
    topk: int
    speculative_num_steps: int
    speculative_num_draft_tokens: int

    graphs: Mapping[int, ProposeGraphs | None] = MappingProxyType({})  # by draft steps; None while a swap captures
    _specialized_graph_memory_usage: dict[str, float]  # SGLang's, of what it reports
    resident = 0  # others that stay beside the running one: none is kept, since each may be a whole drafter

    def held(self, origins: Mapping[str, str]) -> set[str]:
        """Names of another drafter's tensors that are in the running one already: they come from the same file. Of a
        head that ranks share, a rank has rows alone, under other names."""
        same = {name for name, origin in origins.items() if self.origins.get(name) == origin}
        own = self.drafter.state_dict() if same else {}  # at the start there is no drafter
        return {name for name in same if name in own or not name.startswith(HEAD_PREFIX)}

    def _held_tensors(self, origins: Mapping[str, str]) -> dict[str, Tensor]:
        names = self.held(origins)
        return {n: t for n, t in self.drafter.state_dict(keep_vars=True).items() if n in names} if names else {}

    def stays(self, info: CheckpointInfo, origins: Mapping[str, str]) -> bool:
        """Whether the running drafter is of these very files."""
        return self.refusal is None and (self.info, self.origins) == (info, origins)

    def run_again(self, info: CheckpointInfo, origins: Mapping[str, str]) -> None:
        """Host one that stays: it runs."""

    def check_swappable(self) -> None:
        """Any is: what is captured for the draft lengths of a policy is captured again, too."""

    def _capture_cuda_graphs(self) -> None:
        """Drafting at the present length. SGLang asks for it at the start, and for each other length of a policy."""
        # SGLang's own would be of a draft loop, and of an extend behind it
        self.cuda_graph_runner = self.cuda_graph_runner_for_draft_extend = None
        if self.speculative_num_steps in self.proposers and has_graphs():
            self._capture_drafting(self.speculative_num_steps)

    def _capture_hosted(self) -> None:
        lengths = list(self.graphs)
        for graphs in self.graphs.values():
            if graphs is not None:
                graphs.free()
        self.graphs = dict.fromkeys(lengths)
        with self._capturing():
            for steps in lengths:
                self._capture_drafting(steps)

    @torch.no_grad()
    def _capture_drafting(self, steps: int) -> None:
        drafter, proposer = self.drafter, self.proposers[steps]

        def propose(hidden_BH: Tensor, root_B: Tensor) -> Draft:
            return proposer.propose(drafter, hidden_BH, root_B, self._embed)

        made = ProposeGraphs(self.target_worker.model_runner, drafter.config.hidden_size, propose)
        self.graphs = {**self.graphs, steps: made}
        self._specialized_graph_memory_usage["draft_decode"] = sum(g.memory_gb for g in self.graphs.values() if g)

    def _draft_with(self, info: CheckpointInfo, drafter: LastHiddenDrafter) -> None:
        """Use it from the next step on. Raises ValueError where head or tree do not fit; nothing changes then."""
        with naming(info.path):
            proposers = self._proposers(drafter)
            siblings = self._siblings(drafter, proposers)
        CLOCK.watch(drafter.lm_head)
        self.info, self.drafter, self.proposers, self.siblings = info, drafter, proposers, siblings

    def _proposers(self, drafter: LastHiddenDrafter) -> dict[int, Proposer]:
        """The drafter's tree at this engine's size, and the chains of fewer steps, which a policy may choose. Raises
        ValueError where it does not fit."""
        shorter = range(1, self.longest.steps) if self.topk == 1 else ()
        chains: dict[int, Proposer] = {k: StaticProposer(chain_paths(k), self.device) for k in shorter}
        return chains | {self.longest.steps: self._proposer(drafter)}

    def _proposer(self, drafter: LastHiddenDrafter) -> Proposer:
        steps, topk, nodes = self.longest.steps, self.longest.topk, self.longest.nodes
        if steps > drafter.config.positions:
            raise ValueError(
                f"it drafts {drafter.config.positions} positions, but --speculative-num-steps is {steps}; lower it"
            )
        fewest = drafter.lm_head.fewest_candidates(steps)
        if fewest < topk:
            raise ValueError(
                f"its head may score as few as {fewest} tokens, which cannot serve --speculative-eagle-topk {topk}; "
                "lower it, or use a head with more candidates"
            )
        if topk == 1:
            return StaticProposer(chain_paths(steps), self.device)
        if drafter.draft_tree is None:
            raise ValueError("it has no draft_tree; give it one, or serve it as a chain: --speculative-eagle-topk 1")
        return drafter.draft_tree.fit(steps, topk, nodes, self.device)

    def _siblings(self, drafter: LastHiddenDrafter, proposers: dict[int, Proposer]) -> Siblings | None:
        """Raises ValueError for a tree that cannot be drawn."""
        if self.topk == 1 or not get_spec().speculative_use_rejection_sampling:
            return None
        assert drafter.draft_tree is not None, "a proposer of several branches is made of it"
        drafter.draft_tree.check_can_be_drawn()
        return proposers[self.longest.steps].siblings(drafter.reads_path)

    def _embed(self, ids: Tensor) -> Tensor:
        """Rows of the target's embedding, as training reads them: without the factor of Gemma's."""
        embedding = self.target_worker.model_runner.model.get_input_embeddings()
        rows, scale = embedding(ids), getattr(embedding, "embed_scale", None)
        return rows if scale is None else rows / scale

    @torch.no_grad()
    def draft(self, batch: Any) -> EagleVerifyInput:
        if batch.forward_mode.is_idle():
            return EagleVerifyInput.create_idle_input(
                self.topk, self.speculative_num_steps, self.speculative_num_draft_tokens, self.device
            )
        draft_input, info = batch.spec_info, batch.sampling_info
        distributions: list[Tensor] = []

        def pick(head: DraftHead, state_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Picked:
            with CLOCK.head():
                if draws:
                    temperature_T1 = info.temperatures.repeat_interleave(len(state_TH) // len(info), dim=0)
                    probs_TV = head.target_distribution(state_TH, step, routed, temperature_T1)
                else:
                    picked = most_likely(head, state_TH, step, k, routed)
            CLOCK.count_shortlist(head, state_TH, step, routed)
            if not draws:
                return picked
            probs_TV, ids_Tk, _ = draw_drafts(probs_TV, info, batch.seq_lens + step, step, k)
            distributions.append(probs_TV.unflatten(0, (len(info), -1)))
            return Picked(ids_Tk, None)

        draws = get_spec().speculative_use_rejection_sampling and not info.is_all_greedy
        # a draw depends on filters and seeds of its batch, and its distributions are too many to copy
        graphs = None if draws else self.graphs.get(self.speculative_num_steps)
        hidden_BH, root_B = draft_input.hidden_states, draft_input.bonus_tokens.long()
        draft = None if graphs is None else graphs.replay(hidden_BH, root_B)
        if draft is None:
            proposer = self.proposers[self.speculative_num_steps]
            draft = proposer.propose(self.drafter, hidden_BH, root_B, self._embed, pick)
        return tree_verify_input(
            batch,
            draft,
            self.target_worker.model_runner,
            draft_steps=self.speculative_num_steps,
            topk=self.topk,
            probs_BRV=torch.cat(distributions, dim=1) if distributions else None,
            siblings=self.siblings if distributions else None,
        )

    def _carry(self, draft_input: EagleDraftInput, hidden_BH: Tensor) -> None:
        """What goes to the next step. SGLang relays and merges the other two fields of every request; a distribution
        that it made of no logits is none."""
        B = len(hidden_BH)
        draft_input.hidden_states, draft_input.draft_probs = hidden_BH, None
        draft_input.topk_p = torch.zeros(B, self.topk, device=self.device)
        draft_input.topk_index = torch.zeros(B, self.topk, dtype=torch.int64, device=self.device)


class LastHiddenDraftWorker(CarriedDrafting, EagleDraftWorkerBase):
    """Drafter and tree, with no model runner of their own."""

    draft_runners: list[Any] = []  # noqa: RUF012  (SGLang's property: no runner has weights, caches or graphs)
    draft_attn_backend = draft_extend_attn_backend = None  # SGLang makes one for each draft length of a policy
    cuda_graph_runner = cuda_graph_runner_for_draft_extend = None  # SGLang's; ours are `graphs`

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self.target_worker = target_worker
        self.device = get_device().device
        self.longest = LongestDraft.of_server()
        self.topk = self.longest.topk
        self.speculative_num_steps, self.speculative_num_draft_tokens = self.longest.steps, self.longest.nodes
        # every rank drafts, from a hidden state that all ranks have
        self.parallel_layout = resolve_draft_parallel_layout(
            DraftParallelSpec(tp_execution=DraftTPExecution.TARGET_LAYOUT)
        )
        # SGLang asks the draft runner for the width of the hidden state: the target's
        self.draft_runner = target_worker.model_runner
        self.draft_runner.draft_attn_backend = None  # which SGLang saves and puts back with a policy's draft lengths
        info = checked_info(server_args.speculative_draft_model_path, get_spec().speculative_algorithm.upper())
        found = origins(info)  # before they are read: files may be exchanged at any time
        self._host(info, read_tensors(info), found)

    def _host(self, info: CheckpointInfo, tensors: dict[str, Tensor], origins: Mapping[str, str]) -> None:
        """Take over a drafter; nothing changes unless all of it fits. What is `held` may be on `meta`. Raises
        ValueError."""
        drafter = empty_drafter(info)
        assert isinstance(drafter, LastHiddenDrafter), "what its family says that this worker serves"
        assert info.target is not None, "parse_info gives a target to every checkpoint of our own architecture"
        info.target.check_served_with(served_target(()), info.path)
        check_tensors(tensors, info)
        with naming(info.path):
            load_sharing(drafter, tensors, self._held_tensors(origins))
            drafter.to(self.device, self.target_worker.model_runner.dtype).requires_grad_(False)
            check_loaded(drafter, served_stop_ids())
        drafter.lm_head = all_shared_over_ranks(drafter.lm_head)
        if not has_accelerator():
            drafter.lm_head.pack()
        self._draft_with(info, drafter)
        self.origins = origins

    def host(self, info: CheckpointInfo, tensors: dict[str, Tensor], origins: Mapping[str, str]) -> None:
        """Host another drafter of this kind of worker. Raises ValueError; the running one is then unchanged."""
        is_others = family(info.kind).serving.worker != family(self.info.kind).serving.worker
        if is_others or info.body.has_cache:
            cached = "" if is_others else " with a layer that has a cache"
            raise ValueError(
                f"cannot swap in {info.path}: a drafter of kind {info.kind}{cached} needs another worker than the "
                f"running {self.info.kind} has; restart"
            )
        self._host(info, tensors, origins)
        self._refuse_until_captured(info.path)

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        pass

    def init_attention_backends(self) -> None:
        pass

    def init_attention_backend(self) -> None:
        """For another draft length: there is none for any."""

    def _rebuild_topk1_chain_buffers(self) -> None:
        """For another draft length: `proposers` has its tree."""

    def init_cuda_graphs(self) -> None:
        with self._capturing():
            self._capture_cuda_graphs()

    def draft_extend(self) -> None:
        pass

    def _draft_extend_for_prefill(
        self, batch: Any, target_hidden: Tensor, next_token_ids: Tensor, *args: Any, **kwargs: Any
    ) -> EagleDraftInput:
        self.check_captured()
        hidden_BH = target_hidden if batch.forward_mode.is_idle() else select_last_extend_hidden(batch, target_hidden)
        if hidden_BH is target_hidden:  # may be of a graph's memory, which the next prefill writes to
            hidden_BH = hidden_BH.clone()
        draft_input = EagleDraftInput(bonus_tokens=next_token_ids)
        self._carry(draft_input, hidden_BH)
        return draft_input

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, **kwargs: Any) -> None:
        """The accepted path is at the front of each request's nodes by now."""
        first_B = torch.arange(len(batch.seq_lens), device=self.device) * batch_result.speculative_num_draft_tokens
        last_B = first_B + batch_result.accept_lens.long() - 1
        self._carry(batch_result.next_draft_input, batch_result.logits_output.hidden_states[last_B])


class LastHiddenWorker(TimedEagleWorker):
    """EAGLE's step with the draft worker of this module."""

    @property
    def last_shared_read_runner(self) -> Any:
        return self._target_worker.model_runner

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (self._target_worker.model_runner.attn_backend,)
