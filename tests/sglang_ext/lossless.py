"""What must hold of every speculative engine, whatever its tree and head."""

import itertools
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import NEW_TOKENS, NUM_PROMPTS, NUM_STOPS, Ids, Oracle, generate, output_ids
from volume import volume

from sglang_ext.adapter.engine import step_times, swap_drafter
from sglang_ext.drafters.checkpoint import load_drafter


def check_greedy_identity(engine: Any, prompts: list[Ids], oracle: Oracle, *, is_first: bool) -> list[dict[str, Any]]:
    """Eight requests together (ragged acceptance, chunked prefill), then some one at a time on a warm prefix cache.
    Verification is what makes an engine lossless, whatever it is given to verify, so that the first drafter of an
    engine's shape meets all prompts, and the others fewer."""
    together = generate(engine, prompts[: NUM_PROMPTS if is_first else volume(NUM_PROMPTS, 8)])
    assert output_ids(together) == oracle.answers[: len(together)]
    cached, alone_prompts = 0, prompts[: volume(NUM_PROMPTS, 8) if is_first else volume(8, 2)]
    for prompt, answer in zip(alone_prompts, oracle.answers, strict=False):
        one = generate(engine, [prompt])[0]
        assert one["output_ids"] == answer
        cached += one["meta_info"]["cached_tokens"]
    assert cached > sum(map(len, alone_prompts)) // 2, "the second pass was to hit the radix cache"
    return together


def check_counts(answers: list[dict[str, Any]], draft_steps: int) -> None:
    """The raw counts that every metric is made of fit together."""
    drafts, steps = 0, 0
    for answer in answers:
        info = answer["meta_info"]
        histogram = info["spec_correct_drafts_histogram"]
        assert len(histogram) <= draft_steps + 1
        assert sum(histogram) == info["spec_verify_ct"]
        assert sum(k * count for k, count in enumerate(histogram)) == info["spec_num_correct_drafts"]
        emitted = 1 + info["spec_verify_ct"] + info["spec_num_correct_drafts"]  # the prefill emits the first token
        assert emitted - draft_steps <= info["completion_tokens"] <= emitted  # a block may end past the limit
        drafts, steps = drafts + info["spec_num_correct_drafts"], steps + info["spec_verify_ct"]
    assert 1 < 1 + drafts / steps <= draft_steps + 1, "a trained drafter is accepted at least once"
    assert len({answer["meta_info"]["spec_verify_ct"] for answer in answers}) > 1, "acceptance was to be ragged"


def check_stops(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    """Also inside of a block of accepted drafts."""
    stops = zip(prompts[:NUM_STOPS], oracle.stop_tokens, oracle.stopped, strict=False)
    for prompt, stop, expected in stops:
        answer = generate(engine, [prompt], stop_token_ids=[stop])[0]
        assert answer["output_ids"] == expected
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def check_streaming(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}
    for prompt, expected in zip(prompts[:4], oracle.answers, strict=False):
        chunks = list(engine.generate(input_ids=prompt, sampling_params=sampling, stream=True))
        assert len(chunks) > 1
        texts = [chunk["text"] for chunk in chunks]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert texts[-1] == engine.tokenizer_manager.tokenizer.decode(expected, skip_special_tokens=True)


def check_long_and_one_token_prompts(engine: Any, long_prompt: Ids, prompts: list[Ids], oracle: Oracle) -> None:
    assert generate(engine, [long_prompt], 24)[0]["output_ids"] == oracle.long_answer
    assert len(generate(engine, [prompts[0][:1]], 8)[0]["output_ids"]) == 8


def check_sampling_path(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    """The sampled verification with all mass on the best token must walk the greedy path."""
    some = prompts[: volume(16, 8)]
    assert output_ids(generate(engine, some, temperature=1.0, top_p=1e-6)) == oracle.answers[: len(some)]


def check_grammar(engine: Any, prompts: list[Ids], sampling: Mapping[str, Any]) -> None:
    for answer in generate(engine, prompts[: volume(8, 4)], 24, regex=r"(ab|c){40}", **sampling):
        assert re.fullmatch("(ab|c)+a?", answer["text"])


def check_step_clock(engine: Any, drafter: Path, prompts: list[Ids], *, is_pruned: bool) -> None:
    """The parts that the engine clocks are parts of the wall time, and of each other; and it counts what it verifies,
    which is less than it was asked to where a tree `is_pruned`."""
    before = step_times(engine)
    start = time.perf_counter()
    answers = generate(engine, prompts[:4])
    wall_s = time.perf_counter() - start
    after = step_times(engine)
    assert before is not None, "no accelerator here, so the clock runs"
    assert after is not None
    spent, head = after - before, load_drafter(drafter)[0].lm_head
    assert spent.steps >= max(a["meta_info"]["spec_verify_ct"] for a in answers)
    assert 0 < spent.head_s < spent.draft_s
    assert 0 <= spent.embedding_s < spent.draft_s - spent.head_s
    assert 0 <= spent.choice_s < spent.head_s
    assert spent.routing_s == 0, "no head that routes is asked to meet this"
    assert 0 < spent.verify_s < spent.draft_s + spent.verify_s < wall_s
    assert spent.requests >= sum(a["meta_info"]["spec_verify_ct"] for a in answers)
    most = engine.server_args.speculative_num_draft_tokens * spent.requests
    assert spent.scoring_rows
    assert sum(spent.scoring_rows_by_position) == spent.scoring_rows
    assert sum(spent.scored_tokens_by_position) == spent.scored_tokens
    mean = spent.scored_tokens / spent.scoring_rows
    assert mean <= spent.most_scored <= head.at(0).vocab_size
    if head.kind in ("full", "slimspec"):
        assert mean == head.at(0).vocab_size
    else:
        assert head.fewest_candidates(engine.server_args.speculative_num_steps) <= mean
    assert spent.requests <= spent.verified_tokens < most if is_pruned else spent.verified_tokens == most


def check_swap_and_its_refusals(
    engine: Any,
    drafters: Mapping[str, Path],
    first: str,
    other: str,
    faulty: Mapping[str, Path],
    prompts: list[Ids],
    oracle: Oracle,
) -> None:
    """What is accepted changes with the drafter and back again, and every folder of `faulty` (message: folder) is
    refused, after which the first drafter is still the one that drafts."""
    accepted, some = {}, prompts[: volume(16, 6)]
    for resident in (0, 2):  # read again each time, then kept beside the running one
        for name in (first, other, first, other, first):
            swap_drafter(engine, str(drafters[name]), resident)
            found = [a["meta_info"]["spec_num_correct_drafts"] for a in generate(engine, some)]
            assert accepted.setdefault(name, found) == found
    assert accepted[first] != accepted[other]
    for message, folder in faulty.items():
        with pytest.raises(ValueError, match=message):
            swap_drafter(engine, str(folder))
    after = generate(engine, some)
    assert output_ids(after) == oracle.answers[: len(some)]
    assert [a["meta_info"]["spec_num_correct_drafts"] for a in after] == accepted[first]


def with_weights_of(drafter: Path, other: Path, folder: Path) -> Path:
    """A drafter's folder with the weights of another, in `folder`."""
    shutil.copytree(drafter, folder)
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    return folder
