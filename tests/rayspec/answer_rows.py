"""Answer sets that no target had to write."""

import torch
from torch import Tensor

from rayspec.training.data.answers import AnswerSet


def random_rows() -> AnswerSet:
    """Ten rows of random tokens of the tiny target, each with a length of its own."""
    generator = torch.Generator().manual_seed(1)
    length_N, prompt_N = 22 + torch.arange(10), 8 + torch.arange(10)
    place_L = torch.arange(int(length_N.max()))
    ids_NL = torch.randint(1, 257, (10, len(place_L)), generator=generator)
    return rows_of(ids_NL * (place_L < length_N[:, None]), prompt_N, length_N)


def rows_of(ids_NL: Tensor, prompt_N: Tensor, length_N: Tensor) -> AnswerSet:
    """Rows of prompts and, behind them, greedy answers."""
    place_L = torch.arange(ids_NL.shape[1])
    return AnswerSet(
        name="rows",
        sha256="",
        token_ids_NL=ids_NL.int(),
        loss_mask_NL=(place_L >= prompt_N[:, None]) & (place_L < length_N[:, None]),
        prompt_length_N=prompt_N.int(),
        length_N=length_N.int(),
        temperature_N=torch.zeros(len(ids_NL)),
    )
