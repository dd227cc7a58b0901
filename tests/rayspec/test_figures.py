"""The figures exist, parse and show what they must; the table and its verdicts."""

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from rayspec.farm.load import Traffic
from rayspec.report.figures import write_figures
from rayspec.report.table import summary, verdict
from rayspec.sweep.results import TrialResult

NAMES = {"speedup", "acceptance", "head_tradeoff"}


def svg_text(file: Path) -> str:
    return "\n".join(ElementTree.parse(file).getroot().itertext())


def without(results: list[TrialResult], *names: str) -> list[TrialResult]:
    """The results with metrics of these names taken away."""
    kept = [{k: v for k, v in r.metrics.items() if not k.startswith(names)} for r in results]
    return [dataclasses.replace(r, metrics=m) for r, m in zip(results, kept, strict=True)]


def test_all_figures_are_written_and_parse(results: list[TrialResult], tmp_path: Path) -> None:
    files = write_figures(results, tmp_path)
    assert {(f.stem, f.suffix) for f in files} == {(n, s) for n in NAMES for s in (".png", ".svg")}
    for file in files:
        if file.suffix == ".png":
            with Image.open(file) as image:
                assert image.width > 600
                assert len(image.convert("L").getcolors() or []) > 10  # not blank
        else:
            assert ElementTree.parse(file).getroot().tag.endswith("svg")


def test_figures_name_heads_steps_and_units(results: list[TrialResult], tmp_path: Path) -> None:
    write_figures(results, tmp_path)
    speedup = svg_text(tmp_path / "speedup.svg")
    for text in ("slimspec-r32", "4 draft steps", "1 stream", "4 streams", "speed-up over plain decoding"):
        assert text in speedup
    assert "tau (tokens per verify step)" in svg_text(tmp_path / "acceptance.svg")
    assert "break-even, 4 steps" in svg_text(tmp_path / "head_tradeoff.svg")


def test_same_numbers_give_the_same_svg(results: list[TrialResult], tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_figures(results, folder)
    first, second = ((folder / "speedup.svg").read_bytes() for folder in folders)
    assert first == second


def test_no_break_even_line_without_kappa(results: list[TrialResult], tmp_path: Path) -> None:
    write_figures(without(results, "kappa"), tmp_path)
    assert "break-even" not in svg_text(tmp_path / "head_tradeoff.svg")


def test_a_figure_without_its_numbers_is_left_out(results: list[TrialResult], tmp_path: Path) -> None:
    files = write_figures(without(results, "nu", "speedup_vs_plain"), tmp_path)
    assert {f.stem for f in files} == {"acceptance"}
    assert write_figures([], tmp_path) == []


def test_a_single_trial_and_no_interval_are_drawn(results: list[TrialResult], tmp_path: Path) -> None:
    one = [r for r in results if r.trial.name == "full-s4-c1"]
    kept = {k: v for k, v in one[0].metrics.items() if "_ci_" not in k}
    assert len(write_figures([dataclasses.replace(one[0], metrics=kept)], tmp_path)) == 6


def test_table_has_a_row_a_trial_and_a_verdict_a_traffic(results: list[TrialResult]) -> None:
    text = summary(results)
    assert sum(line.startswith("| ") for line in text.splitlines()) == 1 + len(results)
    assert text.count("Best: ") == 2
    assert "| baseline " in text


def failed(result: TrialResult, cause: str) -> TrialResult:
    return dataclasses.replace(result, metrics={}, error=cause)


def test_failed_trials_are_listed_with_their_cause(results: list[TrialResult]) -> None:
    text = summary([*results[:-1], failed(results[-1], "missing fc.weight")])
    assert f"{results[-1].trial.name} FAILED: missing fc.weight" in text


@pytest.mark.parametrize(
    ("low", "high", "claim"),
    [
        (1.1, 1.3, "speculation pays."),
        (0.7, 0.9, "speculation does NOT pay"),
        (0.9, 1.1, "not clearly different from plain decoding"),
    ],
)
def test_verdict_goes_by_the_interval(results: list[TrialResult], low: float, high: float, claim: str) -> None:
    result = next(r for r in results if r.trial.name == "slimspec-r64-s4-c1")
    metrics = {**result.metrics, "speedup_vs_plain_ci_low": low, "speedup_vs_plain_ci_high": high}
    text = verdict(Traffic(concurrency=1), [dataclasses.replace(result, metrics=metrics)])
    assert text.startswith("concurrency 1: ")
    assert claim in text


def test_verdict_without_a_baseline(results: list[TrialResult]) -> None:
    assert (
        verdict(Traffic(concurrency=1), without(results, "speedup")) == "concurrency 1: no speed-up could be measured."
    )
