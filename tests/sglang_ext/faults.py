"""A fault for the tests to find. It is planted in a running scheduler by a custom logit processor, the one way in which
SGLang runs code of a request."""

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor


class DrawFromShortlist(CustomLogitProcessor):
    """Drafts come from the token ids `shortlist`, but are verified as if drawn from the law over the vocabulary
    (METHODS 1.2: that is not exact). An empty list takes the fault out again."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        from sglang_ext.adapter import draft_worker
        from sglang_ext.adapter.sampling import draw_drafts

        assert custom_param_list is not None
        shortlist = torch.tensor(custom_param_list[0]["shortlist"])

        def draw(q_TV: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
            kept_TV = torch.zeros_like(q_TV).index_copy_(1, shortlist, q_TV[:, shortlist])
            _, token_ids_T1, _ = draw_drafts(kept_TV / kept_TV.sum(dim=-1, keepdim=True), *args)
            return q_TV, token_ids_T1, q_TV.gather(1, token_ids_T1)

        draft_worker.draw_drafts = draw if len(shortlist) else draw_drafts
        return logits


def plant(engine: Any, shortlist: list[int]) -> None:
    engine.generate(
        input_ids=[0],
        sampling_params={"max_new_tokens": 1, "custom_params": {"shortlist": shortlist}},
        custom_logit_processor=DrawFromShortlist.to_str(),
    )
