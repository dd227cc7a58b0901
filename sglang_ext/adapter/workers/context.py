"""The worker of drafters with attention over the context (SpecFormer, Hydra with a prefix layer): SGLang's EAGLE
worker, whose extend after a verification is that attention.

It runs over what the target has just processed and keeps a cache of its own, as EAGLE's does. Its output at the last
accepted token is what a request carries to the next step, which makes all draft tokens of it at once
(`CarriedDrafting`): there is no draft loop.
"""

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from torch import Tensor, nn

from sglang_ext.adapter import SGLANG_VERSION
from sglang_ext.adapter.algorithms import checked_info
from sglang_ext.adapter.longest_draft import LongestDraft
from sglang_ext.adapter.models.context import ContextModel
from sglang_ext.adapter.workers.last_hidden import CarriedDrafting
from sglang_ext.drafters.checkpoint import origins
from sglang_ext.drafters.checkpoint_config import CheckpointInfo


class ContextDraftWorker(CarriedDrafting, EagleDraftWorker):
    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        spec = get_spec()
        info = checked_info(spec.speculative_draft_model_path, spec.speculative_algorithm.upper())
        if info.body.taps_output:
            append_output_to_taps(target_worker.model_runner.model)
        found = origins(info)  # before they are read: files may be exchanged at any time
        self.longest = LongestDraft.of_server()
        # SGLang's own worker draws chains alone, and asks for one; ours draws the siblings of a tree, too
        with spec.override(speculative_use_rejection_sampling=False):
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        self._draft_with(self.model.info, self.model.drafter)
        self.origins = found

    @property
    def model(self) -> ContextModel:
        return self.draft_runner.model

    def host(self, info: CheckpointInfo, tensors: dict[str, Tensor], origins: Mapping[str, str]) -> None:
        """Host another drafter with a body of the same shapes. What is `held` may be on `meta`. Raises ValueError; the
        running one is then unchanged."""
        drafter = self.model.checked(info, tensors, self._held_tensors(origins))
        self._draft_with(info, drafter)
        self.model.host(info, drafter, tensors)
        self.origins = origins
        self._refuse_until_captured(info.path)

    def _draft_extend_for_prefill(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_captured()
        draft_input = super()._draft_extend_for_prefill(batch, *args, **kwargs)
        self._carry(draft_input, draft_input.hidden_states)
        return draft_input

    def _draft_extend_for_decode(self, batch: Any, batch_result: Any, **kwargs: Any) -> None:
        super()._draft_extend_for_decode(batch, batch_result, **kwargs)
        self._carry(batch_result.next_draft_input, batch_result.next_draft_input.hidden_states)


def append_output_to_taps(target: nn.Module) -> None:
    """SGLang taps the inputs of layers; SpecFormer also wants what comes out of the last one, after the norm. That is
    what the target hands to its logits processor."""

    def with_output(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        input_ids, hidden_TH, lm_head, batch, *rest = arguments
        taps = named.pop("aux_hidden_states", None) if "aux_hidden_states" in named else rest.pop(0) if rest else None
        if taps is None:
            raise RuntimeError(
                f"{type(target).__name__} gave no taps to its logits processor, so no drafter that reads them can be "
                f"served with it in SGLang {SGLANG_VERSION}; serve one that reads the last hidden state alone"
            )
        taps = torch.cat([taps, hidden_TH], dim=-1) if isinstance(taps, Tensor) else [*taps, hidden_TH]
        return (input_ids, hidden_TH, lm_head, batch, taps, *rest), named

    target.logits_processor.register_forward_pre_hook(with_output, with_kwargs=True)
