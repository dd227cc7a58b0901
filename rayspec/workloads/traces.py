"""Recorded traffic: when requests came, and how long they and their answers were, or what they said.

| file | fields of a request |
|---|---|
| CSV with a header, or JSONL | `timestamp`, `input_length`, `output_length`, in tokens; `category` if wanted |
| JSONL of OpenAI's request bodies | `timestamp` (or `created`), `messages`; or `body` with them (OpenAI's batches) |

Publishers' names for the three: `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure, github.com/Azure/AzurePublicDataset,
AzureLLMInferenceDataset2023.md), `timestamp, input_length, output_length` (Mooncake, github.com/kvcache-ai/Mooncake,
FAST25-release/traces; milliseconds), `Timestamp,Request tokens,Response tokens` (BurstGPT, github.com/HPMLL/BurstGPT;
seconds). Mooncake's `hash_ids`, which say what requests share, are not read.
"""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rayspec.messages import quoted
from rayspec.workloads.records import Conversation, read_json_lines

UNITS = {"s": 1.0, "ms": 1e-3}
TIMES = ("timestamp", "created")
INPUTS = ("input_length", "contexttokens", "request tokens")
OUTPUTS = ("output_length", "generatedtokens", "response tokens")
# fields of a body, in the order in which OpenAI's API reads them
LONGEST_ANSWERS = ("max_completion_tokens", "max_tokens")
MAX_TOKENS = 10**9
ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One line of a trace. `at_s`: seconds after the first one that is replayed. A trace says either `input_tokens` or
    `messages`; `output_tokens` None: how long the answer may be was not recorded."""

    line: int
    at_s: float
    input_tokens: int | None = None
    output_tokens: int | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    category: str = "trace"

    @property
    def id(self) -> str:
        return f"line-{self.line}"


@dataclass(frozen=True, kw_only=True)
class TracedRequest(Conversation):
    """A request of a trace as it is sent: `input_ids`, at `arrival_s` of the trace's own time, and with as many tokens
    for an answer as the trace says. Its one turn has no text."""

    input_ids: tuple[int, ...]
    arrival_s: float
    output_tokens: int | None = None


class _Malformed(Exception):
    """What is wrong with a line; the reader adds where."""


def read_trace(
    file: Path, unit: str | None = None, start_s: float = 0.0, duration_s: float | None = None
) -> list[TraceRequest]:
    """The requests from `start_s` to `start_s + duration_s` (seconds of the trace's own time after its first request;
    None: to its end), in their order.

    Args:
        unit: of timestamps that are numbers, `s` or `ms`; None for a trace whose timestamps are dates.

    Raises ValueError, with the line's number, for one that cannot be read or comes before the one above it, and for a
    trace without requests.
    """
    found: list[TraceRequest] = []
    first_s = before_s = span_s = 0.0
    before = 0
    for number, record in _records(file):
        try:
            at_s = _seconds(record, unit)
            if before and at_s < before_s:
                raise _Malformed(
                    f"the timestamp comes {before_s - at_s:g} s before that of line {before}; a trace is in the order "
                    "of arrival: sort it"
                )
            first_s = first_s if before else at_s
            before, before_s, span_s = number, at_s, at_s - first_s
            if duration_s is not None and span_s >= start_s + duration_s:
                break
            request = _request(record, number, span_s)
            if found and (found[0].messages is None) != (request.messages is None):
                raise _Malformed(
                    f"it has {'lengths' if request.messages is None else 'messages'}, and line {found[0].line} has "
                    "not; a trace says either for all requests"
                )
        except _Malformed as error:
            raise ValueError(f"trace {file}:{number}: {error}") from None
        if span_s >= start_s:
            found.append(request)
    if not before:
        raise ValueError(f"the trace {file} holds no request; give a file with at least one")
    if not found:
        until = "" if duration_s is None else f" and trace.duration_s={duration_s:g}"
        raise ValueError(
            f"no request of {file} lies within trace.start_s={start_s:g}{until}; it was read up to {span_s:g} s after "
            "its first request: choose another part"
        )
    return [_moved(request, found[0].at_s) for request in found]


def _moved(request: TraceRequest, by_s: float) -> TraceRequest:
    values = {**vars(request), "at_s": request.at_s - by_s}
    return TraceRequest(**values)


def _records(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, {field in lower case: value})."""
    if _begins_with_brace(file):
        for number, record in read_json_lines(file):
            if not isinstance(record, dict):
                raise ValueError(f"trace {file}:{number}: expected a JSON object, got {type(record).__name__}")
            yield number, {str(key).lower(): value for key, value in record.items()}
        return
    with _text(file) as lines:
        try:
            rows = csv.reader(lines, strict=True)
            header = [name.strip().lower().removeprefix("\ufeff") for name in next(rows, [])]
            if header:
                _check_header(file, header)
            for row in rows:
                if not any(cell.strip() for cell in row):
                    continue
                if len(row) != len(header):
                    raise ValueError(
                        f"trace {file}:{rows.line_num}: {len(row)} cells, but the header names {len(header)}"
                    )
                yield rows.line_num, dict(zip(header, (cell.strip() for cell in row), strict=True))
        except UnicodeDecodeError as error:
            raise ValueError(f"trace {file}: no UTF-8 text ({error})") from error
        except csv.Error as error:
            raise ValueError(f"trace {file}:{rows.line_num}: no valid CSV ({error})") from error
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"trace {file}: cannot be read ({error})") from error


