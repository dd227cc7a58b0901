"""From a sweep in a real MLflow store to its report, and its winner to the registry."""

import base64
import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from published import CAUSE, COMMAND, download_champion, publish
from synthetic import SyntheticSweep, few_trials

from rayspec.records import RequestRecord
from rayspec.report.categories import category_speedups
from rayspec.report.decision import decision
from rayspec.report.html import to_html
from rayspec.report.page import write_report
from rayspec.report.promote import PromotionRefused, promote, winner
from rayspec.sweep.record.metric_names import metric_key, metric_name
from rayspec.sweep.record.stored import StoredSweep, find_sweep
from rayspec.tracking import Tracker
from sglang_ext.drafters.checkpoint import load_drafter


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Tracker:
    store = tmp_path_factory.mktemp("store")
    return Tracker(f"sqlite:///{store}/mlflow.db", "tests", (store / "artifacts").as_uri())


@pytest.fixture(scope="module")
def stored(tracker: Tracker, synthetic_sweep: SyntheticSweep) -> StoredSweep:
    return find_sweep(tracker.client, publish(tracker, synthetic_sweep))


@pytest.fixture(scope="module")
def report(stored: StoredSweep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_report(stored, folder)
    return folder


def test_every_metric_of_every_trial_comes_back(stored: StoredSweep, synthetic_sweep: SyntheticSweep) -> None:
    back = {r.trial.name: r for r in stored.results}
    assert len(back) == 19
    for result in synthetic_sweep.results:
        assert back[result.trial.name].metrics == pytest.approx(dict(result.metrics))
        assert back[result.trial.name].is_baseline == result.is_baseline
    assert back["broken-s2-c1"].error == CAUSE


def test_a_sweep_is_found_by_id_by_name_and_as_the_newest(tracker: Tracker, stored: StoredSweep) -> None:
    for wanted in (None, stored.run_id, "sweep"):
        assert find_sweep(tracker.client, wanted).run_id == stored.run_id
    with pytest.raises(ValueError, match=rf"is 'swep'; sweeps there, newest first: sweep \({stored.run_id}\)"):
        find_sweep(tracker.client, "swep")


def test_names_suit_the_comparison_page(stored: StoredSweep) -> None:
    """It sorts the names and draws the first: three parameters that differ, and a metric that all trials have."""
    runs = [stored.client.get_run(id_).data for trial, id_ in stored.run_ids.items() if trial.label != "broken"]
    names = sorted({name for run in runs for name in run.params})
    differing = [name for name in names if len({run.params.get(name) for run in runs}) > 1]
    assert differing[:3] == ["concurrency", "draft_steps", "head"]
    assert names[0] == "concurrency"
    assert min(name for run in runs for name in run.metrics) == "output_tokens_per_s"
    assert all("output_tokens_per_s" in run.metrics for run in runs)


def test_metric_names_go_there_and_back(synthetic_sweep: SyntheticSweep) -> None:
    for name in {name for r in synthetic_sweep.results for name in r.metrics}:
        assert metric_name(metric_key(name)) == name
    assert metric_name("per_block/tau") is None
    assert metric_name("system/host/cpu_utilization_percentage") is None


def test_runs_carry_dataset_parameters_tags_and_command(stored: StoredSweep) -> None:
    client = stored.client
    (child_id,) = (id_ for trial, id_ in stored.run_ids.items() if trial.name == "slimspec-r64-s4-c4")
    for run in (stored.parent, client.get_run(child_id)):
        (entry,) = run.inputs.dataset_inputs
        assert entry.dataset.name == "chat:32"
        assert json.loads(entry.dataset.profile)["num_rows"] == 32
        assert [(t.key, t.value) for t in entry.tags] == [("mlflow.data.context", "eval")]
        assert run.data.params["sweep.workload"] == "chat:32"
        assert run.data.tags["mlflow.source.git.commit"] == run.data.tags["git.commit"]
        for tag in ("host.gpu", "version.sglang", "version.mlflow"):
            assert run.data.tags[tag]
    child = client.get_run(child_id)
    assert {k: child.data.params[k] for k in ("concurrency", "draft_steps", "head", "head.rank")} == {
        "concurrency": "4",
        "draft_steps": "4",
        "head": "slims…-r64",
        "head.rank": "64",
    }
    assert child.data.tags["head"] == "slimspec-r64"
    assert Path(client.download_artifacts(stored.run_id, "command.txt")).read_text() == COMMAND + "\n"
    assert stored.tags["decision"] == decision(stored.results)


def test_the_decision_is_the_first_line(report: Path, stored: StoredSweep) -> None:
    first = (report / "report.md").read_text().splitlines()[0]
    assert first == f"**{decision(stored.results)}**"
    assert "over plain decoding at 1 stream" in first


def test_parent_and_trials_say_what_came_of_them(stored: StoredSweep) -> None:
    best = max((r for r in stored.results if r.speedup("plain")), key=lambda r: r.metrics["speedup_vs_plain"])
    found = stored.parent.data.metrics
    assert {k: found[f"best_{k}"] for k in ("speedup_vs_plain", "speedup_vs_plain_ci_low", "tau")} == {
        k: best.metrics[k] for k in ("speedup_vs_plain", "speedup_vs_plain_ci_low", "tau")
    }
    note = stored.tags["mlflow.note.content"]
    assert note.startswith(decision(stored.results))
    assert "- 4 streams: speculation pays." in note
    run = stored.client.get_run(stored.run_ids[best.trial])
    assert re.fullmatch(
        r"\d+\.\d tokens/s, tau \d\.\d\d, \S+x \[.*\] of plain decoding, \S+x \[.*\] of the baseline full\.",
        run.data.tags["mlflow.note.content"],
    )


def test_names_of_heads_are_told_apart_where_mlflow_cuts_them(stored: StoredSweep) -> None:
    shown = {t.label: stored.client.get_run(id_).data.params["head"] for t, id_ in stored.run_ids.items()}
    assert shown == {
        "plain": "plain",
        "full": "full",
        "slimspec-r128": "slims…r128",
        "slimspec-r64": "slims…-r64",
        "slimspec-r32": "slims…-r32",
        "broken": "broken",
    }
    assert {r.trial.label for r in stored.results} == set(shown)


def test_the_report_shows_trials_failures_and_provenance(report: Path, stored: StoredSweep) -> None:
    text = (report / "report.md").read_text()
    for name in ("speedup", "pareto", "speedup_by_category", "head_tradeoff", "prediction", "acceptance"):
        assert f"(figures/{name}.svg)" in text
    for link in re.findall(r"\]\((figures/[^)]+)\)", text):
        assert (report / link).is_file()
    trials = text[text.index("## All trials") : text.index("## What a user waits for")]
    assert sum(line.startswith(("| full ", "| slimspec", "| plain", "| broken")) for line in trials.splitlines()) == 19
    assert "broken-s2-c1: `drafter /broken does not fit" in text
    assert re.search(r"Prediction error .*: \d+\.\d% on average of absolute values over 12 trials", text)
    assert text.count("python -m sglang.launch_server --model-path ") == 1  # one setting for both loads
    assert re.search(r"\| drafter .* \| TTFT p50 ms \| .* \| TPOT p99 ms \|", text)
    assert "concurrency 1" not in text.split("## Provenance")[0]
    for item in (
        COMMAND,
        stored.tags["git.commit"],
        stored.run_id,
        "digest",
        "sglang 0.5.23",
        "draft_steps:\n- 2\n- 4",
    ):
        assert item in text


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_else(report: Path) -> None:
    page = Page((report / "report.html").read_text())
    assert page.tags.count("img") == (report / "report.md").read_text().count("](figures/")
    assert page.tags.count("table") == 3
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)
    assert "script" not in page.tags  # the one in a trial's cause stays text
    assert "link" not in page.tags


