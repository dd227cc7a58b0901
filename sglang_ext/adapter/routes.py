"""Refuses with 400 those requests to SGLang's routes that it would answer with 500, break off, or never answer, and
keeps what a client names its requests from ending those of others."""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from sglang_ext.adapter.requests import check_ids

logger = logging.getLogger(__name__)
HEALTH_ROUTES = ("/health", "/health_generate")
OF_A_REQUEST = {"chat_template", "documents"}  # arguments that templates read, or SGLang has words of its own for


def check_route(original: Callable[..., Any], manager: Any, asked: Any, request: Any = None) -> Any:
    """AROUND TokenizerManager.generate_request: embeddings are asked of a model that generates, or a request calls
    itself a check of the server's health. SGLang refuses the first, too, but only once it has read the request, and
    what it cannot read becomes a 500; a busy scheduler drops the second without a word."""
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    if isinstance(asked, EmbeddingReqInput) and manager.is_generation:
        raise ValueError("the served model generates text and is no embedding model; ask /generate or /v1/completions")
    names = asked.rid if isinstance(asked.rid, list) else [asked.rid]
    is_check = any(isinstance(name, str) and name.startswith(HEALTH_CHECK_RID_PREFIX) for name in names)
    if is_check and (request is None or request.url.path not in HEALTH_ROUTES):
        raise ValueError(
            f"rid must not begin with {HEALTH_CHECK_RID_PREFIX}, which names the server's own requests; give another "
            "one, or none"
        )
    return original(manager, asked, request)


def abort_alone(original: Callable[..., None], manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """AROUND TokenizerManager.abort_request, which also sees to the requests of clients that have left: the scheduler
    ends every request whose name begins with this one, those of other clients, too. Where there are such, this one goes
    on to its end."""
    if not abort_all and (others := sum(other != rid and other.startswith(rid) for other in manager.rid_to_state)):
        logger.warning("request %.64s is not aborted: the names of %d others begin with its name", rid, others)
        return
    original(manager, rid, abort_all)


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
