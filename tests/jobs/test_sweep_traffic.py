"""A sweep of conversations of two turns, closed and open loop, that measures until its intervals are narrow or the
passes are spent: real Ray, real SGLang, a real MLflow store."""

import json

import pytest
from fixture_models import DRAFTERS, TARGET, drafters_setting
from test_sweep import Sweep, sweep

from rayspec.sweep.record.metric_names import metric_name

CONVERSATIONS = 5
PASSES = 2


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    folder = tmp_path_factory.mktemp("traffic")
    records = [
        {"id": i, "category": "ab"[i % 2], "turns": [f"def area_{i}(width):\n", f"def volume_{i}(depth):\n"]}
        for i in range(CONVERSATIONS)
    ]
    (folder / "two.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    process = sweep(
        folder / "home",
        *(
            f"target={TARGET}",
            drafters_setting(DRAFTERS["full"]),
            "draft_steps=[2]",
            "concurrency=[2]",
            "request_rate=[20.0]",
            "head_latency=false",
        ),
        *(f"workload={folder}/two.jsonl", "block_prompts=1", "max_new_tokens=16", "engine.max_total_tokens=8192"),
        *("stop.ci_width=1e-9", f"stop.max_repeats={PASSES}", "slo.ttft_ms=1e6", "slo.tpot_ms=1e6"),
    )
    return Sweep(process, folder / "home")


TRIALS = ["plain-c2", "full-s2-c2", "plain-r20", "full-s2-r20"]


def test_every_turn_of_every_pass_is_answered(finished: Sweep) -> None:
    assert finished.process.returncode == 0, finished.process.stderr
    assert set(finished.children) == set(TRIALS)
    for child in finished.children.values():
        lines = finished.artifact(child, "requests.jsonl").read_text().splitlines()
        turns = [(r["prompt_id"], r["turn"]) for r in map(json.loads, lines)]
        assert len(turns) == PASSES * 2 * CONVERSATIONS
        assert set(turns) == {(str(i), t) for i in range(CONVERSATIONS) for t in (0, 1)}


def test_a_second_turn_s_prompt_holds_the_first_answer(finished: Sweep) -> None:
    lines = finished.artifact(finished.children["full-s2-c2"], "requests.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for first, second in zip(records[::2], records[1::2], strict=True):
        assert (first["turn"], second["turn"]) == (0, 1)
        assert second["prompt_tokens"] >= first["prompt_tokens"] + len(first["output_ids"]) - 1
        assert second["cached_tokens"] > 0  # the engine has seen what it begins with


def metrics_of(finished: Sweep, name: str) -> dict[str | None, float]:
    return {metric_name(key): value for key, value in finished.children[name].data.metrics.items()}


@pytest.mark.parametrize("name", TRIALS)
def test_metrics_of_each_traffic(finished: Sweep, name: str) -> None:
    metrics = metrics_of(finished, name)
    wanted = {"goodput_share", "goodput_requests_per_s", "requests_per_s", "gflops_per_token", "ttft_ms_p99"}
    if name.startswith("full"):
        wanted |= {"mbsu", "tau", "speedup_vs_plain_ci_low", "output_mismatches"}
    assert wanted <= set(metrics)
    assert metrics["goodput_share"] == 1
    assert metrics["requests"] == PASSES * 2 * CONVERSATIONS
    assert 0.05 < metrics["peak_host_memory_gib"] < 64
    if name.startswith("full"):
        assert metrics["output_mismatches"] == 0
        assert metrics["mbsu"] < metrics["tau"]
        assert {"tau_category/a", "tau_category/b"} <= set(finished.children[name].data.metrics)
        plain = metrics_of(finished, name.replace("full-s2", "plain"))
        assert metrics["gflops_per_token"] > plain["gflops_per_token"]  # rejected drafts cost work
