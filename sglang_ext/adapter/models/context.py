"""The attention over the context of a drafter that has one (SpecFormer, Hydra with a prefix layer) as a SGLang model,
with the drafter's other parts beside it. T = rows, H = hidden size."""

from collections.abc import Iterable, Mapping
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
from sglang_ext.adapter.models.sharded_head import all_shared_over_ranks
from sglang_ext.adapter.served_target import served_stop_ids
from sglang_ext.drafters.checkpoint import check_loaded, load_sharing, shared_tensors
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, empty_drafter, naming, parse_info
from sglang_ext.drafters.layers import Attention
from sglang_ext.drafters.shared.last_hidden import Context

ATTENTION = "context_attn."


class NoLogits(LogitsProcessor):
    """Selects the rows of the hidden states that SGLang asks for; the head is read at the start of the next step."""

    def _get_logits(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states.new_zeros((len(hidden_states), get_spec().speculative_eagle_topk))


class ContextModel(nn.Module):
    """`drafter` has every part but the attention over the context, which is SGLang's and has its cache."""

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)
    hot_token_id = None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        # config.json itself: SGLang pads sizes in `config` on some devices
        raw, _ = PretrainedConfig.get_config_dict(config._name_or_path)
        self.config, self.info = config, parse_info(raw, config._name_or_path)
        self.drafter, own = _apart(self.info)
        shape = own.config
        self.self_attn = LlamaAttention(
            config,
            shape.hidden_size,
            shape.num_attention_heads,
            shape.num_key_value_heads,
            rope_theta=shape.rope.rope_theta,
            rope_scaling=shape.rope.to_json(),
            max_position_embeddings=self.info.body.max_position_embeddings,
        )
        self.logits_processor = NoLogits(config, skip_all_gather=True)

    def set_embed(self, embed: Tensor) -> None:
        """It reads no tokens."""

    def set_embed_and_head(self, embed: Tensor, head: Tensor) -> None:
        """Neither does it project to any."""

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
        self.host(self.info, self.checked(self.info, tensors, {}), tensors)

    def checked(self, info: CheckpointInfo, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Any:
        """A drafter that can take the place of the running one, on its device: with the same shapes of its body, any
        head and any tree; what is `held` by the running one it shares. Nothing changes yet. Raises ValueError."""
        check_replaces(self.info, info, tensors)
        drafter, _ = _apart(info)
        reference = self.self_attn.qkv_proj.weight
        with naming(info.path):
            load_sharing(drafter, {n: t for n, t in tensors.items() if not n.startswith(ATTENTION)}, held)
            drafter.to(reference.device, reference.dtype).requires_grad_(False)
            check_loaded(drafter, served_stop_ids())
        drafter.lm_head = all_shared_over_ranks(drafter.lm_head)
        return drafter

    @torch.no_grad()
    def host(self, info: CheckpointInfo, drafter: Any, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `checked` has given, and its attention unless that is on `meta`: it is there already."""
        self.drafter, self.info = drafter, info
        self.self_attn.load_weights(
            (name.removeprefix(ATTENTION), t)
            for name, t in tensors.items()
            if name.startswith(ATTENTION) and not t.is_meta
        )
        if not has_accelerator():
            self.drafter.lm_head.pack()
            pack_model(self)


class RaySpecSpecFormer(ContextModel):
    pass


class RaySpecHydra(ContextModel):
    """Hydra with a prefix layer; without one no model of SGLang's is built."""


def _apart(info: CheckpointInfo) -> tuple[Any, Attention]:
    """An empty drafter without its attention over the context, and that."""
    drafter = empty_drafter(info)
    assert isinstance(drafter, Context), "the algorithm has looked"
    attention, drafter.context_attn = drafter.context_attn, None
    assert isinstance(attention, Attention), "it has a cache"
    return drafter, attention


EntryClass = [RaySpecSpecFormer, RaySpecHydra]
