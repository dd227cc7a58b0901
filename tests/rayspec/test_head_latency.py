"""How heads are timed alone."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from rayspec.farm import head_latency
from sglang_ext.drafters.checkpoint import save_drafter
from sglang_ext.drafters.counting import StepShape
from sglang_ext.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.heads import head_from_target, parse_head

V, H, TAPS = 96, 16, (2, 4, 5)


@pytest.fixture
def drafters(tmp_path: Path) -> dict[str, str]:
    """Of two kinds, untrained."""
    config = Eagle3Config(
        hidden_size=H, target_hidden_size=H, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=V, tap_layers=TAPS,
    )  # fmt: skip
    target = TargetInfo(name="toy", hidden_size=H, vocab_size=V, tokenizer_sha256="abc", tap_layers=TAPS)
    for name, spec in {"full": {"kind": "full"}, "low_rank": {"kind": "slimspec", "rank": 4}}.items():
        save_drafter(
            tmp_path / name, Eagle3Drafter(config, head_from_target(parse_head(spec), torch.randn(V, H))), target
        )
    return {name: str(tmp_path / name) for name in ("full", "low_rank")}


def timed(drafters: dict[str, str]) -> dict[str, float]:
    chain = StepShape(draft_steps=2, num_draft_tokens=3)
    return head_latency.head_latencies(drafters, requests=1, shape=chain, dtype=torch.float32, num_threads=1)


def test_each_head_has_a_latency(drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_latency, "MIN_ROUND_S", 0.0)
    found = timed(drafters)
    assert list(found) == list(drafters)
    assert all(0 < seconds < 1 for seconds in found.values())


@pytest.mark.parametrize(("has_gpu", "together"), [(False, [2]), (True, [1, 1])], ids=["cpu", "gpu"])
def test_a_gpu_holds_one_head_at_a_time(
    drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch, has_gpu: bool, together: list[int]
) -> None:
    groups: list[dict[str, str]] = []

    def in_turns(drafters: dict[str, str], *_: Any) -> dict[str, float]:
        groups.append(drafters)
        return dict.fromkeys(drafters, 1.0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(head_latency, "_in_turns", in_turns)
    assert timed(drafters) == dict.fromkeys(drafters, 1.0)
    assert [len(group) for group in groups] == together


def test_on_a_gpu_a_head_that_fails_costs_no_other_its_latency(
    drafters: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def in_turns(alone: dict[str, str], *_: Any) -> dict[str, float]:
        if drafters["full"] in alone.values():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return dict.fromkeys(alone, 1.0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(head_latency, "_in_turns", in_turns)
    assert timed(drafters) == {"low_rank": 1.0}
    assert "the head of full was not timed: OutOfMemoryError: CUDA out of memory" in caplog.text


def test_what_a_graph_reads_lives_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own memory a graph keeps, but not what was there before."""
    for name in ("Stream", "stream", "current_stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    rows_TH = torch.zeros(3, H)
    alive = weakref.ref(rows_TH)

    def asking(rows_TH: Tensor) -> Callable[[], None]:
        return lambda: rows_TH.sum()

    replay = head_latency._captured(asking(rows_TH))
    del rows_TH
    assert alive() is not None
    del replay
    assert alive() is None
