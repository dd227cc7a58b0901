"""How much likelier a token is after another than on its own, from counts of pairs (SLiM's r).

V = vocabulary, P = counted pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Correlations(NamedTuple):
    """log r(x, y): `log_r` where x V + y is among the keys, else first[x] + second[y]."""

    key_P: Tensor  # int64, ascending
    log_r_P: Tensor  # float32
    first_V: Tensor  # float32
    second_V: Tensor  # float32

    @classmethod
    def none(cls, vocab_size: int, device: torch.device) -> Correlations:
        """r = 1 for every pair. In float32, whatever torch's default is while a model is loaded."""
        empty, zeros_V = (torch.zeros(n, dtype=torch.float32, device=device) for n in (0, vocab_size))
        return cls(empty.long(), empty, zeros_V, zeros_V)

    def to(self, device: torch.device) -> Correlations:
        return Correlations(*(x.to(device) for x in self))

    def layout(self) -> dict[str, tuple[Tensor, tuple[int, ...], torch.dtype]]:
        """The tensors by name, with their shape and type."""
        P, V = len(self.key_P), len(self.first_V)
        return {
            "key": (self.key_P, (P,), torch.int64),
            "log_r": (self.log_r_P, (P,), torch.float32),
            "first": (self.first_V, (V,), torch.float32),
            "second": (self.second_V, (V,), torch.float32),
        }

    def of(self, x: Tensor, y: Tensor) -> Tensor:
        """log r of tokens that follow each other, float32, in the shape that x and y broadcast to."""
        unseen = self.first_V[x] + self.second_V[y]
        if not len(self.key_P):
            return unseen
        wanted = x * len(self.first_V) + y
        place = torch.searchsorted(self.key_P, wanted).clamp(max=len(self.key_P) - 1)
        return torch.where(self.key_P[place] == wanted, self.log_r_P[place], unseen)
