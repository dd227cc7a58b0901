"""y = x W^T on a CPU with weights in int8 or int4, through torch's own kernels. M = rows, K = inputs, N = outputs.

They multiply in bfloat16 and accumulate in float32; with float32 activations they fall back to scalar code fifty times
slower, so x is rounded to bfloat16 first, which costs a draft head nothing that matters: a proposal is verified.
fp8 has no such kernel in torch; it is dequantised once, so that on a CPU it saves storage alone.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from rayspec_kernels.common.quantized import Quantized, dequantize_reference, unpack_int4

_INT4_INNER_TILES = 2  # of the CUDA layout; the CPU kernel ignores it
_INT4_ROWS = 16  # the kernel wants a multiple of it as N
_INT8_COLUMNS = 16  # the kernel reads a multiple of it as K, beyond the end of narrower matrices


class QuantizedLinear:
    """Quantised weights in the layout of torch's CPU kernels; call it with x [M, K] of any float dtype."""

    def __init__(self, quantized: Quantized) -> None:
        values, scales = quantized
        self.values, self.scales, self.group_size, self.outputs = values, scales, 0, len(values)
        if values.dtype == torch.uint8:
            self.group_size = 2 * values.shape[1] // scales.shape[1]
            padding = -len(values) % _INT4_ROWS
            values, scales = pad(values, (0, 0, 0, padding)), pad(scales, (0, 0, 0, 0, 0, padding))
            self.values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
                unpack_int4(values).int(), _INT4_INNER_TILES
            )
            self.scales = scales.transpose(0, 1).contiguous()
        elif values.dtype == torch.int8:
            missing = -values.shape[1] % _INT8_COLUMNS
            self.values = pad(values, (0, missing)) if missing else values
        else:
            self.values = dequantize_reference(quantized).bfloat16()

    def __call__(self, x_MK: Tensor) -> Tensor:
        x16_MK = x_MK.bfloat16()
        if self.group_size:
            out_MN = torch.ops.aten._weight_int4pack_mm_for_cpu(x16_MK, self.values, self.group_size, self.scales)
            out_MN = out_MN[:, : self.outputs]
        elif self.values.dtype == torch.int8:
            padding = self.values.shape[1] - x16_MK.shape[1]
            x16_MK = pad(x16_MK, (0, padding)) if padding else x16_MK
            out_MN = torch.ops.aten._weight_int8pack_mm(x16_MK, self.values, self.scales)
        else:
            out_MN = linear(x16_MK, self.values)
        return out_MN.to(x_MK.dtype)
