"""An EAGLE-3 drafter with any draft head, as a SGLang model under the stock algorithm `EAGLE3`.

Everything of SGLang's worker stays: the head answers with full-width logits in target ids, so that no id map and no
reduced draft vocabulary exist from SGLang's point of view.
"""

import copy
from typing import Any, ClassVar

from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from torch import Tensor, nn

from sglang_ext.adapter.hosted_head import HostsHead, Question, hosted_info


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

    def draft_step(self, batch: Any, question: Question) -> Tensor:
        """The feature of the next step."""
        with self.logits_processor.asking(question):
            hidden_TH, (feature_TH,) = self.model(batch.input_ids, batch.positions, batch)
        self.logits_processor.put(question, self.lm_head, hidden_TH)
        return feature_TH


EntryClass = [RaySpecEagle3]