def _check_header(file: Path, header: list[str]) -> None:
    for names in (TIMES[:1], INPUTS, OUTPUTS):
        if not set(names) & set(header):
            raise ValueError(
                f"trace {file}:1: no column {' or '.join(names)} (in any case) in {', '.join(header)}; the first line "
                "of a CSV trace names its columns"
            )


def _begins_with_brace(file: Path) -> bool:
    try:
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rb") as lines:
            return next((line for line in lines if line.strip()), b"").lstrip().startswith(b"{")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"the trace {file} cannot be read ({error}); give a CSV or JSONL file") from error


def _text(file: Path) -> io.TextIOBase:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8", newline="")  # type: ignore[return-value]
    return open(file, encoding="utf-8", newline="")


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((record[name] for name in names if record.get(name) not in (None, "")), None)


def _seconds(record: Mapping[str, Any], unit: str | None) -> float:
    value = _first(record, TIMES)
    if value is None:
        raise _Malformed(f"no {' or '.join(TIMES)} in {', '.join(record)}")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _Malformed(f"the timestamp must be a number or a date, got {quoted(value)}")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return _date(str(value), unit)
    if not math.isfinite(number):
        raise _Malformed(f"the timestamp must be a finite number or a date, got {quoted(value)}")
    if unit is None:
        raise _Malformed(
            f"the timestamp {quoted(value)} is a number, and trace.unit does not say of what; set trace.unit=ms "
            "(Mooncake's) or trace.unit=s (BurstGPT's, and Unix time)"
        )
    return number * UNITS[unit]


def _date(text: str, unit: str | None) -> float:
    """Unix time of an ISO 8601 date, which is in UTC where it names no zone."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise _Malformed(
            f"the timestamp {quoted(text)} is neither a number nor a date such as 2023-11-16 18:17:03.97"
        ) from None
    if unit is not None:
        raise _Malformed(f"the timestamp {quoted(text)} is a date, but trace.unit is {unit}; leave trace.unit out")
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _request(record: Mapping[str, Any], line: int, at_s: float) -> TraceRequest:
    body = record.get("body", record)
    if not isinstance(body, Mapping):
        raise _Malformed(f"body must be a request's JSON object, got {quoted(body)}")
    category = _first(record, ("category",)) or "trace"
    if not isinstance(category, str) or not category.isprintable():
        raise _Malformed(f"category must be one line of text, got {quoted(category)}")
    output = _length(_first(record, OUTPUTS), "output_length")
    if "messages" in body:
        if output is None:
            output = _length(_first(body, LONGEST_ANSWERS), "max_tokens")
        return TraceRequest(line=line, at_s=at_s, output_tokens=output, messages=_messages(body), category=category)
    given = _length(_first(record, INPUTS), "input_length")
    if given is None or output is None:
        raise _Malformed(
            "expected input_length and output_length, or a request's body with messages, got "
            f"{quoted(list(record))}; leave requests out that were never answered"
        )
    return TraceRequest(line=line, at_s=at_s, input_tokens=given, output_tokens=output, category=category)


def _length(value: Any, name: str) -> int | None:
    if value is None:
        return None
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or not 1 <= number <= MAX_TOKENS:
        raise _Malformed(
            f"{name} must be a whole number in 1..{MAX_TOKENS}, got {quoted(value)}; leave requests out that failed"
        )
    return number


def _messages(body: Mapping[str, Any]) -> tuple[Mapping[str, str], ...]:
    """The messages of a request, all that was said before it included: it is sent as it was, not turn by turn."""
    if body.get("tools") or body.get("functions"):
        raise _Malformed("the request offers tools, which a replay does not send; leave such requests out")
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise _Malformed(f"messages must be a list of at least one {{role, content}}, got {quoted(messages)}")
    return tuple(_message(message, i) for i, message in enumerate(messages))


def _message(message: Any, i: int) -> Mapping[str, str]:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise _Malformed(f"messages[{i}].role must be one of {', '.join(ROLES)}, got {quoted(role)}")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise _Malformed(f"messages[{i}].content must be text, got {quoted(content)}; leave such requests out")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise _Malformed(f"messages[{i}].content is no valid Unicode ({error.reason})") from None
    return {"role": role, "content": content}
