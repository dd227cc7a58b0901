"""MLflow's notices that an alias has moved: a real server sends them, and nobody else can."""

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow import MlflowClient
from rollover_cases import FakeStage
from servers import mlflow_server
from versions import champion

from rayspec.serving.alias import MlflowRegistry
from rayspec.serving.events import Events, Standing
from rayspec.serving.process import free_port
from rayspec.serving.rollover import Rollover, RolloverSettings
from rayspec.serving.webhook import MAX_BODY_BYTES, Notices, Unsigned, WebhookSettings, receiving, signature

SECRET = "correct-horse-battery-staple"
MODEL, ALIAS = "drafter", "champion"
NOW = 1_800_000_000.0


def notice(entity: str = "model_version_alias", action: str = "created", **data: str) -> bytes:
    about = {"name": MODEL, "alias": ALIAS, "version": "2"} | data
    return json.dumps({"entity": entity, "action": action, "data": about}).encode()


def signed(body: bytes, *, secret: str = SECRET, delivery: str = "a", sent: float = NOW) -> dict[str, str]:
    at = str(int(sent))
    return {
        "X-MLflow-Delivery-Id": delivery,
        "X-MLflow-Timestamp": at,
        "X-MLflow-Signature": signature(secret.encode(), delivery, at, body),
    }


@pytest.fixture
def notices() -> Notices:
    return Notices(SECRET, MODEL, ALIAS, clock=lambda: NOW)


def test_the_signature_is_mlflows() -> None:
    from mlflow.webhooks.delivery import _generate_hmac_signature

    body = notice()
    assert signature(SECRET.encode(), "id", "17", body) == _generate_hmac_signature(SECRET, "id", "17", body.decode())


def test_a_notice_about_the_alias_is_news_once(notices: Notices) -> None:
    body = notice()
    assert notices.is_news(signed(body), body)
    assert not notices.is_news(signed(body), body), "the same again, by MLflow or by who has listened"
    assert notices.is_news(signed(body, delivery="b"), body)


@pytest.mark.parametrize(
    "body",
    [notice(name="another"), notice(alias="candidate"), notice(action="deleted"), notice("model_version_tag", "set")],
    ids=["model", "alias", "deleted", "tag"],
)
def test_other_events_are_taken_and_are_no_news(body: bytes, notices: Notices) -> None:
    assert not notices.is_news(signed(body), body)


def changed(headers: dict[str, str], **values: str) -> dict[str, str]:
    return headers | {f"X-MLflow-{name.replace('_', '-')}": value for name, value in values.items()}


