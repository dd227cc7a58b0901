"""An engine whose policy never drafts: on a CPU its steps are the target's own decode steps, but for those of requests
that ask for what verification alone hands on."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from engines import NEW_TOKENS, Ids, Oracle, generate, output_ids, running_engine
from fixture_models import drafter_folder
from lossless import check_grammar, check_sampling_path
from policy_cases import write_policy

from sglang_ext.adapter.engine import policy_report, swap_drafter
from sglang_ext.adapter.workers.plain_step import can_decode_plainly

STEPS = 2
NEVER = [{"draft_steps": k, "requests": [1], "step_ms": [1.0 + 100 * k]} for k in (0, STEPS)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("policy")
    file = write_policy(folder / "policy.json", [0, STEPS], curves=NEVER, rest_after_steps=1)
    with running_engine(drafter_folder("full"), draft_steps=STEPS, speculative_adaptive_config=file) as engine:
        yield engine


def steps(engine: Any) -> tuple[int, int]:
    """Those so far in which the drafter rested, and those of them that were decode steps."""
    report = policy_report(engine)
    assert report is not None
    assert report["lost"] == 0
    assert report["steps"][str(STEPS)] == 0
    return report["rested"], report["decoded"]


def test_greedy_identity(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    assert output_ids(generate(engine, prompts)) == oracle.answers
    for prompt, expected in zip(prompts[:2], oracle.answers, strict=False):  # alone, on a warm prefix cache
        assert output_ids(generate(engine, [prompt])) == [expected]
    rested, decoded = steps(engine)
    assert rested == decoded > 0


def test_sampled_requests(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    before = steps(engine)
    check_sampling_path(engine, prompts, oracle)
    rested, decoded = steps(engine)
    assert rested - before[0] == decoded - before[1] > 0


def test_what_verification_hands_on_is_verified(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    before = steps(engine)
    asked = [{"temperature": 0.0, "max_new_tokens": NEW_TOKENS}] * 4
    answers = engine.generate(input_ids=prompts[:4], sampling_params=asked, return_logprob=True)
    assert output_ids(answers) == oracle.answers[:4]
    for answer in answers:
        assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    check_grammar(engine, prompts, {})
    rested, decoded = steps(engine)
    assert rested - before[0] > decoded - before[1]
    mixed = engine.generate(input_ids=prompts[:4], sampling_params=asked, return_logprob=[True, False, True, False])
    assert output_ids(mixed) == oracle.answers[:4]


@pytest.mark.parametrize(
    "flag", ["has_grammar", "return_logprob", "return_hidden_states", "has_custom_logit_processor"]
)
def test_what_a_plain_step_cannot_do_is_verified(flag: str) -> None:
    plain = {"has_grammar": False, "return_logprob": False, "return_hidden_states": False}
    sampling = {"has_custom_logit_processor": False, "is_all_greedy": False}
    batch = SimpleNamespace(**plain, sampling_info=SimpleNamespace(**sampling))
    assert can_decode_plainly(batch, ranks=1)
    assert not can_decode_plainly(batch, ranks=2), "which of them draws is decided by verification"
    batch.sampling_info.is_all_greedy = True
    assert can_decode_plainly(batch, ranks=2)
    setattr(batch if flag in plain else batch.sampling_info, flag, True)
    assert not can_decode_plainly(batch, ranks=1)


def test_another_drafter_is_swapped_in_meanwhile(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    swap_drafter(engine, str(drafter_folder("truncated")))
    assert output_ids(generate(engine, prompts[:4])) == oracle.answers[:4]
