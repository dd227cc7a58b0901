"""Slot bookkeeping of speculative decoding in plain torch.

R = rows of the request table, C = positions a row, B = requests of the batch, n = slots a request.
"""

import torch
from torch import Tensor


def write_slots_reference(table_RC: Tensor, row_B: Tensor, start_B: Tensor, end_B: Tensor, slots: Tensor) -> None:
    """Write flat `slots` to the positions start..end-1 of each request, in place.

    A copy a request: between passes of a model, with cold caches, that takes 0.19 ms of one and 0.35 of 32 requests,
    where indices computed by tensor operations took 0.5 and 0.43.
    """
    done = 0
    for row, start, end in zip(row_B.tolist(), start_B.tolist(), end_B.tolist(), strict=True):
        table_RC[row, start:end] = slots[done : done + end - start]
        done += end - start


def read_window_reference(table_RC: Tensor, row_B: Tensor, start_B: Tensor, length: int) -> Tensor:
    """Slots of `length` positions from `start` of each request: int64 [B, length]."""
    position_Bn = start_B.long()[:, None] + torch.arange(length, device=start_B.device)
    return table_RC[row_B.long()[:, None], position_Bn].long()


def pack_front_reference(window_Bn: Tensor, count_B: Tensor) -> Tensor:
    """The first `count` entries of each row, concatenated."""
    keep_Bn = torch.arange(window_Bn.shape[1], device=count_B.device) < count_B[:, None]
    return window_Bn[keep_Bn]
