"""What rayspec.sweep.plan.lengths counts is what SGLang refuses, to the token."""

from pathlib import Path

import pytest
from engines import generate, running_engine
from small_world import make_world

from rayspec.sweep.config import EngineConfig, SweepConfig
from rayspec.sweep.plan.drafters import inspect_drafter
from rayspec.sweep.plan.lengths import reserve

CONTEXT, NEW_TOKENS = 64, 16


@pytest.mark.slow
@pytest.mark.parametrize("is_speculative", [False, True], ids=["plain", "speculative"])
def test_the_longest_prompt_is_answered_whole_and_no_longer_one(
    is_speculative: bool, tmp_path: Path, tiny_target_folder: Path
) -> None:
    world = make_world(tmp_path, tiny_target_folder)
    drafter = world.drafters / "full"
    steps = 4 if is_speculative else 1  # of a plain engine beside drafts of one step, which keep least free
    config = SweepConfig(
        drafters=[str(drafter)],
        draft_steps=[steps],
        max_new_tokens=NEW_TOKENS,
        engine=EngineConfig(context_length=CONTEXT),
    )
    longest = CONTEXT - NEW_TOKENS - reserve(inspect_drafter(str(drafter), config))
    options = {"context_length": CONTEXT, **({"draft_steps": steps} if is_speculative else {})}
    with running_engine(drafter if is_speculative else None, target=world.target, **options) as engine:
        (answer,) = generate(engine, [[7] * longest], NEW_TOKENS, ignore_eos=True)
        assert len(answer["output_ids"]) == NEW_TOKENS
        if is_speculative:
            with pytest.raises(ValueError, match="context length"):
                generate(engine, [[7] * (longest + 1)], NEW_TOKENS, ignore_eos=True)
        else:  # cut without a word
            (answer,) = generate(engine, [[7] * (longest + 1)], NEW_TOKENS, ignore_eos=True)
            assert len(answer["output_ids"]) < NEW_TOKENS