def test_images_of_a_page_are_its_own_figures_alone(tmp_path: Path) -> None:
    """The text holds names that others chose."""
    for name in ("own.svg", "other.svg"):
        (tmp_path / name).write_text(f"<svg>{name}</svg>")
    outside = tmp_path.parent / "outside.png"
    outside.write_bytes(b"secret")
    text = f"![own](own.svg) ![a](other.svg) ![b](../{outside.name}) ![c]({outside}) ![d](http://127.0.0.1/x.png)"
    page = Page(to_html(text, "t", tmp_path, {"own.svg"}))
    assert page.addresses == [f"data:image/svg+xml;base64,{base64.b64encode(b'<svg>own.svg</svg>').decode()}"]


def test_token_ids_are_left_out_where_asked(tracker: Tracker, synthetic_sweep: SyntheticSweep, tmp_path: Path) -> None:
    """And nothing of the report is lost by that."""
    few = {t: blocks for t, blocks in few_trials(synthetic_sweep).blocks.items() if t.label != "full"}
    results = [r for r in synthetic_sweep.results if r.trial in few]
    silent = dataclasses.replace(
        synthetic_sweep,
        blocks=few,
        results=results,
        config=dataclasses.replace(synthetic_sweep.config, keep_output_ids=False, name="silent"),
    )
    stored = find_sweep(tracker.client, publish(tracker, silent))
    trials = [r.trial for r in stored.results if r.error is None]
    for trial in trials:
        for line in stored.requests(trial):
            assert "output_ids" not in line
            assert line["output_tokens"] > 1
    write_report(stored, tmp_path)
    own, plain = (
        [b for t in few if t.label != "plain" for b in few[t]][:8],
        next(few[t] for t in few if t.label == "plain"),
    )
    kept = [
        [{"block": b.index, **dataclasses.asdict(r)} for b in blocks for r in b.requests] for blocks in (own, plain)
    ]
    left = [[{k: v for k, v in line.items() if k != "output_ids"} | {"output_tokens": len(line["output_ids"])}
             for line in lines] for lines in kept]  # fmt: skip
    assert category_speedups(*left) == category_speedups(*kept) != {}


