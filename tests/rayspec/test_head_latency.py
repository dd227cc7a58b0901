"""How heads are timed alone."""

from typing import Any

import pytest
import torch

from rayspec.farm import head_latency
from rayspec.shipped import drafter_path

DRAFTERS = {name: drafter_path(name) for name in ("slimspec-r32", "vocabtrim-1024")}


def timed() -> dict[str, float]:
    return head_latency.head_latencies(DRAFTERS, rows=1, draft_steps=2, dtype=torch.float32, num_threads=1)


def test_each_head_has_a_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_latency, "MIN_ROUND_S", 0.0)
    found = timed()
    assert list(found) == list(DRAFTERS)
    assert all(0 < seconds < 1 for seconds in found.values())


@pytest.mark.parametrize(("has_gpu", "together"), [(False, [2]), (True, [1, 1])], ids=["cpu", "gpu"])
def test_a_gpu_holds_one_head_at_a_time(monkeypatch: pytest.MonkeyPatch, has_gpu: bool, together: list[int]) -> None:
    groups: list[dict[str, str]] = []

    def in_turns(drafters: dict[str, str], *_: Any) -> dict[str, float]:
        groups.append(drafters)
        return dict.fromkeys(drafters, 1.0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(head_latency, "_in_turns", in_turns)
    assert timed() == dict.fromkeys(DRAFTERS, 1.0)
    assert [len(group) for group in groups] == together
