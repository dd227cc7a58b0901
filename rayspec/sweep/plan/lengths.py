"""Whether the engines can take every request of a workload: one that they refuse would fail the whole sweep."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayspec.farm.chat import turn_request
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.config import SweepConfig
from rayspec.target import TargetModel
from rayspec.workloads import Conversation

PLAIN_RESERVE = 2  # tokens that SGLang's scheduler keeps of its context, cutting the answer


def engine_context(config: SweepConfig, target: TargetModel) -> int | None:
    """Tokens of a request, draft included, that every engine can hold; None where nothing limits them. Raises
    ValueError for a context that the target does not have."""
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


@dataclass(frozen=True)
class Need:
    """Tokens that a request takes of an engine's context."""

    prompt_tokens: int
    new_tokens: int


def fitting(
    prompts: Sequence[Conversation], config: SweepConfig, target: TargetModel, candidates: Iterable[Candidate]
) -> tuple[Conversation, ...]:
    """The prompts that the engines can take. Raises ValueError as `keep_fitting` does."""
    if engine_context(config, target) is None:
        return tuple(prompts)
    needs = {p.id: Need(longest_request(p, target.tokenizer, config), config.max_new_tokens) for p in prompts}
    kept = keep_fitting(needs, f"prompts of workload {config.workload!r}", config, target, candidates)
    return tuple(p for p in prompts if p.id in kept)


def keep_fitting(
    needs: Mapping[str, Need], whose: str, config: SweepConfig, target: TargetModel, candidates: Iterable[Candidate]
) -> set[str]:
    """The requests, by id, that the engines can take. Raises ValueError for others, where `long_prompts` is refuse, and
    where none is left."""
    context = engine_context(config, target)
    if context is None:
        return set(needs)
    kept_free = reserve(candidates)
    room = context - kept_free
    whole = {id_: need.prompt_tokens + max(need.new_tokens, config.warmup_tokens) for id_, need in needs.items()}
    too_long = [id_ for id_, tokens in whole.items() if tokens > room]
    if too_long and (config.long_prompts == "refuse" or len(too_long) == len(needs)):
        longest = max(too_long, key=whole.__getitem__)
        way_out = "" if len(too_long) == len(needs) else "; long_prompts=drop leaves them out"
        own = f"{target.context_length}" if target.context_length is not None else "unknown"
        raise ValueError(
            f"{len(too_long)} of {len(needs)} {whose} do not fit, the longest of them {longest}: up to "
            f"{needs[longest].prompt_tokens} tokens, with the longest answers to the turns before, and "
            f"{whole[longest] - needs[longest].prompt_tokens} new ones, but {context} (engine.context_length, "
            f"max_total_tokens, or the target's own, {own}) less {kept_free} for the draft leave {room}; raise those "
            f"limits, or lower max_new_tokens, draft_steps or topk{way_out}"
        )
    return set(needs) - set(too_long)
