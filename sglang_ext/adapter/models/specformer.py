"""SpecFormer's context layer as a SGLang model, with the drafter's other parts beside it."""

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.models.llama import LlamaAttention
from sglang.srt.runtime_context import get_spec
from torch import Tensor, nn
from transformers import PretrainedConfig

from sglang_ext.adapter.activation import has_accelerator
from sglang_ext.adapter.cpu.packing import pack_model
from sglang_ext.adapter.models.hosted_head import check_replaces
from sglang_ext.adapter.served_target import served_stop_ids
from sglang_ext.drafters.checkpoint import check_loaded, shared_tensors
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, empty_drafter, naming, parse_info
from sglang_ext.drafters.specformer import SpecFormerDrafter

ATTENTION = "context_attn."


class NoLogits(LogitsProcessor):
    """Selects the rows of the hidden states that SGLang asks for; the head is read at the start of the next step."""

    def _get_logits(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states.new_zeros((len(hidden_states), get_spec().speculative_eagle_topk))


class RaySpecSpecFormer(nn.Module):
    """`drafter` has every part but the attention over the context, which is SGLang's and has its cache."""

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)
    hot_token_id = None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        # config.json itself: SGLang pads sizes in `config` on some devices
        raw, _ = PretrainedConfig.get_config_dict(config._name_or_path)
        self.config, self.info = config, parse_info(raw, config._name_or_path)
        self.drafter = _without_attention(self.info)
        body = self.drafter.config
        self.self_attn = LlamaAttention(
            config,
            body.hidden_size,
            body.num_attention_heads,
            body.num_key_value_heads,
            rope_theta=body.rope.rope_theta,
            rope_scaling=body.rope.to_json(),
            max_position_embeddings=body.max_position_embeddings,
        )
        self.logits_processor = NoLogits(config, skip_all_gather=True)

    def set_embed(self, embed: Tensor) -> None:
        """It reads no tokens."""

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> Any:
        I_TH = self.drafter.fuse(forward_batch.spec_info.hidden_states)
        if len(I_TH):  # an idle rank of a batch has none
            I_TH = I_TH + self.self_attn(positions, self.drafter.context_norm(I_TH), forward_batch)
        return self.logits_processor(input_ids, I_TH, None, forward_batch, [I_TH])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError unless names and shapes are exactly the checkpoint's."""
        tensors = dict(weights)
        tensors |= shared_tensors(self.info, own=tensors)
        self.swap(self.info, tensors)

    @torch.no_grad()
    def swap(self, info: CheckpointInfo, tensors: dict[str, Tensor]) -> None:
        """Take over the weights of a drafter with the same body shapes and any head.

        Everything that can be wrong is checked before the first weight changes. Raises ValueError.
        """
        check_replaces(self.info, info, tensors)
        drafter = _without_attention(info)
        with naming(info):
            drafter.load_state_dict({name: t for name, t in tensors.items() if not name.startswith(ATTENTION)})
            check_loaded(drafter, served_stop_ids())
        reference = self.self_attn.qkv_proj.weight
        self.drafter, self.info = drafter.to(reference.device, reference.dtype).requires_grad_(False), info
        self.self_attn.load_weights(
            (name.removeprefix(ATTENTION), t) for name, t in tensors.items() if name.startswith(ATTENTION)
        )
        if not has_accelerator():
            self.drafter.lm_head.pack()
            pack_model(self)


def _without_attention(info: CheckpointInfo) -> SpecFormerDrafter:
    drafter = empty_drafter(info)
    assert isinstance(drafter, SpecFormerDrafter), "the algorithm has looked"
    drafter.context_attn = None
    return drafter


EntryClass = [RaySpecSpecFormer]
