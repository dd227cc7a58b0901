"""MurmurHash3 (x86, 32 bits, hash seed 0) of a request's seed, a position and a column: random numbers by key.

T = rows, C = columns. The key is 16 bytes in little-endian order: seed (8), position (4), column (4). Equal to SGLang's
Triton kernel bit by bit, so that a number depends on nothing else of the batch.
"""

import torch
from torch import Tensor

LOW_32 = 0xFFFFFFFF


def murmur_hash32_reference(seed_T: Tensor, position_T: Tensor, column_C: Tensor) -> Tensor:
    """int64 [T, C] in 0..2^32-1. Arguments are integers of any type; position and column count modulo 2^32.

    int64 products wrap modulo 2^64, which leaves their low 32 bits right.
    """
    seed_T, position_T, column_C = (x.to(torch.int64) for x in (seed_T, position_T, column_C))
    state_T = torch.zeros_like(seed_T)
    for word_T in (seed_T & LOW_32, (seed_T >> 32) & LOW_32, position_T & LOW_32):
        state_T = _mix(state_T, _scramble(word_T))
    hash_TC = _mix(state_T[:, None], _scramble(column_C & LOW_32))
    hash_TC ^= 16  # the key's length in bytes
    hash_TC ^= hash_TC >> 16
    hash_TC = (hash_TC * 0x85EBCA6B) & LOW_32
    hash_TC ^= hash_TC >> 13
    hash_TC = (hash_TC * 0xC2B2AE35) & LOW_32
    hash_TC ^= hash_TC >> 16
    return hash_TC


def _rotate(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & LOW_32


def _scramble(word: Tensor) -> Tensor:
    return (_rotate((word * 0xCC9E2D51) & LOW_32, 15) * 0x1B873593) & LOW_32


def _mix(state: Tensor, scrambled: Tensor) -> Tensor:
    return (_rotate(state ^ scrambled, 13) * 5 + 0xE6546B64) & LOW_32
