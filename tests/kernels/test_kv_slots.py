"""Slot tables: reading and writing ragged ranges against plain slicing."""

import torch

from rayspec_kernels.cpu.kv_slots import (
    pack_front_reference,
    read_window_reference,
    write_slots_reference,
)

TABLE = torch.arange(5 * 16, dtype=torch.int32).view(5, 16)
ROWS, START, END = torch.tensor([3, 0, 4]), torch.tensor([2, 0, 15]), torch.tensor([6, 0, 16])


def test_write_changes_the_ranges_and_nothing_else() -> None:
    table, slots = TABLE.clone(), torch.tensor([100, 101, 102, 103, 104])
    write_slots_reference(table, ROWS, START, END, slots)
    expected = TABLE.clone()
    expected[3, 2:6], expected[4, 15] = torch.tensor([100, 101, 102, 103], dtype=torch.int32), 104
    assert torch.equal(table, expected)


def test_window() -> None:
    expected = torch.stack([TABLE[3, 2:5], TABLE[0, 0:3], TABLE[4, 13:16]]).long()
    assert torch.equal(read_window_reference(TABLE, ROWS, torch.tensor([2, 0, 13]), 3), expected)


def test_pack_front() -> None:
    window = torch.arange(12).view(3, 4)
    assert pack_front_reference(window, torch.tensor([2, 0, 4])).tolist() == [0, 1, 8, 9, 10, 11]
