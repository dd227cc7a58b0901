"""What a request may ask. It is checked before it goes to the scheduler, which one bad request would end.

SGLang splits a request into one for each prompt (`check_request` is around that) and makes of each what the scheduler
gets (`check_tokenized`). Either may raise ValueError, which every route answers with status 400 and the message.
"""

import math
import re
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import msgspec
import numpy as np

from sglang_ext.adapter.stop_regex import check_stop_regex

MAX_SAMPLES = 1024  # `n`: each is a request of its own, made at once
# Far beyond any use, and far enough from float32's limits that no logit becomes infinite.
LARGEST_BIAS = 1e30
MIN_REPETITION_PENALTY = 1e-6
# One entry a prompt where they are lists; SGLang indexes them unchecked.
PER_PROMPT = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "custom_logit_processor",
    "lora_path",
    "video_data",
    "audio_data",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
)
# Fields of SamplingParams that SGLang fills in.
INTERNAL = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")
# What changes the logits with the tokens of the answer, and the value that changes nothing.
PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}


def check_request(original: Callable[..., None], request: Any) -> None:
    """AROUND GenerateReqInput.normalize_batch_and_arguments. Raises ValueError for sampling parameters of another name
    or type than SGLang's, for lists that do not go with the prompts, and for no prompt at all."""
    params = request.sampling_params
    for one in params if isinstance(params, list) else [params]:
        _check_types({} if one is None else one)
    if params == []:
        raise ValueError("sampling_params is an empty list; give an object, or a list with one for each prompt")
    check_prompts(request)
    original(request)
    if request.is_single:
        for name, one in (("sampling_params", "an object"), ("rid", "a string")):
            if isinstance(getattr(request, name), list):
                raise ValueError(f"{name} is a list, but there is one prompt and no list of them; give {one}")
        return
    if request.batch_size == 0:
        raise ValueError("the list of prompts is empty; give at least one")
    for name in PER_PROMPT:
        values = getattr(request, name)
        entries = len(values) // request.parallel_sample_num if isinstance(values, list) else request.batch_size
        if entries != request.batch_size:
            raise ValueError(
                f"{name} is a list of {entries}, but there are {request.batch_size} prompts; give one entry for each"
            )


def check_prompts(request: Any) -> None:
    """What /generate's schema says of prompts, which /vertex_generate puts together of anything. Raises ValueError."""
    text = request.text
    if text is not None and not isinstance(text, str):
        texts = text if isinstance(text, list) else [text]
        wrong = [i for i, one in enumerate(texts) if not isinstance(one, str)]
        if wrong or not isinstance(text, list):
            raise ValueError(f"text must be text, or a list of texts; of prompt {wrong[0] if wrong else 0} it is not")
    ids = request.input_ids
    if isinstance(ids, list) and any(isinstance(one, list) for one in ids):
        wrong = [i for i, one in enumerate(ids) if not isinstance(one, list)]
        if wrong:
            raise ValueError(f"input_ids must be a list of ids for each prompt; of prompt {wrong[0]} it is not")


