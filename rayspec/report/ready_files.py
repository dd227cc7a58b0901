"""Files of a sweep's winners for who serves or simulates them elsewhere."""

import json
import shlex
from pathlib import Path
from typing import Any

from rayspec.export import ExportConfig, prepare
from rayspec.report.adaptive import FILE, adaptive_config
from rayspec.report.decision import choices
from rayspec.serving.flags import engine_config, serve_command
from rayspec.serving.policy import measured_policy, policy_text
from rayspec.sweep.record.results import TrialResult
from rayspec.sweep.record.stored import StoredSweep
from sglang_ext.artefacts import POLICY
from sglang_ext.whole import write_whole

EXPORTED_TO = "stock_drafters"


def emit(sweep: StoredSweep, folder: Path) -> list[Path]:
    """Write, for every traffic under which speculation pays, `NAME/serve.sh` (SGLang's server), `NAME/acceptance.json`
    (what a simulator needs), `NAME/policy.json` (draft length by load, where at least two loads in streams were
    measured) with `NAME/adaptive.json` (the same for SGLang without rayspec, for chains) and, where vLLM can hold the
    drafter, `NAME/vllm.sh`. Files of these names are replaced.

    Raises ValueError where nothing pays, and OSError where the folder cannot be written.
    """
    winners = [c.best for c in choices(sweep.results) if c.pays and c.best]
    if not winners:
        raise ValueError(f"no setting of sweep {sweep.name} is clearly faster than plain decoding: nothing to emit")
    written = []
    for best in winners:
        place = folder / best.trial.name
        place.mkdir(parents=True, exist_ok=True)
        files = {
            "serve.sh": f'#!/bin/sh\n{serve_command(sweep, best.trial)} "$@"\n',
            "acceptance.json": json.dumps(acceptance(sweep, best), indent=1) + "\n",
        }
        policy = measured_policy(sweep, best)
        if policy is not None:
            files[POLICY] = policy_text(policy)
            adaptive = adaptive_config(policy, best.trial, draws=_draws(sweep))
            if adaptive is not None:
                files[FILE] = json.dumps(adaptive, indent=1) + "\n"
        vllm = vllm_command(sweep, best)
        if vllm is not None:
            files["vllm.sh"] = vllm
        for name, text in files.items():
            write_whole(place / name, text)
            (place / name).chmod(0o755 if name.endswith(".sh") else 0o644)
            written.append(place / name)
    return written


def _draws(sweep: StoredSweep) -> bool:
    return bool((engine_config(sweep).get("extra") or {}).get("speculative_use_rejection_sampling"))


def acceptance(sweep: StoredSweep, best: TrialResult) -> dict[str, Any]:
    """Tokens that a verify step is expected to emit with 1, 2, ... draft steps, as they were measured with the most."""
    trial, metrics = best.trial, best.metrics
    at_least = [metrics.get(f"accept_pos_{i}", 0.0) for i in range(1, trial.draft_steps + 1)]
    return {
        "target": sweep.params["target"],
        "drafter": trial.label,
        "workload": sweep.params["workload"],
        "temperature": sweep.temperature(trial),
        "traffic": trial.traffic.label,
        "verify_steps": int(metrics["verify_steps"]),
        "accepted_at_least": at_least,
        "tokens_per_step_by_draft_steps": [1 + sum(at_least[:k]) for k in range(1, trial.draft_steps + 1)],
        "sweep_run_id": sweep.run_id,
    }


def vllm_command(sweep: StoredSweep, best: TrialResult) -> str | None:
    """vLLM's server with the drafter in stock form; None for a head, drafter or tree that has none. Not run here."""
    trial = best.trial
    assert trial.candidate is not None, "the winner is a drafter"
    if trial.algorithm != "EAGLE3" or trial.candidate.shape.topk != 1:
        return None
    try:
        (export,) = prepare(ExportConfig(drafters=[trial.candidate.path], output_dir=EXPORTED_TO))
    except ValueError:
        return None
    config = {"method": "eagle3", "model": str(export.folder), "num_speculative_tokens": trial.draft_steps}
    return (
        "#!/bin/sh\n# the drafter in the form that others read, then vLLM's server; rayspec has not run it\n"
        f"{shlex.join(['rayspec', 'export', f'drafters=[{trial.candidate.path}]', f'output_dir={EXPORTED_TO}'])}\n"
        f'{shlex.join(["vllm", "serve", sweep.params["target"], "--speculative-config", json.dumps(config)])} "$@"\n'
    )
