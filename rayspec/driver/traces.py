"""A few requests of a trial as MLflow traces, so that one can look at single answers beside the pooled metrics.

A trace has the ids of the prompt, never its text. Its own id follows from run and request: written twice it is there
once. MLflow's public client makes traces of what happens in its own process, gives them ids by chance and drops what a
store refuses, so these go through its `TracingClient`.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

from mlflow.entities import Span, SpanType, TraceInfo, TraceLocation, TraceState
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey

from rayspec.records import BlockRecord, RequestRecord

logger = logging.getLogger(__name__)
ATTEMPTS = 3


def log_traces(
    client: TracingClient,
    experiment_id: str,
    run_id: str,
    model_id: str | None,
    blocks: Sequence[BlockRecord],
    limit: int,
    time_s: float,
    *,
    with_output_ids: bool,
) -> None:
    """Log those of the first `limit` requests of a trial that the last of its `blocks` has answered. Only the end of
    that block is known (`time_s`), so each begins where the block did."""
    before = sum(len(b.requests) for b in blocks[:-1])
    last = blocks[-1]
    start_ns = int((time_s - last.wall_s) * 1e9)
    for number, request in enumerate(last.requests[: max(0, limit - before)], start=before):
        digest = hashlib.sha256(f"{run_id}/{number}".encode()).hexdigest()
        info, spans = _trace(digest, request, start_ns, with_output_ids=with_output_ids)
        info.trace_location = TraceLocation.from_experiment_id(experiment_id)
        info.trace_metadata[TraceMetadataKey.SOURCE_RUN] = run_id
        if model_id is not None:
            info.trace_metadata[TraceMetadataKey.MODEL_ID] = model_id
        client.start_trace(info)
        _log_spans(client, experiment_id, spans)


def _log_spans(client: TracingClient, experiment_id: str, spans: list[Span]) -> None:
    """The trace is there without them, too. MLflow asks a server for its version first, and gives it three seconds."""
    for left in reversed(range(ATTEMPTS)):
        try:
            client.log_spans(experiment_id, spans)
            return
        except NotImplementedError as error:  # servers before MLflow 3.4, or too busy to answer in time
            if not left:
                _say_once(str(error))


@cache
def _say_once(cause: str) -> None:
    logger.warning("traces are without their parts: %s", cause)


def _trace(
    digest: str, request: RequestRecord, start_ns: int, *, with_output_ids: bool
) -> tuple[TraceInfo, list[Span]]:
    """The answer, and in it the time until its first token and that of the others."""
    trace_id = f"tr-{digest[:32]}"
    first_ns, end_ns = (start_ns + int(s * 1e9) for s in (request.ttft_s, request.e2e_s))
    asked = {"prompt_id": request.prompt_id, "turn": request.turn, "category": request.category}
    given: dict[str, Any] = {"output_tokens": request.output_tokens, "finish_reason": request.finish_reason}
    given |= {"output_ids": list(request.output_ids)} if with_output_ids else {}
    usage = {"input_tokens": request.prompt_tokens, "output_tokens": request.output_tokens}
    usage["total_tokens"] = sum(usage.values())
    counts: dict[str, Any] = {"cached_tokens": request.cached_tokens}
    if request.verify_steps:
        counts |= {
            "verify_steps": request.verify_steps,
            "accepted_drafts": request.accepted_drafts,
            "accepted_histogram": list(request.accepted_histogram),
            "tau": 1 + request.accepted_drafts / request.verify_steps,
        }
    root = {
        SpanAttributeKey.SPAN_TYPE: SpanType.LLM,
        SpanAttributeKey.INPUTS: asked,
        SpanAttributeKey.OUTPUTS: given,
        SpanAttributeKey.CHAT_USAGE: usage,
        **counts,
    }
    spans = [
        _span(trace_id, digest, 0, "request", start_ns, end_ns, root),
        _span(trace_id, digest, 1, "first token", start_ns, first_ns, {}),
        _span(trace_id, digest, 2, "other tokens", first_ns, end_ns, {}),
    ]
    info = TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id("0"),
        request_time=start_ns // 1_000_000,
        execution_duration=(end_ns - start_ns) // 1_000_000,
        state=TraceState.OK,
        request_preview=json.dumps(asked),
        response_preview=json.dumps({k: v for k, v in given.items() if k != "output_ids"}),
        trace_metadata={TraceMetadataKey.TOKEN_USAGE: json.dumps(usage)},
        tags={TraceTagKey.TRACE_NAME: "request"},
    )
    return info, spans


def _span(
    trace_id: str, digest: str, number: int, name: str, start_ns: int, end_ns: int, attributes: dict[str, Any]
) -> Span:
    """MLflow's form of a stored span, number 0 being the root."""
    root, own = (hashlib.sha256(f"{digest}/{n}".encode()).hexdigest()[:16] for n in (0, number))
    values = {SpanAttributeKey.REQUEST_ID: trace_id, **attributes}
    return Span.from_dict(
        {
            "trace_id": trace_id,
            "span_id": own,
            "parent_span_id": root if number else None,
            "name": name,
            "start_time_unix_nano": start_ns,
            "end_time_unix_nano": end_ns,
            "events": [],
            "status": {"code": "STATUS_CODE_OK", "message": ""},
            "attributes": {k: json.dumps(v) for k, v in values.items()},
        }
    )
