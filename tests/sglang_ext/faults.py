"""Changes of a running scheduler: a fault for the tests to find, and what CUDA graphs do to a prefill; and what can be
seen in it alone. Both by custom logit processors, the one way in which SGLang runs code of a request."""

import functools
import sys
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor


class DrawFromShortlist(CustomLogitProcessor):
    """Drafts come from the token ids `shortlist`, but are verified as if drawn from the distribution over the
    vocabulary (which is not exact). An empty list takes the fault out again."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        from sglang_ext.adapter.workers.sampling import draw_drafts

        # whichever this scheduler has: another one cannot be made of classes of SGLang's that were replaced
        workers = (sys.modules.get(f"sglang_ext.adapter.workers.{name}") for name in ("eagle", "last_hidden"))
        assert custom_param_list is not None
        shortlist = torch.tensor(custom_param_list[0]["shortlist"])

        def draw(q_TV: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            kept_TV = torch.zeros_like(q_TV).index_copy_(1, shortlist, q_TV[:, shortlist])
            _, token_ids_Tk, _ = draw_drafts(kept_TV / kept_TV.sum(dim=-1, keepdim=True), *args)
            return q_TV, token_ids_Tk, q_TV.gather(1, token_ids_Tk)

        for worker in filter(None, workers):
            worker.draw_drafts = draw if len(shortlist) else draw_drafts
        return logits


class ReplayPrefills(CustomLogitProcessor):
    """With `replays`, and until it is asked for without, no hook runs on a layer of the drafter in a prefill, as where
    SGLang replays the layers from a graph (`PrefillCudaGraphRunner._execute_body_capture`)."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        from sglang.srt.models.llama_eagle3 import LlamaModel

        assert custom_param_list is not None
        if not custom_param_list[0]["replays"]:
            LlamaModel.forward = LlamaModel.forward.__wrapped__
            return logits
        original = LlamaModel.forward

        @functools.wraps(original)
        def forward(model: Any, input_ids: Tensor, positions: Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
            (layer,) = model.layers
            hooks = dict(layer._forward_pre_hooks)
            if batch.forward_mode.is_extend():
                layer._forward_pre_hooks.clear()
            try:
                return original(model, input_ids, positions, batch, *args, **kwargs)
            finally:
                layer._forward_pre_hooks.update(hooks)

        LlamaModel.forward = forward
        return logits


class ShareSmallHeads(CustomLogitProcessor):
    """From the next swap on, tensor-parallel ranks share heads of any size."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        from sglang_ext.adapter.models import sharded_head

        sharded_head.MIN_SAVED_BYTES = 0
        return logits


class CountSharedHeads(CustomLogitProcessor):
    """The answer's token is how many heads are this rank's share of one."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        import gc

        from sglang_ext.adapter.models.sharded_head import ShardedHead

        gc.collect()  # those that a swap has left behind
        shared = sum(type(thing) is ShardedHead for thing in gc.get_objects())
        return torch.full_like(logits, -torch.inf).index_fill_(1, torch.tensor([shared]), 0.0)


class SwitchAtRandom(CustomLogitProcessor):
    """The policy takes any draft length at each step, whatever was measured, and lets the drafter rest now and then."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        import random

        from sglang_ext.policy.choice import MeasuredPolicy

        chance = random.Random(0)
        MeasuredPolicy._best = lambda policy, rates: chance.choice(policy.table.lengths)
        return logits


class Anticipate(CustomLogitProcessor):
    """All steps draft, but drafts that turn out to be unlikely are not verified: the draft length of a step looks at
    its own drafts (which is not exact)."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        import gc

        from sglang_ext.adapter.workers.eagle import HeadDraftWorker
        from sglang_ext.adapter.workers.policy import FollowsPolicy
        from sglang_ext.policy.choice import MeasuredPolicy

        MeasuredPolicy._best = lambda policy, rates: policy.table.lengths[-1]
        (worker,) = (thing for thing in gc.get_objects() if isinstance(thing, FollowsPolicy))
        original = HeadDraftWorker.draft

        def draft(draft_worker: Any, batch: Any, **kwargs: Any) -> Any:
            verify_input = original(draft_worker, batch, **kwargs)
            if verify_input.draft_probs is None:
                return verify_input
            distribution_BV = verify_input.draft_probs[:, 0]
            first_B1 = verify_input.draft_token.view(len(distribution_BV), -1)[:, 1:2]
            is_likely_B = distribution_BV.gather(1, first_B1).squeeze(1) >= distribution_BV.max(dim=1).values
            return verify_input if is_likely_B.all() else worker._build_trivial_verify_input(batch)

        HeadDraftWorker.draft = draft
        return logits


def plant(engine: Any, shortlist: list[int]) -> None:
    _run_in(engine, DrawFromShortlist, shortlist=shortlist)


def replay_prefills(engine: Any, replays: bool) -> None:
    _run_in(engine, ReplayPrefills, replays=replays)


def share_small_heads(engine: Any) -> None:
    _run_in(engine, ShareSmallHeads)


def shared_heads(engine: Any) -> int:
    (count,) = _run_in(engine, CountSharedHeads)
    return count


def switch_at_random(engine: Any) -> None:
    _run_in(engine, SwitchAtRandom)


def anticipate(engine: Any) -> None:
    _run_in(engine, Anticipate)


def _run_in(engine: Any, processor: type[CustomLogitProcessor], **parameters: Any) -> list[int]:
    answer = engine.generate(
        input_ids=[0],
        sampling_params={"max_new_tokens": 1, "temperature": 0.0, "custom_params": parameters},
        custom_logit_processor=processor.to_str(),
    )
    token_ids: list[int] = answer["output_ids"]
    return token_ids
