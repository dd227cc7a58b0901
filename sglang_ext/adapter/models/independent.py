"""An independent drafter with any draft head, as a SGLang model under the stock algorithm `STANDALONE`."""

import copy
from typing import Any, ClassVar

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.llama import LlamaForCausalLM
from torch import Tensor, nn

from sglang_ext.adapter.models.hosted_head import HeadRequest, HostsHead, hosted_info


class RaySpecIndependent(HostsHead, LlamaForCausalLM):
    """LlamaForCausalLM with a draft head of ours."""

    algorithm: ClassVar[str] = "STANDALONE"

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        info = hosted_info(config, self.algorithm)
        body_config = copy.deepcopy(config)
        body_config.tie_word_embeddings = True  # SGLang's own head is replaced below: do not allocate it
        LlamaForCausalLM.__init__(self, body_config, quant_config, prefix)
        self.host(info, config)
        self.model.layers[0].register_forward_pre_hook(self._before_layers)

    def _before_layers(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.lm_head.routes:
            _, embed_TH, batch, *_ = arguments
            self.logits_processor.start_routing(self.lm_head, embed_TH, embed_TH, batch)

    def layer_inputs(self, batch: ForwardBatch, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        embed_TH = self.model.embed_tokens(batch.input_ids if rows is None else batch.input_ids[rows])
        return embed_TH, embed_TH

    def draft_step(self, batch: Any, request: HeadRequest) -> None:
        """The next step gets nothing but tokens."""
        with self.logits_processor.answering(request):
            hidden_TH = self.model(batch.input_ids, batch.positions, batch)
        self.logits_processor.answer(request, self.lm_head, hidden_TH, batch)


EntryClass = [RaySpecIndependent]
