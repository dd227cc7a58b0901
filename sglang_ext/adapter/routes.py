"""Refuses with 400 those requests to SGLang's rarely used routes that it would answer with 500, or break off."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sglang_ext.adapter.requests import check_ids

OF_A_REQUEST = {"chat_template", "documents"}  # arguments that templates read, or SGLang has words of its own for


def refuse_embeddings(original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND TokenizerManager.generate_request: embeddings are asked of a model that generates. SGLang says so, too,
    but only once it has read the request, and what it cannot read becomes a 500."""
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    if isinstance(request, EmbeddingReqInput) and manager.is_generation:
        raise ValueError("the served model generates text and is no embedding model; ask /generate or /v1/completions")
    return original(manager, request, *args, **kwargs)


def check_template_variables(original: Callable[..., str | None], serving: Any, request: Any) -> str | None:
    """AROUND OpenAIServingChat._validate_request: what is wrong with a request, or None. SGLang hands
    `chat_template_kwargs` on beside arguments of its own."""
    from transformers import PreTrainedTokenizerBase

    own = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - OF_A_REQUEST
    taken = sorted(own & set(request.chat_template_kwargs or {}))
    if taken:
        return f"chat_template_kwargs are variables of the template, and {', '.join(taken)} is none; leave it out"
    return original(serving, request)


async def check_detokenized(
    original: Callable[..., Awaitable[Any]], serving: Any, adapted: Any, request: Any, raw_request: Any
) -> Any:
    """AROUND OpenAIServingDetokenize._handle_non_streaming_request: ids that no tokenizer has."""
    tokens = request.tokens if isinstance(request.tokens, list) else []
    for ids in tokens if tokens and isinstance(tokens[0], list) else [tokens]:
        check_ids("tokens", [i for i in ids if isinstance(i, int)], serving.tokenizer_manager)
    return await original(serving, adapted, request, raw_request)


async def begin_answer(original: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    """AROUND the streams of OllamaServing: wait for the first part, so that what is refused gets a status. By itself
    SGLang says 200 before it looks at the request, and breaks the answer off."""
    response = await original(*args, **kwargs)
    parts = aiter(response.body_iterator)
    response.body_iterator = _put_back(await anext(parts, b""), parts)
    return response


async def _put_back(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for part in rest:
        yield part