def test_category_speedups_by_hand(make_request: Callable[..., RequestRecord]) -> None:
    def lines(*requests: RequestRecord, block: int) -> list[dict[str, object]]:
        return [{"block": block, **dataclasses.asdict(r)} for r in requests]

    fast, slow = make_request("a", (0, 31), 0.01), make_request("b", (2,), 0.5, category="chat")
    own = lines(fast, slow, block=0)
    plain = lines(make_request("a", (), 0.01), make_request("b", (), 0.01, category="chat"), block=0)
    other_pass = lines(make_request("a", (), 9.0), block=1)  # no partner: not counted
    found = category_speedups(own, [*plain, *other_pass])
    plain_speed = 32 / (0.01 + 31 * 0.01)
    assert found["python"].value == pytest.approx((63 / (0.01 + 31 * 0.01)) / plain_speed)
    assert found["chat"].value == pytest.approx((3 / (0.01 + 2 * 0.5)) / plain_speed)


def test_the_champion_comes_back_complete(tracker: Tracker, stored: StoredSweep, report: Path, tmp_path: Path) -> None:
    best = winner(stored.results)
    done = promote(stored, report, best)
    assert (done.model, done.uri) == ("drafter-smollm2-135m", "models:/drafter-smollm2-135m@champion")
    folder = download_champion(tracker.client, "drafter-smollm2-135m", tmp_path)
    assert best.trial.candidate is not None
    loaded, measured = (load_drafter(path)[0].state_dict() for path in (folder, best.trial.candidate.path))
    assert loaded.keys() == measured.keys()
    assert all(torch.equal(loaded[name], measured[name]) for name in loaded)

    version = tracker.client.get_model_version_by_alias("drafter-smollm2-135m", "champion")
    assert version.tags["sweep_run_id"] == stored.run_id
    assert version.tags["clearly_faster_than_plain"] == "yes"
    assert float(version.tags["speedup_vs_plain_ci_low"]) > 1
    assert decision(stored.results) in version.description
    assert version.tags["report"] == f"runs:/{stored.run_id}/report/report.html"
    page = tracker.client.download_artifacts(stored.run_id, "report/report.html")
    assert Path(page).read_bytes() == (report / "report.html").read_bytes()

    again = promote(stored, report, best)
    assert again.version == str(int(done.version) + 1)


