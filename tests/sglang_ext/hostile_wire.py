"""What no HTTP library sends: requests as bytes, and the status that says what is wrong with each (200 where nothing
is). Asked of a server with a limit on bodies of 1 MiB."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from stock_server import tells_of_itself

TIMEOUT_S = 120
BODY = b'{"text": "import os", "sampling_params": {"temperature": 0, "max_new_tokens": 2}}'
LATIN = "schlüssel".encode("latin-1")  # as UTF-8 it cannot be read
OF_RAY = (b"x-request-id", b"x-request-timeout-seconds", b"x-request-disconnect-disabled", b"x-session-id")
OF_RAY += (b"serve_multiplexed_model_id", b"serve-multiplexed-model-id")
WEBSOCKET = (
    b"Connection: Upgrade",
    b"Upgrade: websocket",
    b"Sec-WebSocket-Version: 13",
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


class Wire(NamedTuple):
    name: str
    sent: bytes
    status: int


def head(*headers: bytes, line: bytes = b"POST /generate HTTP/1.1", host: bytes = b"x") -> bytes:
    lines = [line, b"Host: " + host, b"Content-Type: application/json", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def whole(*headers: bytes, body: bytes = BODY, host: bytes = b"x") -> bytes:
    return head(b"Connection: close", b"Content-Length: %d" % len(body), *headers, host=host) + body


def get(target: bytes, method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    return head(b"Connection: close", line=b"%s %s HTTP/%s" % (method, target, version))


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


def _headers() -> Iterator[Wire]:
    for name in OF_RAY:
        for value in (LATIN, b"", b"../../etc/passwd", b"1e300"):
            yield Wire(f"{name.decode()}_{value!r}", whole(name + b": " + value), 200)
    yield Wire("gives_up_at_once", whole(b"x-request-timeout-seconds: 0.001"), 200)
    yield Wire("a_request_id_twice", whole(b"x-request-id: a", b"x-request-id: b"), 200)
    for name in (b"traceparent", b"cookie", b"accept", b"origin", b"x-forwarded-for", b"x-smg-routing-key"):
        yield Wire(f"{name.decode()}_latin", whole(name + b": " + LATIN), 200)
    for host in (b"[", LATIN, b"", b"x:99999999", b"x:y", b"a@b", b"x/health?", b"http://[::1"):
        yield Wire(f"host_{host!r}", whole(host=host), 200)
    yield Wire("two_hosts", whole(b"Host: y"), 400)
    yield Wire("1000_headers", whole(*(b"x-%d: a" % i for i in range(1000))), 200)
    yield Wire("a_long_header", whole(b"x-a: " + b"a" * 300_000), 400)
    yield Wire("a_folded_header", whole(b"x-a: a\r\n b"), 200)
    yield Wire("a_header_without_colon", whole(b"nonsense"), 400)
    yield Wire("a_header_without_name", whole(b": a"), 400)
    yield Wire("a_header_with_nul", whole(b"x-a: a\0b"), 400)
    yield Wire("drops_the_key_on_the_way", whole(b"Connection: authorization"), 200)
    yield Wire("expects_what_nobody_knows", whole(b"Expect: a miracle"), 200)


def _targets() -> Iterator[Wire]:
    for target in (
        b"http://127.0.0.1:9/health",  # of another server
        b"//127.0.0.1:9//health",
        b"//health",
        b"//metrics",
        b"/a/../health",
        b"/./health",
        b"/%2e%2e/health",
        b"/..%2fhealth",
        b"/health;a",
        b"/%00",
        b"/%ff",
        b"/%zz",
        b"/health%0d%0aX-A:%20b",
        b"/" + b"/" * 7000,
        b"/" + b"a" * 60_000,
        b'/"<>^`{}|\\',
        b"*",
        b"health",
    ):
        yield Wire(f"target_{target[:30]!r}", get(target), 404)
    yield Wire("a_very_long_target", get(b"/" + b"a" * 300_000), 400)
    yield Wire("a_long_query", get(b"/health?" + b"a=%zz&" * 9000), 200)
    yield Wire("a_target_of_bytes", get(b"/\xff\xfe"), 400)


def _methods() -> Iterator[Wire]:
    for method in (b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"PATCH", b"FOO", b"M" * 5000, b"generate"):
        yield Wire(f"method_{method[:10].decode()}", get(b"/generate", method), 405)
    yield Wire("a_method_of_small_letters", get(b"/health", b"get"), 405)
    yield Wire("old_http", get(b"/health", version=b"1.0"), 200)
    yield Wire("oldest_http", b"GET /health\r\n\r\n", 400)
    yield Wire("new_http", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 405)
    yield Wire("tls", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300), 400)
    yield Wire("websocket", head(*WEBSOCKET, line=b"GET /nobody HTTP/1.1"), 403)
    yield Wire("half_a_websocket", head(*WEBSOCKET[:2], line=b"GET /nobody HTTP/1.1"), 400)


def _bodies() -> Iterator[Wire]:
    chunked = b"Transfer-Encoding: chunked"
    close = b"Connection: close"
    yield Wire("chunks", head(close, chunked) + chunks(BODY[:9], BODY[9:]), 200)
    yield Wire("chunks_and_a_length", head(close, chunked, b"Content-Length: 5") + chunks(BODY), 200)
    yield Wire("chunks_that_are_none", head(close, chunked) + b"zz\r\nabc\r\n0\r\n\r\n", 400)
    yield Wire("chunks_that_end_badly", head(close, chunked) + b"5\r\nabcde\r\nxyz\r\n", 400)
    yield Wire("chunks_of_negative_size", head(close, chunked) + b"-5\r\nabc\r\n0\r\n\r\n", 400)
    yield Wire("chunks_of_gzip", head(close, b"Transfer-Encoding: gzip, chunked") + chunks(BODY), 400)
    yield Wire("chunks_over_the_limit", head(close, chunked) + chunks(*(20 * [bytes(2**16)])), 413)
    same = b"Content-Length: %d" % len(BODY)
    yield Wire("a_length_twice", head(close, same, same) + BODY, 200)
    yield Wire("two_lengths", head(close, same, b"Content-Length: 5") + BODY, 400)
    for length in (b"-1", b"+5", b"abc", b"9" * 1000):
        yield Wire(f"a_length_of_{length[:5].decode()}", head(close, b"Content-Length: " + length) + BODY, 400)
    yield Wire("announces_too_much", head(close, b"Content-Length: 2000000"), 413)
    yield Wire("announces_far_too_much", head(close, b"Content-Length: 99999999999999999999"), 413)
    yield Wire("a_part_of_the_body", head(close, b"Content-Length: 5") + BODY, 400)
    for name, body in {
        "of_bytes": b"\xff\xfe",
        "of_nothing": b"",
        "with_a_mark": b"\xef\xbb\xbf" + BODY,
        "in_utf_16": BODY.decode().encode("utf-16"),
        "with_half_a_character": b'{"text": "\\ud800"}',
        "with_a_long_number": b'{"text": "a", "priority": ' + b"9" * 6000 + b"}",
        "with_more_behind": BODY + b"x",
    }.items():
        yield Wire(f"a_body_{name}", whole(body=body), 400)
    yield Wire("a_body_over_the_limit", whole(body=b'{"text": "' + b"x" * 2**20 + b'"}'), 413)
    yield Wire("another_type", whole().replace(b"application/json", b"multipart/form-data; boundary=x"), 400)


WIRES: tuple[Wire, ...] = (*_headers(), *_targets(), *_methods(), *_bodies())


def answer(port: int, sent: bytes) -> tuple[int | None, str]:
    """(status, all that is answered); None where the server closes before it has read what it does not want."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as line, suppress(ConnectionError):
        line.sendall(sent)
        while part := line.recv(2**16):
            received += part
    return int(received.split(b" ", 2)[1]) if received else None, received.decode("latin-1")


def answered_instead(port: int, wire: Wire) -> str | None:
    """None, or what was said instead."""
    status, text = answer(port, wire.sent)
    fits = status == wire.status or (status is None and wire.status in (400, 413))
    return None if fits and (status == 200 or not tells_of_itself(text)) else f"{wire.name}: {text[:500]}"
