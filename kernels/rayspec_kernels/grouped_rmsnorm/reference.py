"""RMSNorm of each group of columns alone (SpecFormer). N = rows, G = groups, D = columns of a group."""

from torch import Tensor


def grouped_rmsnorm_reference(x_NC: Tensor, weight_C: Tensor, groups: int, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2 over the group) + eps) * weight with C = G * D, in the dtype of x; statistics in float32
    or better. Not equal to RMSNorm over all C."""
    wide_NC = x_NC.float() if x_NC.dtype.itemsize < 4 else x_NC
    wide_NGD = wide_NC.unflatten(-1, (groups, -1))
    inverse_NG1 = (wide_NGD.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return ((wide_NGD * inverse_NG1).flatten(-2) * weight_C.to(wide_NC.dtype)).to(x_NC.dtype)
