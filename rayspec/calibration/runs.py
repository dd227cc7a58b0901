"""All calibrations of one configuration: count what is to be counted, then apply every rule and record it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rayspec.artifacts import write_artifacts
from rayspec.calibration.config import NamedRule
from rayspec.calibration.counting import PairCounts, add_up, add_up_pairs, batches
from rayspec.calibration.drafter import ReferenceDrafter
from rayspec.calibration.figures import cluster_sizes_figure, coverage_figure, png
from rayspec.calibration.prepare import Prepared
from rayspec.calibration.rules.base import Made
from rayspec.calibration.rules.ranking import coverage, rank
from rayspec.config import flatten, to_yaml
from rayspec.home import artifact_uri, prepared_home, tracking_uri
from rayspec.provenance import provenance

if TYPE_CHECKING:
    from rayspec.tracking import Run, Tracker

EXPERIMENT = "rayspec-calibrations"
HELD_OUT = "held_out"


def calibrate_all(prepared: Prepared, command: str) -> dict[str, dict[str, float] | None]:
    """Make what is missing; {name: its figures, None where it was already made}. Raises ValueError."""
    config = prepared.config
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    results: dict[str, dict[str, float] | None] = {}
    todo: list[tuple[NamedRule, ReferenceDrafter]] = []
    for calibration in config.calibrations:
        drafter = prepared.drafter(calibration)
        if prepared.is_made(calibration, drafter):
            print(f"{calibration.name}: already in {prepared.folder(calibration)}, skipped", flush=True)
            results[calibration.name] = None
        else:
            todo.append((calibration, drafter))
    if not todo:
        return results
    tracker = _tracker(prepared)  # before the counting: a store that does not answer should not wait for its end
    counts, pairs, held_out = count_all(prepared, todo=[calibration for calibration, _ in todo])
    for calibration, drafter in todo:
        counted = pairs[calibration.source] if calibration.rule.of_pairs else None
        with _run(prepared, calibration, tracker, command) as run:
            figures = _calibrate(prepared, calibration, drafter, counts, counted, held_out, run)
        results[calibration.name] = figures
        print(f"{calibration.name}: {', '.join(f'{k} {v:.6g}' for k, v in figures.items())}", flush=True)
    return results


def count_all(
    prepared: Prepared, todo: Sequence[NamedRule]
) -> tuple[dict[str, Tensor], dict[str, PairCounts], Tensor | None]:
    """(counts int64 [V] of every source, pairs of those of which a rule needs them, counts of the held-out answers
    where there are any), on Ray."""
    import ray

    from rayspec.farm.actor import cluster

    config, V = prepared.config, prepared.vocabulary.size
    sources = {name: s for name, s in config.sources.items() if name in prepared.sources}
    if prepared.held_out is not None:
        sources[HELD_OUT] = prepared.held_out
    with cluster(config.ray.address):
        blocks = config.ray.blocks or 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
        counts = {name: add_up(batches(s.counts(prepared.context, blocks)), V, name) for name, s in sources.items()}
        pairs = {
            name: add_up_pairs(batches(sources[name].pair_counts(prepared.context, blocks)), V, name)
            for name in dict.fromkeys(c.source for c in todo if c.rule.of_pairs)
        }
    return counts, pairs, counts.pop(HELD_OUT, None)


def _calibrate(
    prepared: Prepared,
    calibration: NamedRule,
    drafter: ReferenceDrafter,
    counts: Mapping[str, Tensor],
    pairs: PairCounts | None,
    held_out_V: Tensor | None,
    run: Run | None,
) -> dict[str, float]:
    """Apply one rule, write its folder, record it; its figures."""
    counts_V, rule = counts[calibration.source], calibration.rule
    made = rule.make(counts_V if pairs is None else pairs, prepared.vocabulary, drafter)
    figures = {"tokens_counted": float(counts_V.sum()), **made.figures}
    if held_out_V is not None and "ids" in made.tensors:
        figures["held_out_coverage"] = float(coverage(held_out_V, made.tensors["ids"])[-1])
    tags = provenance()
    description: dict[str, Any] = {
        "name": calibration.name,
        "kind": "ids" if "ids" in made.tensors else "clusters" if pairs is None else "pairs",
        **prepared.identity(calibration, drafter),
        "held_out": prepared.held_out_description,
        "figures": figures,
        "commit": tags["git.commit"],
        "versions": {k.removeprefix("version."): v for k, v in tags.items() if k.startswith("version.")},
    }
    folder = prepared.folder(calibration)
    pictures = _pictures(prepared, calibration, drafter, counts, held_out_V, made)
    write_artifacts(folder, {**made.tensors, "counts": counts_V}, description, pictures)
    if run is not None:
        run.log_metrics(figures)
        for file in sorted(folder.iterdir()):
            run.log_file(file, "figures" if file.suffix == ".png" else None)
    return figures


def _pictures(
    prepared: Prepared,
    calibration: NamedRule,
    drafter: ReferenceDrafter,
    counts: Mapping[str, Tensor],
    held_out_V: Tensor | None,
    made: Made,
) -> dict[str, bytes]:
    """PNG files by name."""
    counts_V, rule, pictures = counts[calibration.source], calibration.rule, {}
    ranked = {name: rank(c, prepared.vocabulary) for name, c in counts.items()}
    if "cluster_of" in made.tensors:
        pictures["cluster_sizes.png"] = png(cluster_sizes_figure(made.tensors["cluster_of"], counts_V))
    elif held_out_V is not None and "ids" in made.tensors:
        curves = {name: coverage(held_out_V, ids) for name, ids in ranked.items()}
        pictures["coverage.png"] = png(coverage_figure(curves, calibration.source, len(made.tensors["ids"])))
    return pictures | rule.pictures(counts_V, prepared.vocabulary, drafter, made)


def _tracker(prepared: Prepared) -> Tracker | None:
    """None where tracking is off. Raises TrackingError where MLflow does not answer."""
    if not prepared.config.mlflow:
        return None
    from rayspec.tracking import Tracker  # seconds of import, not paid where it is off

    prepared_home()
    return Tracker(tracking_uri(), EXPERIMENT, artifact_uri())


@contextlib.contextmanager
def _run(prepared: Prepared, calibration: NamedRule, tracker: Tracker | None, command: str) -> Iterator[Run | None]:
    """The calibration's MLflow run, with its parameters; None where tracking is off."""
    if tracker is None:
        yield None
        return
    tags = {"kind": "calibration", "command": command, **provenance()}
    with tracker.parent(calibration.name, tags) as run:
        run.log_params(
            {
                "target": prepared.config.target,
                **_flat(flatten(prepared.config.corpus), "corpus"),
                **_flat(calibration.entry, "rule"),
                **_flat(prepared.sources[calibration.source], "source"),
            }
        )
        run.log_text(to_yaml(prepared.config), "config.yaml")
        yield run


def _flat(entry: Mapping[str, Any], prefix: str) -> dict[str, object]:
    return {f"{prefix}.{key}": value for key, value in entry.items()}