@cache
def _types() -> dict[str, Any]:
    """Types of the sampling parameters that a request may have, by name."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    return {field.name: field.type for field in msgspec.structs.fields(SamplingParams) if field.name not in INTERNAL}


def _check_types(params: Any) -> None:
    if not isinstance(params, dict):
        raise ValueError(f"sampling_params must be an object, got {type(params).__name__}")
    types = _types()
    for name, value in params.items():
        if name not in types:
            raise ValueError(f"sampling_params has no {name!r}; known are {', '.join(types)}")
        if name == "stop_token_ids" and isinstance(value, list):
            value = [i for i in value if i is not None]  # as SGLang takes them
        if value is not None:
            try:
                msgspec.convert(value, types[name])
            except msgspec.ValidationError as error:
                raise ValueError(f"sampling_params.{name}: {error}") from error
    patterns = params.get("stop_regex") or []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        _check_pattern(pattern)
    n = params.get("n")
    if n is not None and not 1 <= n <= MAX_SAMPLES:
        raise ValueError(f"sampling_params.n must be in 1..{MAX_SAMPLES}, got {n}")


def _check_pattern(pattern: str) -> None:
    try:
        check_stop_regex(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"sampling_params.stop_regex is no regular expression: {error}") from error


def refuse_all(manager: Any, why: str | None) -> None:
    """Have `check_tokenized` refuse every request to this TokenizerManager in these words; None: none any more."""
    manager.rayspec_refusal = why


def check_tokenized(original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND TokenizerManager._create_tokenized_object. Raises ValueError for what the scheduler could not read, for
    values outside of the model's vocabulary or of the numbers that it computes with, and after `refuse_all`."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    refusal = getattr(manager, "rayspec_refusal", None)
    if refusal is not None:
        raise ValueError(refusal)
    try:
        tokenized = original(manager, request, *args, **kwargs)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"the request cannot be read: {error}") from error
    if isinstance(tokenized, TokenizedGenerateReqInput):
        _check_readable(tokenized)
        _check_prompt(manager, request, tokenized)
        _check_logprobs(manager, tokenized)
        _check_sampling(manager, tokenized.sampling_params)
        _check_exact(tokenized.sampling_params)
    return tokenized


def _check_readable(tokenized: Any) -> None:
    """Read what will be sent as the scheduler will; it cannot answer what it cannot read."""
    from sglang.srt.managers.embed_types import PositionalEmbeds
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    overrides = tokenized.positional_embed_overrides
    if overrides is not None and not isinstance(overrides, PositionalEmbeds):
        raise ValueError("positional_embed_overrides cannot be given as JSON; leave it out")
    # these SGLang makes itself, and sends in another form
    sent = msgspec.structs.replace(tokenized, time_stats=None, mm_inputs=None, positional_embed_overrides=None)
    try:
        msgpack_decode(msgpack_encode(sent))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the request cannot be read: {_named(str(error), tokenized)}") from error


def _named(message: str, tokenized: Any) -> str:
    """msgspec gives the number of a field, after that of the type; say its name."""
    names = tokenized.__struct_fields__
    return re.sub(r"\$\[(\d+)\]", lambda found: names[int(found[1]) - 1], message)


def _check_prompt(manager: Any, request: Any, tokenized: Any) -> None:
    session = tokenized.session_params
    if session is not None and session.replace and session.rid is None:
        # SGLang's "all of them" changes a dictionary while it goes over it
        raise ValueError(
            "session_params.replace needs the rid of the request that is replaced; give it, or a new session"
        )
    if request.contains_mm_input() and manager.mm_processor is None:
        raise ValueError("the served model reads text alone; leave images, videos and audio out")
    if tokenized.mm_inputs is not None or tokenized.input_embeds is not None:
        return  # their tokens are made by the model's processor
    ids: array[int] = tokenized.input_ids  # of 64-bit integers
    if not ids:
        if tokenized.session_params is None:  # a session may hold the prompt
            raise ValueError("the prompt has no tokens; give at least one")
        return
    values = np.frombuffer(ids, dtype=np.int64)
    check_ids("the prompt", (int(values.min()), int(values.max())), manager)
    for name in ("token_indices_to_pool", "multi_item_delimiter_indices"):
        places = getattr(tokenized, name)
        if places is not None and (tokenized.logprob_start_len != 0 or not all(0 <= i < len(ids) for i in places)):
            raise ValueError(
                f"{name} must be positions in the prompt, 0..{len(ids) - 1}, with logprob_start_len 0; "
                "leave it out, or use /v1/score"
            )


def check_ids(what: str, ids: Iterable[int], manager: Any) -> None:
    vocab_size = manager.model_config.vocab_size
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(f"{what} has the token id {outside[0]}; ids must be in 0..{vocab_size - 1} (the vocabulary)")


def _check_logprobs(manager: Any, tokenized: Any) -> None:
    vocab_size = manager.model_config.vocab_size
    if not 0 <= tokenized.top_logprobs_num <= vocab_size:
        raise ValueError(
            f"top_logprobs_num must be in 0..{vocab_size} (the vocabulary), got {tokenized.top_logprobs_num}"
        )
    if tokenized.logprob_start_len < -1:
        raise ValueError(
            "logprob_start_len must be a position in the prompt, or -1 for none of it, got "
            f"{tokenized.logprob_start_len}"
        )


def _check_sampling(manager: Any, params: Any) -> None:
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    if params.top_k > TOP_K_ALL:
        raise ValueError(f"top_k must be at most {TOP_K_ALL}, or -1 for all tokens, got {params.top_k}")
    if params.repetition_penalty < MIN_REPETITION_PENALTY:
        raise ValueError(
            f"repetition_penalty must be at least {MIN_REPETITION_PENALTY:g}, got {params.repetition_penalty:g}"
        )
    if params.min_new_tokens > manager.context_len:
        raise ValueError(
            f"min_new_tokens must be at most {manager.context_len} (the context), got {params.min_new_tokens}"
        )
    if params.stream_interval is not None and params.stream_interval < 1:
        raise ValueError(f"stream_interval must be at least 1, got {params.stream_interval}")
    check_ids("stop_token_ids", params.stop_token_ids or (), manager)
    for token, bias in (params.logit_bias or {}).items():
        if not math.isfinite(bias) or abs(bias) > LARGEST_BIAS:
            raise ValueError(f"logit_bias must be finite and in size at most {LARGEST_BIAS:g}, got {token}: {bias}")


def _check_exact(params: Any) -> None:
    """SGLang's verification penalises all tokens of a step as its first one, and counts one token a step."""
    from sglang.srt.runtime_context import get_spec

    algorithm = get_spec().speculative_algorithm
    for name, neutral in PENALTIES.items() if algorithm is not None else ():
        if getattr(params, name) != neutral:
            raise ValueError(
                f"{name} is {getattr(params, name)}, but this server speculates ({algorithm}), and under speculation "
                f"SGLang's penalties are not those of plain decoding; leave it at {neutral}, or ask a server without "
                "--speculative-algorithm"
            )


def refuse_on_cpu(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND operations of TokenizerControlMixin that would end the scheduler of the CPU platform."""
    from fastapi import HTTPException  # the one error that these routes answer with its status

    raise HTTPException(400, f"{original.__name__} is not offered by rayspec's CPU platform")
