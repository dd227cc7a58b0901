"""The figures exist, parse and show what they must; the table and its verdicts."""

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image
from synthetic import SyntheticSweep

from rayspec.farm.load import Traffic
from rayspec.plotting import house_style, panels, plt
from rayspec.report import figures
from rayspec.report.categories import RequestsOf
from rayspec.report.drafter_styles import DrafterStyles
from rayspec.report.figures import sweep_figures, write_figures
from rayspec.report.head_figures import unbeaten
from rayspec.report.option_figures import option_lines
from rayspec.report.page import CAPTIONS
from rayspec.report.point_labels import label_points
from rayspec.report.speed_figures import frontier
from rayspec.report.table import summary
from rayspec.sweep.candidate import Head
from rayspec.sweep.plan.trials import Trial
from rayspec.sweep.record.results import TrialResult
from rayspec.sweep.shape import DraftShape
from rayspec.tables import render_table

NAMES = {"speedup", "pareto", "head_tradeoff", "prediction", "acceptance", "tau_by_category", "by_option"}


def svg_text(file: Path) -> str:
    return "\n".join(ElementTree.parse(file).getroot().itertext())


def without(results: list[TrialResult], *names: str) -> list[TrialResult]:
    """The results with metrics of these names taken away."""
    kept = [{k: v for k, v in r.metrics.items() if not k.startswith(names)} for r in results]
    return [dataclasses.replace(r, metrics=m) for r, m in zip(results, kept, strict=True)]


