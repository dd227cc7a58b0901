"""As many requests run at once as a sweep says, with a drafter and without one."""

import pytest

from rayspec.sweep.candidate import Candidate
from rayspec.sweep.config import EngineConfig, SweepConfig
from rayspec.sweep.plan.streams import ALWAYS_RUN, check_streams_run, stream_warnings
from rayspec.sweep.plan.trials import make_plan

FULL = [Candidate(label="full", path="full", draft_steps=4)]


def config(concurrency: list[int], block_prompts: int, **extra: int) -> SweepConfig:
    return SweepConfig(concurrency=concurrency, block_prompts=block_prompts, engine=EngineConfig(extra=extra))


def warnings(c: SweepConfig, num_prompts: int = 128) -> list[str]:
    plan = make_plan(c, num_prompts, FULL)
    check_streams_run(c, plan)
    return stream_warnings(c, plan)


def test_what_engines_always_run_is_what_the_platform_does() -> None:
    """Under speculation SGLang takes 48 on a GPU."""
    import sglang.srt.utils  # noqa: F401  (first: it asks for the platform while it is half imported itself)

    from sglang_ext.adapter.cpu.platform import DEFAULT_MAX_RUNNING_REQUESTS

    assert ALWAYS_RUN == DEFAULT_MAX_RUNNING_REQUESTS < 48


@pytest.mark.parametrize("most", [33, 64])
def test_more_streams_than_engines_run_are_refused(most: int) -> None:
    with pytest.raises(ValueError, match=rf"sends {most} requests at once.*max_running_requests={most}, or more"):
        warnings(config([1, most], block_prompts=most))


def test_what_is_set_is_taken_and_too_little_is_said() -> None:
    assert warnings(config([1, 64], 64, max_running_requests=64)) == []
    assert warnings(config([1, 32], 64)) == []
    (line,) = warnings(config([1, 64], 64, max_running_requests=48))
    assert "concurrency [64], but engine.extra.max_running_requests=48" in line


def test_blocks_without_as_many_prompts_send_no_more() -> None:
    (line,) = warnings(config([64], block_prompts=4))
    assert "a block has 4 prompts" in line
