"""A side that is an OpenAI-compatible server: http(s)://HOST:PORT/v1, answers streamed.

Tokens are those of the server's `usage`. Verify steps and accepted drafts come from SGLang with each answer
(`return_spec_tokens_details`), from vLLM as the growth of its Prometheus counters over a block, which holds what
anybody else asks of it meanwhile; another server is measured for its speed alone.
"""

import asyncio
import os
import ssl
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from rayspec.gate.config import GateConfig
from rayspec.gate.sides import Answer, BlockAnswers, MeasureFailed, Side
from rayspec.gate.wire import MAX_COUNT, Chunk, ModelList, ServerInfo, SpecDetails, Usage
from rayspec.messages import escaped, shortened
from rayspec.serving.access import KEY_VARIABLE
from rayspec.workloads import Conversation

T = TypeVar("T")
EXTENDED = ("sglang", "vllm")  # servers that know ignore_eos; OpenAI's own API refuses what it does not know
VLLM_STEPS, VLLM_ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
MAX_ERROR_CHARACTERS = 300
MAX_BODY = 2**24  # bytes of a list, of counters and of an error
MAX_TOKEN_BYTES = 2**14  # allowed in the stream for each token that is asked for


def is_address(source: str) -> bool:
    return source.lower().startswith(("http://", "https://"))


def checked_address(source: str) -> str:
    """Without a slash at its end. Raises ValueError for what is no address of a server, without repeating a login."""
    try:
        parts = urlsplit(source)
        is_server = bool(parts.hostname) and (parts.port is None or 0 < parts.port < 65536)
    except ValueError:
        is_server = False
    if not is_server or "@" in source:
        raise ValueError(
            "an endpoint must be http(s)://HOST:PORT/v1 without user and password; keys come from --baseline-key-file, "
            f"--candidate-key-file or {KEY_VARIABLE}"
        )
    if parts.query or parts.fragment:
        raise ValueError("an endpoint must be http(s)://HOST:PORT/v1, without ? and #, which may hold a key")
    return urlunsplit(parts).rstrip("/")


