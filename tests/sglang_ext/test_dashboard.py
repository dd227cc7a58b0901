"""docs/monitoring/grafana.json: Grafana's own library reads the whole of it, its queries parse, and where Prometheus is
installed, each gives numbers of a server that answers. Not checked: how Grafana draws them."""

import json
import math
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixture_models import DRAFTERS, prompt_texts
from policy_cases import ALWAYS, write_policy
from stock_server import SPECULATIVE, START_TIMEOUT_S, server_process, wait_until_healthy
from test_server import ROOT, stream

from rayspec.serving.process import free_port

DASHBOARD = ROOT / "docs" / "monitoring" / "grafana.json"
WINDOW_S = 20  # what Grafana would put for $__rate_interval


def queries() -> list[tuple[str, str]]:
    """(title of its panel, expression for Prometheus)."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
    return [(title, text.replace("$__rate_interval", f"{WINDOW_S}s")) for title, text in found]


def test_grafana_knows_every_field() -> None:
    """Its library, made of Grafana's schema, keeps of a dashboard what it knows: all of this one, and with the kind of
    value that it has. A field of another name is lost."""
    written = json.loads(DASHBOARD.read_text())
    assert list(unread(written, as_grafana_reads(written))) == []
    misnamed = json.loads(DASHBOARD.read_text().replace('"legendFormat"', '"legend_format"'))
    assert ".panels.0.targets.0.legend_format" in unread(misnamed, as_grafana_reads(misnamed))


def as_grafana_reads(dashboard: dict[str, Any]) -> Any:
    pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk (make install)")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))


def unread(written: Any, read: Any, path: str = "") -> Iterator[str]:
    """Paths of what was written and not read, or read as something else; defaults may come to it."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            yield from unread(value, read[key], f"{path}.{key}") if key in read else [f"{path}.{key}"]
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for i, pair in enumerate(zip(written, read, strict=True)):
            yield from unread(*pair, f"{path}.{i}")
    elif written != read:
        yield path


@pytest.mark.parametrize(("title", "query"), queries())
def test_a_query_parses(title: str, query: str) -> None:
    parser = pytest.importorskip("promql_parser", reason="needs promql-parser (make install)")
    assert parser.parse(query)
    with pytest.raises(ValueError, match=r"(?i)parse|unexpected|syntax|invalid|eof|found"):
        parser.parse(query + ")")


def test_a_position_is_counted_where_it_was_drafted() -> None:
    """Each position has the steps of its own below it: of those that drafted as far."""
    from prometheus_client import REGISTRY

    from sglang_ext.adapter.metrics import ServingMetrics

    counted = ServingMetrics()
    for requests, draft_steps in ((5, 0), (3, 2), (2, 4)):
        counted.stepped(requests, draft_steps)
    positions = [REGISTRY.get_sample_value("rayspec_drafted_total", {"position": str(i)}) for i in range(1, 6)]
    assert positions == [5, 5, 2, 2, None]
    (query,) = [query for title, query in queries() if title == "Accepted at each draft position"]
    above, below = query.split(" / ")
    assert above == f"sum by (position) (rate(rayspec_accepted_drafts_total[{WINDOW_S}s]))"
    assert below == above.replace("accepted_drafts", "drafted")


def test_tau_is_of_steps_that_drafted() -> None:
    (query,) = [query for title, query in queries() if title.startswith("tau")]
    told = (ROOT / "docs" / "operations.md").read_text().replace("\n", " ").replace("[W]", f"[{WINDOW_S}s]")
    assert f"`{query}`" in told


@pytest.mark.slow
def test_each_query_gives_numbers_of_a_server_that_answers(tmp_path: Path) -> None:
    """Under a policy that switches all the time, so that its counter is there, too."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs Prometheus (Debian package prometheus)")
    port, log = free_port(), tmp_path / "server.log"
    # drafts cost one request nearly nothing, and two far too much
    curves = [{"draft_steps": k, "requests": [1, 2], "step_ms": [10 + 0.1 * k, 12.0 + 60 * k]} for k in (0, 2, 4)]
    policy = write_policy(tmp_path / "policy.json", [0, 2, 4], **{**ALWAYS, "curves": curves})
    flags = ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "5"]
    flags += ["--speculative-draft-model-path", str(DRAFTERS["slimspec"]), "--speculative-adaptive-config", policy]
    with server_process(port, log, *SPECULATIVE, *flags, "--enable-metrics") as process:
        wait_until_healthy(process, port, log)
        with prometheus(program, port, tmp_path) as address, traffic(port):
            deadline = time.monotonic() + 8 * WINDOW_S
            asked = [q for q in queries() if "rayspec_rollover_events" not in q[1]]  # which --follow counts
            while (silent := [q for q in asked if not has_numbers(address, q[1])]) and time.monotonic() < deadline:
                time.sleep(2)
    assert silent == []


def has_numbers(address: str, query: str) -> bool:
    answer = httpx.get(f"{address}/api/v1/query", params={"query": query}, timeout=30, trust_env=False).json()
    assert answer["status"] == "success", f"{query}: {answer}"
    values = [float(series["value"][1]) for series in answer["data"]["result"]]
    return bool(values) and all(math.isfinite(value) for value in values)


@contextmanager
def prometheus(program: str, server_port: int, folder: Path) -> Iterator[str]:
    """Which asks the server every second; yields its address."""
    jobs = [{"job_name": "sglang", "static_configs": [{"targets": [f"127.0.0.1:{server_port}"]}]}]
    config: dict[str, Any] = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
    listens = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("w") as output:
        process = subprocess.Popen([*command, f"--web.listen-address={listens}"], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://{listens}/-/ready", timeout=5, trust_env=False).status_code == 200:
                    break
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield f"http://{listens}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextmanager
def traffic(port: int) -> Iterator[None]:
    """A client that streams all the time, and one that does now and then."""
    is_over = threading.Event()

    def ask(prompt: str, pause_s: float) -> None:
        while not is_over.wait(pause_s):
            stream(port, {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 48})

    threads = [threading.Thread(target=ask, args=told) for told in zip(prompt_texts(2), (0.0, 4.0), strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(120)
