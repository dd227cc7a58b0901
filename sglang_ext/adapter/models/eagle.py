"""An EAGLE-1 or 2 drafter with any draft head, as a SGLang model under the stock algorithm `EAGLE`."""

import copy
from typing import Any, ClassVar

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from torch import Tensor, nn

from sglang_ext.adapter.models.hosted_head import HeadRequest, HostsHead, hosted_info


class RaySpecEagle(HostsHead, LlamaForCausalLMEagle):
    """LlamaForCausalLMEagle with a draft head of ours."""

    algorithm: ClassVar[str] = "EAGLE"

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        info = hosted_info(config, self.algorithm)
        body_config = copy.deepcopy(config)
        body_config.tie_word_embeddings = True  # SGLang's own head is replaced below: do not allocate it
        LlamaForCausalLMEagle.__init__(self, body_config, quant_config, prefix)
        self.host(info, config)
        self.model.register_forward_pre_hook(self._before_model)

    def _before_model(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.lm_head.routes:
            _, _, batch, *_ = arguments
            self.logits_processor.start_routing(self.lm_head, *self.layer_inputs(batch, None), batch)

    def set_embed_and_head(self, embed: Tensor, head: Tensor) -> None:
        """The target's, of which the drafter's own head needs but the embedding."""
        self.set_embed(embed)

    def layer_inputs(self, batch: ForwardBatch, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """What `fc` joins."""
        ids_T, feature_TH = batch.input_ids, batch.spec_info.hidden_states
        if rows is not None:
            ids_T, feature_TH = ids_T[rows], feature_TH[rows]
        return self.model.embed_tokens(ids_T), feature_TH

    def draft_step(self, batch: Any, request: HeadRequest) -> Tensor:
        """The feature of the next step, which is what the head reads."""
        with self.logits_processor.answering(request):
            feature_TH = self.model(batch.input_ids, batch.positions, batch)
        self.logits_processor.answer(request, self.lm_head, feature_TH, batch)
        return feature_TH


EntryClass = [RaySpecEagle]
