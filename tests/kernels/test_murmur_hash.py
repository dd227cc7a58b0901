"""Against scikit-learn's C++ over the packed key, which shares no code with ours."""

import struct

import pytest
import torch

from rayspec_kernels.cpu.murmur_hash import murmur_hash32_reference

SEEDS = [0, 1, 42, 2**31 + 5, 2**40 + 3, -1, -(2**63), 2**63 - 1]
POSITIONS = [0, 1, 7, 2**31 + 1, 2**32 - 1, 2**32 + 4, 3, 3]
COLUMNS = [0, 1, 2, 31, 32767, 2**31, 2**32 - 1]


def test_is_murmurhash3_of_the_packed_key() -> None:
    oracle = pytest.importorskip("sklearn.utils").murmurhash3_32
    ours = murmur_hash32_reference(torch.tensor(SEEDS), torch.tensor(POSITIONS), torch.tensor(COLUMNS))
    for t, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        for c, column in enumerate(COLUMNS):
            key = struct.pack("<QII", seed % 2**64, position % 2**32, column)
            assert int(ours[t, c]) == oracle(key, seed=0, positive=True)


def test_unsigned_arguments() -> None:
    seeds, positions, columns = torch.tensor(SEEDS), torch.tensor(POSITIONS), torch.tensor(COLUMNS)
    unsigned = murmur_hash32_reference(seeds.to(torch.uint64), positions.to(torch.uint64), columns)
    assert torch.equal(murmur_hash32_reference(seeds, positions, columns), unsigned)


def test_bits_are_fair_over_neighbouring_keys() -> None:
    hashes = murmur_hash32_reference(torch.arange(100), torch.arange(100) + 5, torch.arange(1000))
    for bit in range(32):
        ones = int(((hashes >> bit) & 1).sum())
        assert abs(ones - 50_000) < 5 * 158  # five standard deviations of 100,000 fair coins