def endpoint_key(role: str, file: str | None) -> str | None:
    """The key of a file, of RAYSPEC_BASELINE_API_KEY or RAYSPEC_CANDIDATE_API_KEY, or of RAYSPEC_API_KEY, which is sent
    to both. Raises ValueError for one that no header can hold, without repeating it."""
    variable = f"RAYSPEC_{role.upper()}_API_KEY"
    name = next((v for v in (variable, KEY_VARIABLE) if v in os.environ), variable)
    if file is not None:
        name = f"--{role}-key-file {file}"
        try:
            key = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name} cannot be read ({type(error).__name__})") from error
    else:
        found = os.environ.get(name)
        if found is None:
            return None
        key = found
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"the key of {name} must be one word of printable ASCII characters that is not empty")
    return key


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What /v1/models says of the model: `name` is asked for, `root` is what it was loaded from."""

    name: str
    root: str
    server: str  # "sglang", "vllm", or what the server says it is


class EndpointSide(Side):
    """One server. Every failure is a MeasureFailed that names the side, and the key is in none of them.

    `ready_by`: the time.monotonic() at which max_minutes are over. Until `warm_up` is done nothing is waited for beyond
    it; later the gate begins no round that would not fit.
    """

    def __init__(
        self,
        role: str,
        address: str,
        config: GateConfig,
        *,
        model: str | None,
        key: str | None,
        ready_by: float | None = None,
    ) -> None:
        self.role = role
        self.label = address
        self.config = config
        self._key = key
        # nothing is packed, so that what is received is as long as what is read
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._runner = asyncio.Runner()
        # no proxy of the environment between us and what is measured; the certificates of the system
        self._client = httpx.AsyncClient(
            headers=headers, timeout=config.request_timeout_s, trust_env=False, verify=ssl.create_default_context()
        )
        self._asked_model = model
        self.model = ServedModel(name="", root="", server="")
        self.is_chat = config.chat_template
        self.tells_tau = False
        self.counts_blocks = False
        self._ready_by = ready_by
        self._counted: tuple[float, float] | None = None  # by vLLM, until the end of the last block

    @property
    def takes_ignore_eos(self) -> bool:
        return self.model.server in EXTENDED

    def connect(self, probe: Conversation) -> Answer:
        """Find the model, and let it answer once: whatever a server can refuse, it refuses here."""
        self.model = self._find_model()
        (answer,) = self.answer([replace(probe, turns=probe.turns[:1])]).answers
        if not answer.tokens:
            raise self._failed(
                "answered the first prompt with nothing; look whether it serves the right model with its chat template"
            )
        self.tells_tau = self.tells_tau or self._counters() is not None
        return answer

    def warm_up(self, prompts: Sequence[Conversation]) -> None:
        """Connections, caches of templates, whatever a server does once."""
        self.answer(prompts)
        self._ready_by = None

    def answer(self, prompts: Sequence[Conversation]) -> BlockAnswers:
        before = self._counters() if self._counted is None else self._counted  # it may count a little late
        start = time.perf_counter()
        answered = self._run(self._all(prompts))
        wall_s = time.perf_counter() - start
        after = self._counters()
        answers = [answer for one in answered for answer in one]
        if before is not None:
            answers = self._of_block(answers, before, after)
        self._counted = after
        return BlockAnswers(wall_s=wall_s, answers=tuple(answers))

    def _of_block(
        self, answers: Sequence[Answer], before: tuple[float, float], after: tuple[float, float] | None
    ) -> list[Answer]:
        """The answers, with the counts of the block at its first one: they are only known together."""
        if after is None:
            raise self._failed("no longer tells its verify steps at /metrics; look whether it was restarted")
        steps, accepted = (b - a for a, b in zip(before, after, strict=True))
        if not (0 <= steps <= MAX_COUNT and 0 <= accepted <= MAX_COUNT):  # NaN is neither
            raise self._failed(
                f"counted {steps:g} verify steps and {accepted:g} accepted drafts at /metrics over a block; look "
                "whether it was restarted"
            )
        self.counts_blocks = True
        first, *others = answers
        return [replace(first, verify_steps=int(steps), accepted_drafts=int(accepted)), *others]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Complete what is asked of the server; until it is warm, before max_minutes are over."""

        async def in_time() -> T:
            async with asyncio.timeout(None if self._ready_by is None else self._ready_by - time.monotonic()):
                return await work

        try:
            return self._runner.run(in_time())
        except TimeoutError:
            raise self._failed(
                f"was not ready within max_minutes={self.config.max_minutes:g}; it hangs or is overloaded: look at its "
                "log, or raise max_minutes"
            ) from None

    def stop(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    async def _all(self, prompts: Sequence[Conversation]) -> list[list[Answer]]:
        return await asyncio.gather(*map(self._converse, prompts))

    async def _converse(self, conversation: Conversation) -> list[Answer]:
        system = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
        messages, answers = list(system), []
        for turn, text in enumerate(conversation.turns):
            messages.append({"role": "user", "content": text})
            answer = await self._ask(conversation, turn, messages)
            answers.append(answer[0])
            messages.append({"role": "assistant", "content": answer[1]})
        return answers

    async def _ask(self, conversation: Conversation, turn: int, messages: list[dict[str, str]]) -> tuple[Answer, str]:
        """(answer, its text)."""
        config = self.config
        body: dict[str, Any] = {
            "model": self.model.name,
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat and conversation.is_chat:
            path, body["messages"] = "/chat/completions", messages
        else:
            path, body["prompt"] = "/completions", "\n\n".join(m["content"] for m in messages)
        if config.ignore_eos and self.takes_ignore_eos:
            body["ignore_eos"] = True
        if self.model.server == "sglang":
            body["return_spec_tokens_details"] = True
        name = f"prompt {conversation.id}" + (f", turn {turn + 1}" if turn else "")
        try:
            async with asyncio.timeout(config.request_timeout_s):
                return await self._stream(path, body, name, conversation.id, turn)
        except TimeoutError:
            raise self._failed(
                f"did not complete {name} within request_timeout_s={config.request_timeout_s:g}; it hangs or is "
                "overloaded: look at its log, or raise request_timeout_s"
            ) from None
        except httpx.TimeoutException:
            raise self._failed(f"sent nothing for request_timeout_s={config.request_timeout_s:g} ({name})") from None
        except httpx.HTTPError as error:
            raise self._failed(
                f"is gone ({type(error).__name__}, {name}); look whether it runs, and at its log"
            ) from None

    async def _stream(
        self, path: str, body: Mapping[str, Any], name: str, prompt_id: str, turn: int
    ) -> tuple[Answer, str]:
        start, first_s, last_s = time.perf_counter(), None, 0.0
        pieces: list[str] = []
        usage: Usage | None = None
        details: SpecDetails | None = None
        async with self._client.stream("POST", self.label + path, json=dict(body)) as response:
            if response.status_code != 200:
                self._refuse(response.status_code, await self._body(response, name), name)
            async with aclosing(self._lines(response, name)) as lines:
                async for line in lines:
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = self._chunk(data, name)
                    usage = chunk.usage or usage
                    details = (chunk.sglext and chunk.sglext.spec_tokens_details) or details
                    if text := chunk.text:
                        last_s = time.perf_counter() - start
                        first_s = last_s if first_s is None else first_s
                        pieces.append(text)
            last_s = last_s or time.perf_counter() - start
        prompt_tokens, tokens = self._usage(usage, name)
        text = "".join(pieces)
        self.tells_tau = self.tells_tau or bool(details and details.model_fields_set)
        details = details or SpecDetails()
        answer = Answer(
            prompt_id=prompt_id,
            turn=turn,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            output=text,
            verify_steps=details.spec_verify_ct,
            accepted_drafts=details.spec_num_correct_drafts,
            ttft_s=last_s if first_s is None else first_s,
            e2e_s=last_s,
        )
        return answer, text

    async def _lines(self, response: httpx.Response, name: str) -> AsyncGenerator[str, None]:
        """The lines of a stream. httpx's own iterator would keep a line that never ends."""
        most, taken, line = MAX_BODY + MAX_TOKEN_BYTES * self.config.max_new_tokens, 0, bytearray()
        async with _pieces(response) as pieces:
            async for piece in pieces:
                taken += len(piece)
                if taken > most:
                    raise self._too_much(most, name)
                *ends, begin = piece.split(b"\n")
                for end in ends:
                    yield (line + end).decode(errors="replace")
                    line.clear()
                line += begin
        yield line.decode(errors="replace")

    async def _body(self, response: httpx.Response, name: str) -> bytes:
        found = bytearray()
        async with _pieces(response) as pieces:
            async for piece in pieces:
                found += piece
                if len(found) > MAX_BODY:
                    raise self._too_much(MAX_BODY, name)
        return bytes(found)

    def _too_much(self, most: int, name: str) -> MeasureFailed:
        return self._failed(f"sent more than {most >> 20} MiB for {name}; is it an OpenAI-compatible server?")

    def _chunk(self, data: str, name: str) -> Chunk:
        try:
            chunk = Chunk.model_validate_json(data)
        except ValidationError as error:
            if not error.errors()[0]["loc"]:  # the whole of it
                raise self._failed(
                    f"sent what is no JSON object in the stream of {name}; is it an OpenAI-compatible server?"
                ) from None
            raise self._failed(f"sent what is no answer in the stream of {name}: {self._short(data)}") from None
        if chunk.error:
            raise self._failed(f"broke off {name}: {self._short(data)}")
        return chunk

    def _usage(self, usage: Usage | None, name: str) -> tuple[int, int]:
        """(prompt tokens, output tokens)."""
        if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
            raise self._failed(
                f"ended the stream of {name} without usage; the gate counts tokens by stream_options.include_usage, "
                "which the server must know, and a stream that was cut off lacks it too"
            )
        return usage.prompt_tokens, usage.completion_tokens

    def _refuse(self, status: int, body: bytes, name: str) -> None:
        text = self._short(body.decode(errors="replace"))  # whatever it says its characters are
        if status in (401, 403):
            raise self._failed(
                f"refused the key (status {status}); set RAYSPEC_{self.role.upper()}_API_KEY or --{self.role}-key-file"
            )
        if status == 404:
            raise self._failed(
                f"has no model {self.model.name!r} at this address (status 404: {text}); name another with "
                f"--{self.role}-model, and end the address with /v1"
            )
        if status == 429:
            raise self._failed(
                "limits its requests (status 429), so that its speed cannot be measured; gate it directly"
            )
        what = "failed on" if status >= 500 else "refused"
        raise self._failed(f"{what} {name} with status {status}: {text}")

    def _find_model(self) -> ServedModel:
        listing = self._get("/models")
        try:
            models = {m.id: m for m in ModelList.model_validate_json(listing).data}
        except ValidationError:
            raise self._failed("lists no models at /models; an endpoint's address ends with /v1") from None
        name = self._asked_model
        if name is None and len(models) == 1:
            name = next(iter(models))
        if name is None or name not in models:
            known = self._short(", ".join(sorted(models)[:20])) or "none"
            problem = "has several models" if self._asked_model is None else f"has no model {name!r}"
            raise self._failed(f"{problem} (it has {known}); name one with --{self.role}-model")
        entry = models[name]
        return ServedModel(name=name, root=entry.root or name, server=(entry.owned_by or "").lower())

    async def _fetch(self, address: str, name: str) -> tuple[int, bytes]:
        """(status, body), all of it within the time of a request: httpx's own limit starts again with each byte."""
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                async with self._client.stream("GET", address) as response:
                    return response.status_code, await self._body(response, name)
        except TimeoutError:
            raise httpx.ReadTimeout("a request's time is over") from None

    def _get(self, path: str) -> bytes:
        try:
            status, body = self._run(self._fetch(self.label + path, path))
        except httpx.TimeoutException:
            raise self._failed(
                f"did not answer {path} within request_timeout_s={self.config.request_timeout_s:g}; it hangs or is "
                "overloaded: look at its log, or raise request_timeout_s"
            ) from None
        except httpx.HTTPError as error:
            raise self._failed(f"cannot be reached ({type(error).__name__}); look whether it runs") from None
        if status != 200:
            self._refuse(status, body, path)
        return body

    def adapts(self) -> bool:
        """Whether SGLang chooses its draft length as it goes; False where nobody says so."""
        if self.model.server != "sglang":
            return False
        try:
            told = ServerInfo.model_validate_json(self._beside("/server_info"))
        except (httpx.HTTPError, ValidationError):
            return False
        return bool(told.speculative_adaptive or told.speculative_adaptive_config)

    def _beside(self, path: str) -> bytes:
        """What the server says beside OpenAI's routes, whatever its status. Raises httpx.HTTPError."""
        parts = urlsplit(self.label)
        return self._run(self._fetch(f"{parts.scheme}://{parts.netloc}{path}", path))[1]

    def _counters(self) -> tuple[float, float] | None:
        """vLLM's (drafts, accepted tokens) since its start; None of another server, and without speculation."""
        if self.model.server != "vllm":
            return None
        try:
            text = self._beside("/metrics").decode(errors="replace")
            samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
        except (httpx.HTTPError, ValueError, IndexError):  # the parser's, of what is no such text
            return None
        steps, accepted = ([s.value for s in samples if s.name == name] for name in (VLLM_STEPS, VLLM_ACCEPTED))
        return (sum(steps), sum(accepted)) if steps and accepted else None

    def _failed(self, what: str) -> MeasureFailed:
        return MeasureFailed(f"{self.role} {self.label} {what}")

    def _short(self, text: str) -> str:
        """What a server said, for a message: without the key, which it may repeat, and what would steer a terminal."""
        text = " ".join(text.replace(self._key, "***").split() if self._key else text.split())
        return shortened(escaped(text), MAX_ERROR_CHARACTERS)


def _pieces(response: httpx.Response) -> aclosing[AsyncGenerator[bytes, None]]:
    """The pieces of a body. Their generator is closed with the block, not first when its event loop is closed."""
    return aclosing(cast(AsyncGenerator[bytes, None], response.aiter_bytes()))
