"""A small server that speaks OpenAI's protocol with streams, as SGLang, vLLM or somebody else, and can misbehave."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS = 12


@dataclass
class Manners:
    """How a server behaves. `owner`: what its list of models says of it."""

    owner: str = "sglang"
    models: tuple[str, ...] = ("demo",)
    key: str | None = None
    seconds_per_token: float = 0.0005
    prompt_tokens: int = 0  # beside one a word
    word: str = "a"
    verify_steps: int = 6
    accepted: int = 6
    status: int = 200
    error: bytes = b'{"error": {"message": "out of memory"}}'
    tokens: int = TOKENS
    hangs_s: float = 0.0
    sends_usage: bool = True
    raw: bytes | None = None  # sent instead of a stream
    listing: bytes | None = None  # sent instead of the list of models
    info: bytes = b"{}"  # SGLang's /server_info
    metrics: list[bytes] = field(
        default_factory=list
    )  # sent one after the other instead of /metrics, and the last again
    trickles_s: float = 0.0  # between a byte and the next of the list of models
    cuts_off_after: int | None = None  # requests, then connections are closed
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)


@contextlib.contextmanager
def openai_server(manners: Manners) -> Iterator[str]:
    """Its address, which ends with /v1."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics" and manners.metrics:
                self._send(200, manners.metrics.pop(0) if len(manners.metrics) > 1 else manners.metrics[0])
            elif self.path == "/metrics":
                steps, accepted = (len(manners.requests) * n for n in (manners.verify_steps, manners.accepted))
                names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
                values = zip(names, (steps, accepted), strict=True)
                lines = [f'# TYPE {n}_total counter\n{n}_total{{model="demo"}} {v}\n' for n, v in values]
                self._send(200, "".join(lines).encode())
            elif self._is_allowed() and self.path == "/server_info":
                self._send(200, manners.info)
            elif self._is_allowed():
                data = [{"id": m, "object": "model", "owned_by": manners.owner, "root": m} for m in manners.models]
                listing = manners.listing or json.dumps({"object": "list", "data": data}).encode()
                self._send(200, listing, manners.trickles_s)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            manners.requests.append(body)
            manners.paths.append(self.path)
            manners.authorizations.append(self.headers.get("Authorization"))
            if manners.cuts_off_after is not None and len(manners.requests) > manners.cuts_off_after:
                self.close_connection = True
                return
            if not self._is_allowed():
                return
            time.sleep(manners.hangs_s)
            if manners.status != 200:
                self._send(manners.status, manners.error)
            elif manners.raw is not None:
                self._send(200, manners.raw)
            else:
                self._stream(body)

        def _stream(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            is_chat = "messages" in body
            for _ in range(manners.tokens):
                time.sleep(manners.seconds_per_token)
                choice = {"delta": {"content": manners.word}} if is_chat else {"text": manners.word}
                self._event({"choices": [{"index": 0, **choice}]})
            if body.get("return_spec_tokens_details"):
                details = {"spec_verify_ct": manners.verify_steps, "spec_num_correct_drafts": manners.accepted}
                self._event({"choices": [], "sglext": {"spec_tokens_details": details}})
            if manners.sends_usage:
                said = body["messages"][0]["content"] if is_chat else body["prompt"]
                prompt_tokens = len(said.split()) + manners.prompt_tokens
                self._event(
                    {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": manners.tokens}}
                )
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

        def _event(self, chunk: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()

        def _is_allowed(self) -> bool:
            is_allowed = manners.key is None or self.headers.get("Authorization") == f"Bearer {manners.key}"
            if not is_allowed:
                self._send(401, b'{"error": "who are you?"}')
            return is_allowed

        def _send(self, status: int, body: bytes, trickles_s: float = 0.0) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not trickles_s:
                self.wfile.write(body)
                return
            with contextlib.suppress(OSError):  # the client may have left
                for i in range(len(body)):
                    time.sleep(trickles_s)
                    self.wfile.write(body[i : i + 1])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