BAD: dict[str, tuple[Callable[[bytes], tuple[dict[str, str], bytes]], str]] = {
    "another secret": (lambda b: (signed(b, secret="x" * 20), b), "signature"),
    "no headers": (lambda b: ({}, b), "signature"),
    "another body": (lambda b: (signed(b), b + b" "), "signature"),
    "another time": (lambda b: (changed(signed(b), Timestamp=str(int(NOW) + 1)), b), "signature"),
    "another id": (lambda b: (changed(signed(b), Delivery_Id="z"), b), "signature"),
    "a cut signature": (lambda b: (changed(signed(b), Signature=signed(b)["X-MLflow-Signature"][:-2]), b), "signature"),
    "odd characters": (lambda b: (changed(signed(b), Signature="v1,é"), b), "signature"),
    "too old": (lambda b: (signed(b, sent=NOW - 301), b), "of the last 300 s"),
    "of the future": (lambda b: (signed(b, sent=NOW + 301), b), "of the last 300 s"),
    "no JSON": (lambda b: (signed(b"x"), b"x"), "no notice of MLflow"),
    "a list": (lambda b: (signed(b"[]"), b"[]"), "no notice of MLflow"),
    "too deep": (lambda b: (signed(b"[" * 60_000), b"[" * 60_000), "no notice of MLflow"),
    "data that is text": (
        lambda b: (signed(b'{"entity": "model_version_alias", "action": "created", "data": "x"}'),
                   b'{"entity": "model_version_alias", "action": "created", "data": "x"}'),
        "no notice of MLflow",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_mlflow_did_not_send_now_is_refused(case: str, notices: Notices) -> None:
    make, message = BAD[case]
    with pytest.raises(Unsigned, match=message):
        notices.is_news(*make(notice()))
    assert notices.is_news(signed(notice(), delivery="true"), notice()), "the true one is taken all the same"


def test_ids_are_kept_no_longer_than_they_could_do_harm() -> None:
    now = [NOW]
    notices = Notices(SECRET, MODEL, ALIAS, clock=lambda: now[0])
    for n in range(20):
        now[0] = NOW + 100 * n
        body = notice()
        assert notices.is_news(signed(body, delivery=str(n), sent=now[0]), body)
    assert len(notices._taken) == 7


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": 0}, "--webhook-port must be in 1..65535, got 0"),
        ({"host": ""}, "--webhook-host must be an address of this machine"),
        ({"secret": "short"}, "RAYSPEC_WEBHOOK_SECRET, of at least 16 characters"),
    ],
)
def test_settings_that_make_no_sense(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        WebhookSettings(**{"host": "127.0.0.1", "port": 1, "secret": SECRET} | values)
    assert SECRET not in str(error.value)


def test_an_address_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = WebhookSettings(host="127.0.0.1", port=other.getsockname()[1], secret=SECRET)
        with (
            pytest.raises(ValueError, match="name an address of this machine and a port"),
            receiving(settings, ("a", "b")),
        ):
            pass


def test_what_strangers_send_wakes_nobody(caplog: pytest.LogCaptureFixture) -> None:
    settings = WebhookSettings(host="127.0.0.1", port=free_port(), secret=SECRET)
    with receiving(settings, (MODEL, ALIAS)) as wait, httpx.Client(trust_env=False, timeout=30) as client:
        for body in (notice(), b"x" * (MAX_BODY_BYTES + 1)):
            answer = client.post(
                settings.address, content=body, headers=signed(body, secret="x" * 20, sent=time.time())
            )
            assert answer.status_code == (401 if len(body) < MAX_BODY_BYTES else 413)
        with socket.create_connection((settings.host, settings.port)) as line:  # says that more will come, and leaves
            line.sendall(b"POST /webhook HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert client.get(settings.address).status_code == 405
        assert client.post(settings.address.replace("/webhook", "/generate")).status_code == 404
        begin = time.monotonic()
        wait(0.3)
        assert time.monotonic() - begin >= 0.29
        body = notice()
        assert client.post(settings.address, content=body, headers=signed(body, sent=time.time())).json()["is_news"]
        wait(60)  # which the notice ends
        assert time.monotonic() - begin < 30
    assert "Traceback" not in caplog.text
    with socket.create_server(("127.0.0.1", settings.port)):
        pass  # the port is free again


@pytest.mark.slow
def test_a_moved_alias_is_found_at_once(tmp_path: Path) -> None:
    """MLflow's own server, its own delivery; the next poll would be in an hour."""
    store = f"sqlite:///{tmp_path}/mlflow.db"
    allowed = {"MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https", "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true"}
    settings = WebhookSettings(host="127.0.0.1", port=free_port(), secret=SECRET)
    with mlflow_server(store, tmp_path, **allowed) as address, receiving(settings, (MODEL, ALIAS)) as wait:
        client = MlflowClient(address)
        client.create_registered_model(MODEL)
        for _ in range(2):
            MlflowClient(store).create_model_version(MODEL, tmp_path.as_uri())  # the server takes no such folder
        client.set_registered_model_alias(MODEL, ALIAS, "1")
        hook = client.create_webhook("rayspec", settings.address, ["model_version_alias.created"], secret=SECRET)
        result = client.test_webhook(hook.webhook_id)
        assert (result.success, result.response_status) == (True, 200), result
        events = Events(client, (MODEL, ALIAS), client.create_experiment("x"), Standing(kept="1"))
        stage = FakeStage()
        rollover = Rollover(
            champion("1"), "1", MlflowRegistry(client, MODEL, ALIAS), stage, events,
            RolloverSettings(poll_s=3600, watch_s=0),
        )  # fmt: skip
        looks = threading.Semaphore(0)

        class Over(Exception):
            pass

        def run() -> None:
            def until(seconds: float) -> None:
                looks.release()
                if stage.put:
                    raise Over
                wait(seconds)

            with pytest.raises(Over):
                rollover.run(until)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert looks.acquire(timeout=120), "it has looked once, and waits"
        # MLflow's server remembers for up to a minute that nobody wanted to be told
        deadline = time.monotonic() + 150
        while not stage.put and time.monotonic() < deadline:
            client.set_registered_model_alias(MODEL, ALIAS, "2")
            thread.join(5)
        assert stage.put == ["2"]
        assert [e.event for e in events.events] == ["found", "canary_passed", "swapped", "kept"]
        events.end()
