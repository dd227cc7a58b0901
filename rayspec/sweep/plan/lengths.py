"""Whether the engines can take every request of a workload: one that they refuse would fail the whole sweep."""

from collections.abc import Iterable, Sequence
from typing import Any

from rayspec.farm.chat import turn_request
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.config import SweepConfig
from rayspec.target import TargetModel
from rayspec.workloads import Conversation

PLAIN_RESERVE = 2  # tokens that SGLang's scheduler keeps of its context, cutting the answer


def engine_context(config: SweepConfig, target: TargetModel) -> int | None:
    """Tokens of a request, draft included, that every engine can hold; None where nobody says. Raises ValueError for a
    context that the target does not have."""
    own, most = config.engine.context_length, target.context_length
    if own is not None and most is not None and own > most:
        raise ValueError(
            f"engine.context_length must be at most {most}, for which target={config.target} was made, got {own}"
        )
    limits = [limit for limit in (own or most, config.engine.max_total_tokens) if limit is not None]
    return min(limits, default=None)


def reserve(candidates: Iterable[Candidate]) -> int:
    """Tokens that SGLang keeps free behind a request for its draft: the most of all candidates."""
    return max(PLAIN_RESERVE, *(max(c.shape.topk * c.draft_steps, c.num_draft_tokens) for c in candidates))


def longest_request(conversation: Conversation, tokenizer: Any, config: SweepConfig) -> int:
    """Tokens of its longest prompt, if every answer before it is of `max_new_tokens`."""
    template = tokenizer if config.chat_template else None
    longest = 0
    for turn in range(len(conversation.turns)):
        request = turn_request(conversation, [""] * turn, template)
        ids = request["input_ids"] if "input_ids" in request else tokenizer.encode(request["prompt"])
        longest = max(longest, len(ids) + turn * config.max_new_tokens)
    return longest


def fitting(
    prompts: Sequence[Conversation], config: SweepConfig, target: TargetModel, candidates: Iterable[Candidate]
) -> tuple[Conversation, ...]:
    """The prompts that the engines can take. Raises ValueError for others, where `long_prompts` is refuse, and where
    none is left."""
    context = engine_context(config, target)
    if context is None:
        return tuple(prompts)
    new_tokens, kept_free = max(config.max_new_tokens, config.warmup_tokens), reserve(candidates)
    room = context - new_tokens - kept_free
    lengths = {prompt.id: longest_request(prompt, target.tokenizer, config) for prompt in prompts}
    too_long = [prompt for prompt in prompts if lengths[prompt.id] > room]
    kept = [prompt for prompt in prompts if lengths[prompt.id] <= room]
    if too_long and (config.long_prompts == "refuse" or not kept):
        first = too_long[0]
        way_out = "" if not kept else "; long_prompts=drop leaves them out"
        raise ValueError(
            f"{len(too_long)} of {len(prompts)} prompts of workload {config.workload!r} do not fit, the first of them "
            f"{first.id}: up to {lengths[first.id]} tokens, with the longest answers to the turns before, but "
            f"{context} (engine.context_length, max_total_tokens, or the target's own) less {new_tokens} new ones and "
            f"{kept_free} for the draft leave {room}; raise those limits, or lower max_new_tokens, draft_steps or "
            f"topk{way_out}"
        )
    return tuple(kept)
