"""The GPU suite's report: Markdown, and figures where matplotlib is installed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayspec_kernels.common.goals import goals_table

Results = Mapping[str, Any]


def report_text(results: Results, folder: Path) -> str:
    """What report.md says; share_of_floor.png and speedup.png are drawn into `folder`, if they can be."""
    timings = sorted(results["timings"], key=lambda t: (t["op"], t["shape"], t["variant"], t["batch"]))
    figures = _figures(timings, folder) if timings else []
    lines = ["# Kernels on a GPU", "", *(f"- {name}: {value}" for name, value in results["provenance"].items())]
    if results["ceilings"]:
        copy, gemm = results["ceilings"]["copy_bytes_per_s"], results["ceilings"]["gemm_flops_per_s"]
        lines.append(f"- ceilings of this card: copy {copy / 1e12:.2f} TB/s, bf16 products {gemm / 1e12:.0f} TFLOP/s")
    wrong = [c for c in results["checks"] if c["error"]]
    lines += ["", "## Results against float64", "", f"{len(results['checks']) - len(wrong)} right, {len(wrong)} wrong."]
    lines += [f"- {c['name']}: {c['error']}" for c in wrong]
    if taken := results.get("case_s"):  # stored results may be of before it was kept
        ahead = (
            f", after {results['compiled_ahead_s']:.0f} s of compiling ahead" if "compiled_ahead_s" in results else ""
        )
        slowest = (f"{name} {taken[name]:.1f} s" for name in sorted(taken, key=taken.get, reverse=True)[:3])
        lines += ["", f"{len(taken)} cases took {sum(taken.values()):.0f} s{ahead}; the slowest: {', '.join(slowest)}."]
    if results["left_out"]:
        lines += ["", "Left out:", *(f"- {name}: {why}" for name, why in results["left_out"].items())]
    if timings:
        lines += ["", "## Goals", "", *goals_table(timings)]
    lines += ["", "## Times", "", *_table(timings)]
    lines += [f"\n![{figure.stem}]({figure.name})" for figure in figures]
    return "\n".join(lines) + "\n"


def _table(timings: Sequence[Mapping[str, Any]]) -> list[str]:
    if not timings:
        return ["None: nothing was timed, so that there is no GPU figure here."]
    rows = [
        "Median of one call in a CUDA graph, inputs cold unless it says warm; the floor is bytes over the copy's "
        "bandwidth, or flops over the product's rate, whichever is longer; compositions are what torch and cuBLAS need "
        "for the same; ours otherwise is the same from our kernels launched in another way.",
        "",
        "| op | variant | shape | B | us | spread | floor us | of floor | compositions, us | against best "
        "| ours otherwise, us |",
        "|---|---|---|--:|--:|--:|--:|--:|---|--:|---|",
    ]
    for t in timings:
        rivals, ours = (
            ", ".join(f"{name} {s * 1e6:.1f}" for name, s in t[calls].items())
            for calls in ("rivals_s", "alternatives_s")
        )
        best = f"{speedup(t):.2f}x" if t["rivals_s"] else ""
        rows.append(
            f"| {t['op']} | {t['variant']} | {t['shape']} | {t['batch']} "
            f"| {t['seconds'] * 1e6:.1f}{'' if t['is_cold'] else ' warm'} "
            f"| {t['spread']:.0%} | {t['floor_s'] * 1e6:.1f} | {t['floor_s'] / t['seconds']:.0%} | {rivals} | {best} "
            f"| {ours} |"
        )
    return rows


def speedup(timing: Mapping[str, Any]) -> float:
    """Speed-up over the fastest composition that gives the same; those without a log-sum-exp give less, trimmed ones
    start from more."""
    same = [s for name, s in timing["rivals_s"].items() if "log-sum-exp" in name and "trimmed" not in name]
    return float(min(same or timing["rivals_s"].values()) / timing["seconds"])


def _figures(timings: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for stem, label, value in (
        ("share_of_floor", "share of the floor's speed", lambda t: t["floor_s"] / t["seconds"]),
        ("speedup", "times faster than the torch composition", speedup),
    ):
        kept = [t for t in timings if stem == "share_of_floor" or t["rivals_s"]]
        if not kept:
            continue
        shapes = list(dict.fromkeys(t["shape"] for t in kept))
        figure, axes = pyplot.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), sharey=True, squeeze=False)
        for axis, shape in zip(axes[0], shapes, strict=True):
            for name in dict.fromkeys((t["op"], t["variant"].split(",")[-1]) for t in kept if t["shape"] == shape):
                line = [t for t in kept if t["shape"] == shape and (t["op"], t["variant"].split(",")[-1]) == name]
                axis.plot([t["batch"] for t in line], [value(t) for t in line], marker="o", label=" ".join(name))
            axis.set(title=shape, xlabel="batch", xscale="log", ylim=(0, None))
            axis.axhline(1, color="grey", linewidth=0.8)
        axes[0][0].set_ylabel(label)
        axes[0][-1].legend(fontsize="x-small")
        figure.tight_layout()
        figure.savefig(folder / f"{stem}.png", dpi=120)
        pyplot.close(figure)
        made.append(folder / f"{stem}.png")
    return made
