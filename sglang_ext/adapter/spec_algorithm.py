"""Our speculative algorithms as SGLang registers them: `--speculative-algorithm MEDUSA` and the others.

They draft from one vector a request (sglang_ext.drafters.shared.last_hidden) and verify as EAGLE does; what exactly is
drafted, and whether a layer with a cache makes that vector, says the checkpoint.
"""

from functools import cache
from importlib import import_module
from typing import Any

from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ext.adapter.algorithms import checked_info, own_algorithms, serving_families
from sglang_ext.adapter.internals import CONTEXT_WORKERS, LAST_HIDDEN_WORKERS
from sglang_ext.adapter.patches import prepare_scheduler
from sglang_ext.adapter.workers.drawn_standalone import check_thresholds
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, naming, read_info
from sglang_ext.trees import CandidateTree, build_tree
from sglang_ext.trees.static import NODES, TOPK


class LastHiddenAlgorithm(CustomSpecAlgo):
    """EAGLE's place in SGLang (verification, relay of hidden states between steps), with a drafter of ours.

    SGLang 0.5.23 calls the next four methods of every algorithm, but `CustomSpecAlgo` lacks them.
    """

    need_topk = SpeculativeAlgorithm.need_topk
    carries_draft_hidden_states = SpeculativeAlgorithm.carries_draft_hidden_states
    create_future_map = SpeculativeAlgorithm.create_future_map
    build_disagg_draft_input = SpeculativeAlgorithm.build_disagg_draft_input

    def is_eagle(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        """Whether the drafter that the server has started with has a KV cache; those that are swapped in are alike."""
        return _has_cache(get_spec().speculative_draft_model_path)

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in what the user left open from the checkpoint. Raises ValueError for what cannot be served."""
        path = server_args.speculative_draft_model_path
        if path is None:
            raise ValueError(f"--speculative-algorithm {self.name} needs a drafter: --speculative-draft-model-path")
        info = checked_info(path, self.name)
        positions = info.body.max_draft_steps
        assert positions is not None, "only such drafters are served by an algorithm of ours"
        if not any(own.serving.tree_kinds(self.name) for own in serving_families(self.name)):
            if server_args.speculative_eagle_topk not in (None, 1):
                raise ValueError(
                    f"--speculative-algorithm {self.name} drafts a chain; leave --speculative-eagle-topk out"
                )
            server_args.speculative_eagle_topk = 1
        if server_args.speculative_eagle_topk is None:
            server_args.speculative_eagle_topk = TOPK
        refused = {
            "--speculative-adaptive": server_args.speculative_adaptive,
            "--pp-size above 1": server_args.pp_size > 1,
            "--enable-dp-attention": server_args.enable_dp_attention,
            # on some GPUs SGLang takes an attention backend whose pages are larger, where nobody named one
            "--page-size above 1 (--attention-backend triton or flashinfer has pages of 1)": (
                (server_args.page_size or 1) > 1
            ),
            "--speculative-use-block-verification with a tree": (
                server_args.speculative_use_block_verification and server_args.speculative_eagle_topk != 1
            ),
        }
        for option, is_set in refused.items():
            if is_set:
                raise ValueError(f"--speculative-algorithm {self.name} does not offer {option}; leave it out")
        if server_args.speculative_use_rejection_sampling:
            check_thresholds(server_args)
            if server_args.speculative_eagle_topk != 1:
                with naming(info.path):
                    served_tree(info).check_can_be_drawn()
        if server_args.max_running_requests is None:
            server_args.max_running_requests = 48  # SGLang's own default under speculation
        if server_args.speculative_num_steps is None:
            server_args.speculative_num_steps = positions
        steps = server_args.speculative_num_steps
        if not 1 <= steps <= positions:
            raise ValueError(
                f"--speculative-num-steps must be in 1..{positions} (the positions that drafter {path} was made for), "
                f"got {steps}"
            )
        if server_args.speculative_eagle_topk == 1:
            server_args.speculative_num_draft_tokens = steps + 1
        elif server_args.speculative_num_draft_tokens is None:
            server_args.speculative_num_draft_tokens = min(
                NODES, served_tree(info).most_nodes(steps, server_args.speculative_eagle_topk)
            )

    def create_worker(self, server_args: Any) -> Any:
        from sglang_ext.adapter.workers.last_hidden import LastHiddenWorker
        from sglang_ext.adapter.workers.timed import TimedEagleWorker

        has_cache = _has_cache(server_args.speculative_draft_model_path)
        prepare_scheduler(CONTEXT_WORKERS if has_cache else LAST_HIDDEN_WORKERS)
        return TimedEagleWorker if has_cache else LastHiddenWorker


class SpecFormerAlgorithm(LastHiddenAlgorithm):
    """SpecFormer's algorithm, with taps of the target, as EAGLE-3 has."""

    def is_eagle3(self) -> bool:
        return True


@cache
def _has_cache(drafter: str) -> bool:
    return read_info(drafter).body.has_cache


def served_tree(info: CheckpointInfo) -> CandidateTree:
    """The drafter's tree. Raises ValueError for a drafter without one."""
    if info.tree is None:
        raise ValueError(
            f"drafter {info.path} has no draft_tree; give it one with rayspec train, or serve it as a chain: "
            "--speculative-eagle-topk 1"
        )
    return build_tree(info.tree, vocab_size=info.body.vocab_size)


def register_algorithms() -> None:
    """Once in every process, by the plugin."""
    for name, path in own_algorithms():
        module, cls = path.split(":")

        @SpeculativeAlgorithm.register(name, supports_overlap=True, spec_class=getattr(import_module(module), cls))
        def factory(server_args: Any) -> None:
            """`LastHiddenAlgorithm.create_worker` names the worker itself."""
