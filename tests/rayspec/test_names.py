"""Names of users' things on their way into MLflow, the figures and back."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
from mlflow.utils.validation import _validate_metric
from published import publish
from synthetic import SyntheticSweep

from rayspec.metrics import category_key
from rayspec.names import NAME_LIMIT, safe_name, short_names
from rayspec.report import figures
from rayspec.report.figures import write_figures
from rayspec.report.page import write_report
from rayspec.sweep.record.results import TrialResult, score
from rayspec.sweep.record.stored import find_sweep
from rayspec.tracking import Tracker
from rayspec.workloads.records import read_records

ODD = [
    "//b",
    "../x",
    ".",
    "..",
    "a//b",
    "/a",
    "a/",
    "$$",
    "$x",
    r"a\frac",
    "a?b",
    "a:b",
    "中文",
    "हिन्दी",
    "x" * 300,
    "%s {}",
]


@pytest.mark.parametrize("name", [*ODD, "", " ", "a/b", "math & logic", "\ud800", "\0"])
def test_mlflow_takes_every_name(name: str) -> None:
    _validate_metric(category_key(name), 1.0, 0, 0)
    assert len(category_key(name)) < 250


def test_names_stay_apart_and_usual_ones_as_they_are() -> None:
    for name in ("python", "math/algebra", "multi-turn chat", "v1.5", "中文"):
        assert safe_name(name) == name
    assert len({safe_name(name) for name in ODD}) == len(ODD)
    assert safe_name("a?b").startswith("a_b-")
    assert len(safe_name("x" * 300)) == NAME_LIMIT


def test_short_names_are_told_apart() -> None:
    assert short_names(["plain", "full", "slimspec-r64", "slimspec-r32"]) == {
        "plain": "plain",
        "full": "full",
        "slimspec-r64": "slims…-r64",
        "slimspec-r32": "slims…-r32",
    }
    alike = [f"slimspec-r{n}-int4" for n in (16, 32, 64)]
    same_ends = [f"a-{n}-drafter-of-the-same-end-and-beginning" for n in range(12)]
    for names in (alike, same_ends, ["full", *alike, *same_ends]):
        short = short_names(names)
        assert list(short) == names
        assert len(set(short.values())) == len(names)
        assert max(map(len, short.values())) <= 10


def with_categories(sweep: SyntheticSweep, names: list[str]) -> SyntheticSweep:
    """Each prompt of a block in the next category."""
    blocks = {}
    for trial, own in sweep.blocks.items():
        blocks[trial] = [
            dataclasses.replace(
                block,
                measured=dataclasses.replace(
                    block.measured,
                    requests=tuple(
                        dataclasses.replace(r, category=names[(4 * block.prompt_block + i) % len(names)])
                        for i, r in enumerate(block.requests)
                    ),
                ),
            )
            for block in own
        ]
    return dataclasses.replace(sweep, blocks=blocks, results=score(sweep.config, blocks, {}, {}))


def test_a_sweep_of_odd_categories_is_recorded_and_reported(
    synthetic_sweep: SyntheticSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(figures, "FIGURES", {})  # which leaves the one by category
    few = {t: b for t, b in synthetic_sweep.blocks.items() if t.traffic.concurrency == 1 and t.draft_steps != 2}
    sweep = with_categories(dataclasses.replace(synthetic_sweep, blocks=few), ODD)
    tracker = Tracker(f"sqlite:///{tmp_path}/mlflow.db", "tests", (tmp_path / "artifacts").as_uri())
    stored = find_sweep(tracker.client, publish(tracker, sweep, draws=True))
    back = {r.trial.name: r for r in stored.results}
    for result in sweep.results:
        assert back[result.trial.name].metrics == pytest.approx(dict(result.metrics))
    markdown, _ = write_report(stored, tmp_path / "report")
    assert "tau_by_category" in markdown.read_text()
    assert "speedup_by_category" in markdown.read_text()
    assert not [r for r in caplog.records if "could not be drawn" in r.message]
    # more categories than a call takes
    with tracker.parent("sweep", {}) as run:
        run.log_metrics({category_key(f"c{i}"): float(i) for i in range(1100)}, time_s=1.0)
    names = tracker.client.get_run(run.run_id).data.metrics
    assert sum(name.startswith(category_key("c")) for name in names) == 1100


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"category": "a\nb"}, r"w:1: category must be one line without control characters, got 'a\\nb'"),
        ({"category": "\0"}, "w:1: category must be one line without control characters"),
        ({"category": "\ud800"}, r"w:1: category is no valid Unicode \(surrogates not allowed\)"),
        ({"category": " "}, "w:1: category must be text that is not empty"),
        ({"id": "\ud800"}, "w:1: the id must be 1 to 200 printable characters"),
    ],
    ids=["line break", "NUL", "half a surrogate pair", "empty", "id"],
)
def test_what_cannot_be_a_name_is_refused_where_it_is_read(record: dict[str, str], message: str) -> None:
    line = json.loads(json.dumps({"prompt": "p", **record}))
    with pytest.raises(ValueError, match=message):
        read_records(iter([(1, line)]), "w", "c")


def test_a_figure_that_fails_is_left_out(
    results: list[TrialResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("no such glyph")

    monkeypatch.setattr(figures, "FIGURES", {"pareto": broken, "speedup": figures.FIGURES["speedup"]})
    with caplog.at_level(logging.WARNING):
        names = {f.stem for f in write_figures(results, tmp_path)}
    assert "speedup" in names
    assert "pareto" not in names
    assert "figure pareto could not be drawn and is left out: RuntimeError: no such glyph" in caplog.text
