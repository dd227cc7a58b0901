"""docs/monitoring/alerts.yaml: each alert parses, asks for what the dashboard or the ingress shows, is silent over a
good day and tells of what it is for. The last needs Prometheus' promtool.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

MONITORING = Path(__file__).parents[2] / "docs" / "monitoring"
RULES = {rule["alert"]: rule for rule in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]}
DAY, HOUR = 1500, 60  # minutes: of good ones, and of bad ones behind them
LATENCY = "sglang_inter_token_latency_seconds_bucket"

# {alert: {series: (its course over good minutes, over bad ones)}}, as promtool writes them
COURSES = {
    "RayspecServerDown": {'up{job="rayspec", instance="a"}': ("1x1500", "0x60")},
    "RayspecRollover": {'rayspec_rollover_events_total{event="refused"}': ("0x1500", "1x60")},
    "RayspecFollowGone": {'rayspec_rollover_events_total{event="kept"}': ("1x1500", "_x60")},
    "RayspecAcceptanceFell": {  # a policy drafts twice, then once from minute 600 on, which is no fall
        'rayspec_drafted_total{position="1"}': ("0+100x1500", "150000+100x60"),
        'rayspec_drafted_total{position="2"}': ("0+100x600 60000+0x899", "60000+0x60"),
        'rayspec_accepted_drafts_total{position="1"}': ("0+60x1500", "90000+30x60"),
        'rayspec_accepted_drafts_total{position="2"}': ("0+30x600 18000+0x899", "18000+0x60"),
    },
    "RayspecTokensSlow": {
        f'{LATENCY}{{le="0.1"}}': ("0+100x1500", "150000+0x60"),
        f'{LATENCY}{{le="1"}}': ("0+100x1500", "150000+100x60"),
        f'{LATENCY}{{le="+Inf"}}': ("0+100x1500", "150000+100x60"),
    },
    "RayspecCacheFull": {"sglang_token_usage": ("0.5x1500", "0.99x60"), "sglang_num_queue_reqs": ("3x1500", "3x60")},
}


def test_each_alert_is_tried_here() -> None:
    assert set(COURSES) == set(RULES)


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_asks_for_what_is_shown(alert: str) -> None:
    parser = pytest.importorskip("promql_parser", reason="needs promql-parser (make install)")
    asked = RULES[alert]["expr"]
    assert parser.parse(asked)
    dashboard = json.dumps(json.loads((MONITORING / "grafana.json").read_text()))
    shown = {"up", "rayspec_rollover_events_total"} | set(re.findall(r"rayspec_\w+|(?<=\[:_\])\w+", dashboard))
    assert set(re.findall(r"\bup\b|rayspec_\w+_total|(?<=\[:_\])\w+", asked)) <= shown


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_tells_of_what_it_is_for_and_of_nothing_before(alert: str, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool (Debian package prometheus)")
    series = [{"series": name, "values": " ".join(course)} for name, course in COURSES[alert].items()]
    when = {"interval": "1m", "input_series": series}
    silent = [{"alertname": alert, "eval_time": f"{minute}m", "exp_alerts": []} for minute in range(60, DAY, 60)]
    assert said(promtool, tmp_path, {**when, "alert_rule_test": silent}) == "SUCCESS"
    bad = DAY + (5 if "for" not in RULES[alert] else HOUR - 10)
    told = said(promtool, tmp_path, {**when, "alert_rule_test": [{**silent[0], "eval_time": f"{bad}m"}]})
    assert f'alertname="{alert}"' in told


def said(promtool: str, folder: Path, test: dict) -> str:
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(MONITORING / "alerts.yaml")], "tests": [test]}))
    ended = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    return "SUCCESS" if ended.returncode == 0 else ended.stderr + ended.stdout
