"""training.json and training.png, which lie beside an exported drafter's weights."""

from __future__ import annotations

import io
import json
from typing import Any


def report_files(report: dict[str, Any]) -> dict[str, bytes | str]:
    """{file name: content} of a drafter's training report."""
    return {"training.json": json.dumps(report, indent=1) + "\n", "training.png": _figure(report)}


def _figure(report: dict[str, Any]) -> bytes:
    from rayspec.plotting import STYLE, colour, panels, plt

    history, evaluations = report["history"], report["evaluations"]
    with plt.rc_context(STYLE):
        figure, (loss, tau, accept) = panels(3, width=4.2, height=3.2)
        steps = [entry["step"] for entry in history]
        for i in range(sum(key.startswith("loss_step_") for key in (history or [{}])[0])):
            loss.plot(steps, [h[f"loss_step_{i}"] for h in history], color=colour(i), lw=1, label=f"draft step {i + 1}")
        loss.set(title="Cross-entropy to the target", xlabel="training step", ylabel="nats per token")
        if history:  # a drafter that trained nothing has no curve
            loss.legend(fontsize=8)
        steps = [entry["step"] for entry in evaluations]
        for i in range(len(evaluations[-1]["tau"])):
            label = f"{i + 1} draft steps" if i else "1 draft step"
            tau.plot(steps, [e["tau"][i] for e in evaluations], "o-", color=colour(i), ms=3, label=label)
        tau.set(title="Held-out tau, greedy", xlabel="training step", ylabel="tokens per verify step")
        tau.legend(fontsize=8)
        final = evaluations[-1]
        positions = range(1, len(final["u"]) + 1)
        accept.plot(positions, final["u"], "o-", color=colour(0), label="all so far accepted")
        accept.plot(positions, final["conditional"], "s--", color=colour(1), label="accepted, given all before")
        accept.plot(positions, final["overlap"], "^:", color=colour(2), label="sum min(p, q)")
        accept.set(title="Held-out acceptance", xlabel="draft position", ylim=(0, 1), xticks=list(positions))
        accept.legend(fontsize=8)
        figure.suptitle(report["name"])
        buffer = io.BytesIO()
        # no software name in the file, so that the same curves give the same bytes
        figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
        plt.close(figure)
    return buffer.getvalue()
