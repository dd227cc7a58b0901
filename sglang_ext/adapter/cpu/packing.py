"""Puts the projections of a loaded model on oneDNN's layout (CPU platform); see `rayspec_kernels.cpu.packed_linear`."""

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from rayspec_kernels.cpu.packed_linear import PackedLinear, can_pack


class PackedLinearMethod(UnquantizedLinearMethod):
    """The linear method of a layer whose `rayspec_packed` holds its weight."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return layer.rayspec_packed(x, bias)


def pack_model(model: nn.Module) -> None:
    """Pack every plain linear layer and the LM head; again after the weights have changed."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(method) in (UnquantizedLinearMethod, PackedLinearMethod) and can_pack(module.weight):
            module.rayspec_packed = PackedLinear(module.weight)
            module.quant_method = PackedLinearMethod()
    head = getattr(model, "lm_head", None)
    if head is not None and isinstance(getattr(head, "weight", None), Tensor) and can_pack(head.weight):
        head.rayspec_packed = PackedLinear(head.weight)


def compute_lm_head(
    original: Callable[..., Tensor],
    processor: Any,
    hidden_states: Tensor,
    lm_head: Any,
    embedding_bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """AROUND LogitsProcessor._compute_lm_head: the packed head where there is one."""
    packed = getattr(lm_head, "rayspec_packed", None)
    if packed is None or out is not None:
        return original(processor, hidden_states, lm_head, embedding_bias, out=out)
    if packed.weight_NK.data_ptr() != lm_head.weight.data_ptr():  # SGLang has since put the target's there
        packed = lm_head.rayspec_packed = PackedLinear(lm_head.weight)
    return packed(hidden_states, embedding_bias)