def test_no_promotion_without_a_clear_gain(stored: StoredSweep) -> None:
    slow = [
        dataclasses.replace(r, metrics={**r.metrics, "speedup_vs_plain_ci_low": 0.9})
        for r in stored.results
        if r.speedup("plain")
    ]
    with pytest.raises(PromotionRefused, match=r"no candidate is clearly faster .* at 1 and 4 streams .*--force"):
        winner(slow)
    assert winner(slow, force=True).metrics["speedup_vs_plain"] == max(r.metrics["speedup_vs_plain"] for r in slow)
    with pytest.raises(PromotionRefused, match="Nothing was measured"):
        winner([], force=True)
    with pytest.raises(ValueError, match=r"--traffic must be one that the sweep measured \(c1, c4\), got 'c8'"):
        winner(stored.results, traffic="c8")


def test_a_drafter_that_has_changed_is_not_promoted(
    tracker: Tracker, synthetic_sweep: SyntheticSweep, report: Path, tmp_path: Path
) -> None:
    few = few_trials(synthetic_sweep)
    best = winner(few.results)
    assert best.trial.candidate is not None
    copy = dataclasses.replace(best.trial.candidate, path=str(tmp_path / best.trial.label))
    shutil.copytree(best.trial.candidate.path, copy.path)
    moved = {
        dataclasses.replace(t, candidate=copy) if t.candidate == best.trial.candidate else t: blocks
        for t, blocks in few.blocks.items()
    }
    results = [
        dataclasses.replace(r, trial=dataclasses.replace(r.trial, candidate=copy))
        if r.trial.candidate == best.trial.candidate
        else r
        for r in few.results
    ]
    sweep = dataclasses.replace(few, blocks=moved, results=results)
    stored = find_sweep(tracker.client, publish(tracker, sweep))
    with (tmp_path / best.trial.label / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match=r"is not the one that trial .* measured"):
        promote(stored, report, winner(stored.results))


def test_a_drafter_of_symbolic_links_is_not_promoted(stored: StoredSweep, report: Path, tmp_path: Path) -> None:
    """What they point at may be anything."""
    best = winner(stored.results)
    assert best.trial.candidate is not None
    path = tmp_path / best.trial.label
    shutil.copytree(best.trial.candidate.path, path)
    (tmp_path / "secret").write_text("correct-horse")
    (path / "notes.txt").symlink_to(tmp_path / "secret")
    trial = dataclasses.replace(best.trial, candidate=dataclasses.replace(best.trial.candidate, path=str(path)))
    linked = dataclasses.replace(stored, run_ids={**stored.run_ids, trial: stored.run_ids[best.trial]})
    run_id, before = stored.run_ids[best.trial], len(stored.client.search_model_versions())
    artifacts = {f.path for f in stored.client.list_artifacts(run_id)}
    with pytest.raises(ValueError, match=r"notes.txt in it are symbolic links, .*cp -rL"):
        promote(linked, report, dataclasses.replace(best, trial=trial))
    assert {f.path for f in stored.client.list_artifacts(run_id)} == artifacts
    assert len(stored.client.search_model_versions()) == before