def draw(results: list[TrialResult], folder: Path, *names: str, requests: RequestsOf | None = None) -> set[str]:
    """Those of these figures that the results give, written as SVG alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "FIGURES", {name: figures.FIGURES[name] for name in names if name in figures.FIGURES})
        found = sweep_figures(results, requests)
    with house_style():
        for name in set(names) & set(found):
            found[name].savefig(folder / f"{name}.svg", metadata={"Date": None})
    plt.close("all")
    return set(names) & set(found)


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
    names = ("speedup", "acceptance", "head_tradeoff", "pareto", "prediction", "tau_by_category")
    draw(results, tmp_path, *names)
    speedup = svg_text(tmp_path / "speedup.svg")
    for text in ("slimspec-r32", "4 draft steps", "1 stream", "4 streams", "speed-up over plain decoding"):
        assert text in speedup
    assert "tau (tokens per verify step)" in svg_text(tmp_path / "acceptance.svg")
    tradeoff = svg_text(tmp_path / "head_tradeoff.svg")
    for text in ("break-even with full", "4 streams, 2 draft steps, κ = ", "1.1x", "0.9x"):
        assert text in tradeoff
    assert "output tokens/s of all streams" in svg_text(tmp_path / "pareto.svg")
    assert "predicted speed-up over full" in svg_text(tmp_path / "prediction.svg")
    for category in ("chat", "python"):
        assert category in svg_text(tmp_path / "tau_by_category.svg")


def test_same_numbers_give_the_same_svg(
    results: list[TrialResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "FIGURES", {"speedup": figures.FIGURES["speedup"]})
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_figures(results, folder)
    first, second = ((folder / "speedup.svg").read_bytes() for folder in folders)
    assert first == second


def test_no_lines_without_kappa(results: list[TrialResult], tmp_path: Path) -> None:
    draw(without(results, "kappa"), tmp_path, "head_tradeoff")
    assert "1.1x" not in svg_text(tmp_path / "head_tradeoff.svg")


def test_a_figure_without_its_numbers_is_left_out(results: list[TrialResult], tmp_path: Path) -> None:
    files = write_figures(without(results, "nu", "speedup_vs_", "tpot_ms", "tau_category"), tmp_path)
    assert {f.stem for f in files} == {"acceptance"}
    assert write_figures([], tmp_path) == []


def test_a_single_trial_and_no_interval_are_drawn(results: list[TrialResult], tmp_path: Path) -> None:
    one = [r for r in results if r.trial.name == "full-s4-c1"]
    kept = {k: v for k, v in one[0].metrics.items() if "_ci_" not in k}
    files = write_figures([dataclasses.replace(one[0], metrics=kept)], tmp_path)
    assert {f.stem for f in files} == {"speedup", "head_tradeoff", "acceptance", "tau_by_category"}


def test_tau_against_the_tokens_scored_needs_heads_that_differ_in_them(
    results: list[TrialResult], tmp_path: Path
) -> None:
    same = [dataclasses.replace(r, metrics={**r.metrics, "shortlist_mean": 16384.0}) for r in results]
    assert not draw(same, tmp_path, "tau_by_shortlist")
    fewer = [
        dataclasses.replace(r, metrics={**r.metrics, "shortlist_mean": 2727.0})
        if r.trial.label == "slimspec-r64"
        else r
        for r in same
    ]
    draw(fewer, tmp_path, "tau_by_shortlist")
    assert "tokens scored for a row, mean" in svg_text(tmp_path / "tau_by_shortlist.svg")
    assert "tau_by_shortlist" in CAPTIONS
    assert " 2727 " in summary(fewer)


def test_speed_up_by_load_needs_several_loads(results: list[TrialResult], tmp_path: Path) -> None:
    more = [
        dataclasses.replace(r, trial=dataclasses.replace(r.trial, traffic=Traffic(concurrency=16))) for r in results[:9]
    ]
    draw([*results, *more], tmp_path, "speedup_by_load")
    assert "streams" in svg_text(tmp_path / "speedup_by_load.svg")


def test_more_heads_than_colours_are_numbered(results: list[TrialResult], tmp_path: Path) -> None:
    """Colours then tell kinds, which the synthetic heads have two of."""
    more = []
    for n in range(8):
        for r in (r for r in results if r.trial.label == "slimspec-r64"):
            candidate = dataclasses.replace(r.trial.candidate, label=f"head-{n}") if r.trial.candidate else None
            more.append(dataclasses.replace(r, trial=dataclasses.replace(r.trial, candidate=candidate)))
    draw([*results, *more], tmp_path, "pareto", "prediction", "head_tradeoff")
    for name in ("pareto", "prediction"):
        assert "12 head-7" in svg_text(tmp_path / f"{name}.svg")
    names = svg_text(tmp_path / "head_tradeoff.svg")  # there they stand at the points, in each of the panels
    assert names.count("head-7") == 4
    assert "12 head-7" not in names


def test_many_heads_of_long_names_are_told_apart_and_lie_inside_the_figure(results: list[TrialResult]) -> None:
    more = []
    for r in (r for r in results if r.trial.label == "slimspec-r64"):
        for n in range(12):
            assert r.trial.candidate is not None
            candidate = dataclasses.replace(r.trial.candidate, label=f"truncated-size6144-by-the-rule-{n}-of-vocabtrim")
            metrics = {**r.metrics, "shortlist_mean": 512.0 + 1000 * n}
            trial = dataclasses.replace(r.trial, candidate=candidate)
            more.append(dataclasses.replace(r, trial=trial, metrics=metrics))
    found = sweep_figures([*results, *more])
    for name in ("speedup", "prediction", "tau_by_category", "tau_by_shortlist"):
        figure = found[name]
        figure.canvas.draw()
        (legend,) = figure.legends
        assert figure.bbox.containsx(legend.get_window_extent().x0), name
        assert figure.bbox.containsx(legend.get_window_extent().x1), name
        for axis in figure.axes:
            assert figure.bbox.containsx(axis.xaxis.label.get_window_extent().x1), name
            assert not any("$" in tick.get_text() for tick in axis.get_xticklabels()), name
    styles = DrafterStyles.of([*results, *more])
    assert len(set(styles.short_names)) == len(styles.names)
    plt.close("all")


def test_shapes_of_one_drafter_are_a_line_over_the_budget(results: list[TrialResult], tmp_path: Path) -> None:
    more = []
    for nodes in (8, 16, 32):
        for r in (r for r in results if r.trial.label == "slimspec-r64" and r.trial.candidate):
            shape = DraftShape(topk=8, num_draft_tokens=nodes)
            candidate = dataclasses.replace(r.trial.candidate, label=f"slimspec-r64@8x{nodes}", shape=shape)
            metrics = {**r.metrics, "gflops_per_token": 0.1 * nodes}
            more.append(
                dataclasses.replace(r, trial=dataclasses.replace(r.trial, candidate=candidate), metrics=metrics)
            )
    assert draw([*results, *more], tmp_path, "speedup_by_budget", "work") <= set(CAPTIONS)
    assert set(figures.FIGURES) <= set(CAPTIONS)
    text = svg_text(tmp_path / "speedup_by_budget.svg")
    assert "slimspec-r64, 2 draft steps" in text
    assert "full, " not in text
    assert "slimspec-r64@8x32" in svg_text(tmp_path / "work.svg")


def test_colours_tell_algorithms_where_there_are_several(results: list[TrialResult]) -> None:
    medusa = []
    for r in (r for r in results if r.trial.candidate):
        candidate = dataclasses.replace(r.trial.candidate, label="m", algorithm="BPD")
        medusa.append(dataclasses.replace(r, trial=dataclasses.replace(r.trial, candidate=candidate)))
    assert set(DrafterStyles.of(results).kinds) == {"full", "slimspec"}
    assert set(DrafterStyles.of([*results, *medusa]).kinds) == {"EAGLE3", "BPD"}


def test_of_hundreds_of_heads_the_fastest_are_drawn(results: list[TrialResult], tmp_path: Path) -> None:
    more = []
    for n in range(50):
        for r in (r for r in results if r.trial.label == "slimspec-r64"):
            candidate = dataclasses.replace(r.trial.candidate, label=f"head-{n}") if r.trial.candidate else None
            metrics = {**r.metrics, "output_tokens_per_s": 1000.0 + n}
            more.append(
                dataclasses.replace(r, trial=dataclasses.replace(r.trial, candidate=candidate), metrics=metrics)
            )
    draw([*results, *more], tmp_path, "speedup")
    text = svg_text(tmp_path / "speedup.svg")
    assert "head-49" in text
    assert "head-10" in text
    assert "head-9<" not in text
    assert "the 40 fastest of 54 heads; the table has all" in text


def test_labels_cover_neither_points_nor_each_other() -> None:
    figure, (axis,) = panels(1, width=4, height=3)
    axis.set(xlim=(0, 1), ylim=(0, 1))
    points = [(0.5 + 0.03 * i, 0.5 + 0.02 * (i % 3), f"head-r{2**i}") for i in range(8)] + [(0.99, 0.99, "corner")]
    label_points([axis], [points])
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    labels = [t for t in axis.texts if t.get_text()]
    assert [t.get_text() for t in labels] == [text for _, _, text in points]
    boxes = [t.get_window_extent(renderer) for t in labels]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert not any(box.contains(*axis.transData.transform((x, y))) for x, y, _ in points)
        assert axis.get_window_extent(renderer).count_contains(box.corners()) == 4
    plt.close(figure)


def test_the_front_of_heads_by_hand() -> None:
    points = [(0.5, 0.9), (0.2, 0.8), (0.6, 0.85), (0.2, 0.7), (1.0, 1.0)]
    assert unbeaten(points) == [(0.2, 0.8), (0.5, 0.9), (1.0, 1.0)]


def test_categories_have_their_prompts_and_intervals(synthetic_sweep: SyntheticSweep, tmp_path: Path) -> None:
    def requests(trial: Trial) -> list[dict[str, object]]:
        return [{"block": b.index, **dataclasses.asdict(r)} for b in synthetic_sweep.blocks[trial] for r in b.requests]

    draw(synthetic_sweep.results, tmp_path, "tau_by_category", requests=requests)
    text = svg_text(tmp_path / "tau_by_category.svg")
    for shown in ("chat (n = 16)", "python (n = 16)", "95% CI over the n prompts"):
        assert shown in text


def test_numbers_are_right_aligned() -> None:
    table = render_table(["head", "tau", "vs plain"], [["full", "3.07", "1.18x [1.06, 1.32]"], ["plain", "-", "-"]])
    assert table.splitlines()[1] == "|-------|-----:|-------------------:|"
    assert table.splitlines()[3] == "| plain |    - |                  - |"


def test_a_busy_machine_is_said(results: list[TrialResult]) -> None:
    def measured(share: float) -> list[TrialResult]:
        return [dataclasses.replace(r, metrics={**r.metrics, "other_cpu_share": share}) for r in results]

    assert "WARNING" not in summary(results)
    assert "WARNING" not in summary(measured(0.04))
    text = summary([*measured(0.04)[:9], *measured(0.34)[9:]])
    assert "WARNING: the machine was busy while it was measured: other programs used 19% of the CPU time" in text
    assert "34% at most" in text


def test_frontier_by_hand(results: list[TrialResult]) -> None:
    points = {"a": (1.0, 10.0), "slower than a": (2.0, 9.0), "b": (3.0, 20.0), "as slow as b": (3.0, 15.0)}
    trials = [
        dataclasses.replace(results[0], metrics={"tpot_ms_p50": x, "output_tokens_per_s": y})
        for x, y in points.values()
    ]
    assert [(r.metrics["tpot_ms_p50"], r.metrics["output_tokens_per_s"]) for r in frontier(trials)] == [
        points["a"],
        points["b"],
    ]


def test_table_has_a_row_a_trial_and_a_verdict_a_traffic(results: list[TrialResult]) -> None:
    text = summary(results)
    assert sum(line.startswith("| ") for line in text.splitlines()) == 1 + len(results)
    assert text.count("Best: ") == 2
    assert " baseline |" in text


def failed(result: TrialResult, cause: str) -> TrialResult:
    return dataclasses.replace(result, metrics={}, error=cause)


def test_failed_trials_are_listed_with_their_cause(results: list[TrialResult]) -> None:
    text = summary([*results[:-1], failed(results[-1], "missing fc.weight")])
    assert f"{results[-1].trial.name} FAILED: missing fc.weight" in text


def test_options_are_lines_where_heads_differ_in_them_alone(results: list[TrialResult], tmp_path: Path) -> None:
    """Three ranks are one; two values of another option and a head of another making are none, and are not mixed in."""
    more = []
    for r in (r for r in results if r.trial.candidate and r.trial.candidate.head.kind == "slimspec"):
        assert r.trial.candidate is not None
        rank = r.trial.candidate.head.numbers["rank"]
        for base, options in (("full", {"rank": rank}), (None, {"rank": rank, "other": 7 if rank == 32 else 8})):
            head = Head(kind="slimspec", options=options)
            candidate = dataclasses.replace(r.trial.candidate, label=f"{base}-{rank}", head=head, base=base)
            more.append(dataclasses.replace(r, trial=dataclasses.replace(r.trial, candidate=candidate)))
    lines = option_lines([r for r in [*results, *more] if r.trial.candidate])
    assert {key: sorted((line.name, line.draft_steps) for line in own) for key, own in lines.items()} == {
        ("slimspec", "rank"): [("slimspec", 2), ("slimspec", 4), ("slimspec on full", 2), ("slimspec on full", 4)]
    }
    draw([*results, *more], tmp_path, "by_option")
    text = svg_text(tmp_path / "by_option.svg")
    for shown in ("slimspec: tau, 1 stream", "slimspec: speed-up, 4 streams", "rank", "slimspec on full", "128"):
        assert shown in text
    two = [r for r in results if r.trial.label != "slimspec-r32"]
    assert draw(two, tmp_path, "acceptance", "by_option") == {"acceptance"}
