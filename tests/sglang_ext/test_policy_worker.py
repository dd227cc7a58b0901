"""Which servers follow a policy; what they do with it, engines show (test_policy_engines.py)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from policy_cases import write_policy
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from sglang_ext.adapter.workers import policy as policy_worker
from sglang_ext.adapter.workers.last_hidden import LastHiddenWorker
from sglang_ext.adapter.workers.policy import check_follows, checked_table
from sglang_ext.adapter.workers.timed import TimedEagleWorker, TimedStandaloneWorker

OPTIONS = (
    "enable_dp_attention", "enable_two_batch_overlap", "enable_pdmux", "enable_lora", "enable_mixed_chunk",
    "enable_multi_layer_eagle",
)  # fmt: skip


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's settings of a chain of two drafts with a policy."""
    found = SimpleNamespace(
        speculative_adaptive=False,
        speculative_adaptive_config=write_policy(tmp_path / "policy.json", [0, 1, 2]),
        speculative_num_steps=2,
        speculative_eagle_topk=1,
    )
    monkeypatch.setattr(policy_worker, "get_spec", lambda: found)
    return found


def server(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**(dict.fromkeys(OPTIONS, False) | {"pp_size": 1} | values))


def test_a_chain_takes_every_length_and_a_tree_its_own(spec: SimpleNamespace, tmp_path: Path) -> None:
    assert checked_table(server()).lengths == [0, 1, 2]
    spec.speculative_eagle_topk = 4
    with pytest.raises(ValueError, match=r"a tree .* is drafted whole or not at all: its curves must be of .* 0 and 2"):
        checked_table(server())
    spec.speculative_adaptive_config = write_policy(tmp_path / "tree.json", [0, 2])
    assert checked_table(server()).lengths == [0, 2]


def test_buffers_must_be_made_for_the_longest(spec: SimpleNamespace) -> None:
    for steps in (1, 3):
        spec.speculative_num_steps = steps
        with pytest.raises(ValueError, match=f"--speculative-num-steps must be 2, the longest .*got {steps}"):
            checked_table(server())


@pytest.mark.parametrize("option", [*OPTIONS, "pp_size"])
def test_what_does_not_go_with_a_policy(option: str, spec: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=f"does not go with --{option.replace('_', '-')}.*; leave one out"):
        checked_table(server(**{option: 2}))


def test_workers_that_would_not_read_it_are_refused(spec: SimpleNamespace) -> None:
    for worker in (TimedEagleWorker, TimedStandaloneWorker, LastHiddenWorker):
        check_follows(worker, SimpleNamespace(name="X"), spec)
    with pytest.raises(ValueError, match=r"DFLASH follows no policy .*DFlashWorkerV2, which has no step without"):
        check_follows(DFlashWorkerV2, SimpleNamespace(name="DFLASH"), spec)
    spec.speculative_adaptive = True  # SGLang's own, which says for itself what it cannot do
    check_follows(DFlashWorkerV2, SimpleNamespace(name="DFLASH"), spec)
