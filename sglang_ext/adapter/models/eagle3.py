"""An EAGLE-3 drafter with any draft head, as a SGLang model under the stock algorithm `EAGLE3`.

Everything of SGLang's worker stays: the head answers with full-width logits in target ids, so that no id map and no
reduced draft vocabulary exist from SGLang's point of view.
"""

import copy
from typing import Any, ClassVar

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from torch import Tensor, nn

from sglang_ext.adapter.models.hosted_head import HeadRequest, HostsHead, hosted_info


class RaySpecEagle3(HostsHead, LlamaForCausalLMEagle3):
    """LlamaForCausalLMEagle3 with a draft head of ours."""

    algorithm: ClassVar[str] = "EAGLE3"

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        info = hosted_info(config, self.algorithm)
        body_config = copy.deepcopy(config)
        body_config.draft_vocab_size = 1  # SGLang's own head is replaced below: do not allocate it
        LlamaForCausalLMEagle3.__init__(self, body_config, quant_config, prefix)
        self.host(info, config)
        self.model.layers[0].register_forward_pre_hook(self._before_layer)

    def _before_layer(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.lm_head.routes:
            _, embed_TH, feature_TH, batch, *_ = arguments
            self.logits_processor.start_routing(self.lm_head, embed_TH, feature_TH, batch)

    def layer_inputs(self, batch: ForwardBatch, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        ids_T, feature_TH = batch.input_ids, batch.spec_info.hidden_states
        if rows is not None:
            ids_T, feature_TH = ids_T[rows], feature_TH[rows]
        embed_TH = self.model.embed_tokens(ids_T)
        is_fused = feature_TH.shape[-1] == embed_TH.shape[-1]  # the drafter's own, not the target's taps
        return embed_TH, feature_TH if is_fused else self.model.fc(feature_TH)

    def draft_step(self, batch: Any, request: HeadRequest) -> Tensor:
        """The feature of the next step."""
        with self.logits_processor.answering(request):
            hidden_TH, (feature_TH,) = self.model(batch.input_ids, batch.positions, batch)
        self.logits_processor.answer(request, self.lm_head, hidden_TH, batch)
        return feature_TH


EntryClass = [RaySpecEagle3]
