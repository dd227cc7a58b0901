"""The requests of a trace as prompts of a sweep.

A trace that says what was asked gives its own prompts. One that says lengths alone has them cut from the workload's
prompts: all of them in a row, over and over, each request beginning at the next one's first token, and in the next
round one token further, so that hardly two begin alike and an engine's prefix cache helps them little.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from rayspec.farm.chat import SEPARATOR, plain_text, turn_request
from rayspec.shipped import user_path
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.lengths import Need, keep_fitting
from rayspec.sweep.trace import OWN_PROMPTS, TraceConfig
from rayspec.target import TargetModel
from rayspec.workloads import Conversation, load_workload
from rayspec.workloads.traces import TracedRequest, TraceRequest, read_trace

MAX_PROMPT_TOKENS = 20_000_000  # of all requests that are replayed; each trial reads them anew


class TraceReplay:
    """The part of a trace that a sweep replays. Made, it raises ValueError for a trace or a workload that cannot be
    read, and for a workload that does not go with the trace."""

    def __init__(self, config: SweepConfig) -> None:
        assert config.trace is not None, "asked for only where there is one"
        self.config = config
        self.trace: TraceConfig = config.trace
        file = user_path(self.trace.path, "trace.path")
        self.requests = read_trace(file, self.trace.unit, self.trace.start_s, self.trace.duration_s)
        has_messages = self.requests[0].messages is not None
        if has_messages != (config.workload == OWN_PROMPTS):
            raise ValueError(
                f"trace.path {self.trace.path} says what was asked, so that no other prompts are sent, but workload is "
                f"{config.workload!r}; set workload={OWN_PROMPTS}"
                if has_messages
                else f"trace.path {self.trace.path} says lengths alone, so that workload={OWN_PROMPTS} has nothing to "
                "send; name in workload the prompts that requests are to be cut from, such as workload=chat"
            )
        self.texts = [] if has_messages else load_workload(config.workload, config.seed)
        self.raised = 0  # requests that are longer than the trace says, for the chat template's sake

    def prompts(self, target: TargetModel, candidates: Iterable[Candidate]) -> tuple[TracedRequest, ...]:
        """Those that the engines can take. Raises ValueError as `keep_fitting` does, and where a block is too long."""
        tokenizer = target.tokenizer
        maker = None if not self.texts else Cutter(self.texts, tokenizer, is_chat=self.config.chat_template)
        said: dict[str, tuple[int, ...]] = {}
        needs: dict[str, Need] = {}
        for request in self.requests:
            if maker is None:
                said[request.id] = self._ids_of_messages(request, tokenizer)
                tokens = len(said[request.id])
            else:
                assert request.input_tokens is not None, "it has no messages"
                tokens = max(request.input_tokens, maker.shortest)
                self.raised += tokens > request.input_tokens
            needs[request.id] = Need(tokens, request.output_tokens or self.config.max_new_tokens)
        whose = f"requests of trace {self.trace.path}"
        kept = keep_fitting(needs, whose, self.config, target, candidates)
        total = sum(needs[id_].prompt_tokens for id_ in kept)
        if total > MAX_PROMPT_TOKENS:
            raise ValueError(
                f"trace.path {self.trace.path}: {len(kept)} requests of {total} prompt tokens in all, at most "
                f"{MAX_PROMPT_TOKENS}; take a part of it with trace.start_s and trace.duration_s"
            )
        rows = [request for request in self.requests if request.id in kept]
        made = tuple(
            TracedRequest(
                id=request.id,
                category=request.category,
                turns=("",),
                input_ids=said[request.id] if maker is None else maker.ids(i, needs[request.id].prompt_tokens),
                arrival_s=request.at_s,
                output_tokens=request.output_tokens,
            )
            for i, request in enumerate(rows)
        )
        self._check_blocks(made)
        return made

    def _ids_of_messages(self, request: TraceRequest, tokenizer: Any) -> tuple[int, ...]:
        messages = [dict(message) for message in request.messages or ()]
        if not (self.config.chat_template and tokenizer.chat_template):
            return tuple(tokenizer.encode(SEPARATOR.join(message["content"] for message in messages)))
        try:
            return tuple(
                tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            )
        except Exception as error:  # a template raises what it likes
            raise ValueError(
                f"{self.trace.path}:{request.line}: the target's chat template refuses the request ({error}); leave it "
                "out, or set chat_template=false, which sends plain text"
            ) from error

    def _check_blocks(self, prompts: Sequence[TracedRequest]) -> None:
        """Raise ValueError where the arrivals of a block alone take longer than a block may."""
        size, allowed_s = self.config.block_prompts, self.config.engine.block_timeout_s
        slowest = min(self.trace.speed)
        for first in range(0, len(prompts), size):
            last = prompts[min(first + size, len(prompts)) - 1]
            seconds = (last.arrival_s - prompts[first].arrival_s) / slowest
            if seconds >= allowed_s:
                raise ValueError(
                    f"block_prompts={size}: the requests of {prompts[first].id} to {last.id} of the trace come within "
                    f"{seconds:.0f} s at trace.speed={slowest:g}, but engine.block_timeout_s is {allowed_s:g}; take "
                    "smaller blocks, a higher speed, or a longer time"
                )

    def describe(self, prompts: Sequence[TracedRequest]) -> tuple[str, ...]:
        """How many requests of what size, and how fast they come at a speed of 1."""
        span_s = prompts[-1].arrival_s
        rate = f", {(len(prompts) - 1) / span_s:.3g} a second" if span_s > 0 else ""
        given = [len(p.input_ids) for p in prompts]
        asked = [p.output_tokens or self.config.max_new_tokens for p in prompts]
        ends = "to the last token" if self.config.ignore_eos else (
            "or shorter where the target ends them (ignore_eos=true gives the trace's lengths)"
        )  # fmt: skip
        line = (
            f"Trace {self.trace.path}: {len(prompts)} requests within {span_s:.1f} s{rate}; prompts of "
            f"{sum(given) / len(given):.0f} tokens in the mean, at most {max(given)}; answers of "
            f"{sum(asked) / len(asked):.0f}, at most {max(asked)}, {ends}."
        )
        raised = f"{self.raised} of the trace's requests are shorter than the chat template, and longer here."
        return (line, raised) if self.raised else (line,)


class Cutter:
    """Token ids of any length, made of conversations."""

    def __init__(self, texts: Sequence[Conversation], tokenizer: Any, *, is_chat: bool) -> None:
        self.texts = texts
        self.tokenizer = tokenizer
        self.is_chat = is_chat

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """What chat template and tokenizer put before a message and behind it."""
        one, other = (self._sent(Conversation(id="", category="", turns=(text,))) for text in ("a", "7"))
        before = _shared(one, other)
        return one[:before], one[len(one) - _shared(one[before:][::-1], other[before:][::-1]) :]

    def _sent(self, conversation: Conversation) -> list[int]:
        request = turn_request(conversation, [], self.tokenizer if self.is_chat else None)
        return request["input_ids"] if "input_ids" in request else self.tokenizer.encode(request["prompt"])

    @cached_property
    def row(self) -> tuple[list[int], list[int]]:
        """(all texts' ids in a row, where each text begins)."""
        ids: list[int] = []
        begins: list[int] = []
        for text in self.texts:
            begins.append(len(ids))
            ids += self.tokenizer.encode(plain_text(text) + SEPARATOR, add_special_tokens=False)
        return ids, begins

    @property
    def shortest(self) -> int:
        before, behind = self.frame
        return len(before) + 1 + len(behind)

    def ids(self, number: int, length: int) -> tuple[int, ...]:
        """Exactly `length` ids for request `number`, at least `shortest`."""
        before, behind = self.frame
        row, begins = self.row
        start = begins[number % len(begins)] + number // len(begins)
        wanted = length - len(before) - len(behind)
        rounds = (start % len(row) + wanted) // len(row) + 1
        content = (row * rounds)[start % len(row) :][:wanted] if rounds > 1 else row[start : start + wanted]
        return (*before, *content, *behind)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of their first ids are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
