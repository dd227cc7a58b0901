"""How far a kernel may be from float64, one place for all of them, and the inputs that find mistakes."""

import torch
from torch import Tensor

from rayspec_kernels.common.best import Best

# Sums of exact products in float32. The width's root times 2^-24 is the statistics of rounding; tensor cores align
# products before they add and truncate: simulated so, in blocks of 8 products, the best of a vocabulary are off by
# 1.3e-5 at a width of 5376.
FLOAT32_SUMS = 2.0**-15
# Every element off by one unit in the last place: twice what rounding to nearest does, since Triton's interpreter
# truncates to bfloat16.
ROUNDED = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: FLOAT32_SUMS}
WORST_ROW = 4.0  # a single row may be off by so many times what the whole may


def assert_close(out: Tensor, exact: Tensor, tolerance: float) -> None:
    """Compares by the norm of the whole and of the worst row, relative to the reference's; NaN never passes."""
    assert out.shape == exact.shape, f"shape {tuple(out.shape)} instead of {tuple(exact.shape)}"
    assert exact.dtype == torch.float64
    error, norm = (out.double() - exact).flatten(1), exact.flatten(1)
    whole = float(error.norm() / norm.norm().clamp(min=1e-30))
    assert whole <= tolerance, f"off by {whole:.2e} of the norm, allowed are {tolerance:.2e}"
    rows = error.norm(dim=1) / norm.norm(dim=1).clamp(min=1e-30)
    worst = int(rows.argmax())
    assert float(rows[worst]) <= WORST_ROW * tolerance, (
        f"row {worst} is off by {float(rows[worst]):.2e} of its norm, allowed are {WORST_ROW * tolerance:.2e}"
    )


def assert_best(out: Best, exact: Best, scores_BV: Tensor, tolerance: float) -> None:
    """The scores and the normaliser are right, and each id names a distinct candidate that has its score.

    Two candidates closer than the tolerance may trade places, so ids are judged by their exact scores [B, V].
    """
    assert out.scores_Bk.dtype == out.log_norm_B.dtype == torch.float32
    assert out.ids_Bk.dtype == torch.int64
    assert_close(out.scores_Bk, exact.scores_Bk, tolerance)
    assert_close(out.log_norm_B[:, None], exact.log_norm_B[:, None], tolerance)
    is_known = (out.ids_Bk >= 0) & (out.ids_Bk < scores_BV.shape[1])
    assert bool(is_known.all()), f"ids outside of 0..{scores_BV.shape[1] - 1}"
    assert_close(scores_BV.gather(1, out.ids_Bk), exact.scores_Bk, tolerance)
    assert all(len(set(row)) == len(row) for row in out.ids_Bk.tolist()), "an id twice"


def drawn(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)
