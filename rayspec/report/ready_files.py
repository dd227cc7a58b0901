"""Files of a sweep's winners for who serves or simulates them elsewhere."""

import json
import shlex
from pathlib import Path
from typing import Any

from rayspec.config import SHIPPED
from rayspec.export import stock_form
from rayspec.farm.ranks import ranks_of
from rayspec.report.adaptive import FILE, adaptive_config
from rayspec.report.decision import choices
from rayspec.report.promote import ALIAS, default_model
from rayspec.serving.flags import engine_config, serve_command, serving_flags, target_here
from rayspec.serving.policy import measured_policy, policy_text
from rayspec.shipped import drafter_label
from rayspec.sweep.plan.sampling import DRAWS
from rayspec.sweep.record.results import TrialResult
from rayspec.sweep.record.stored import StoredSweep
from sglang_ext.drafters.family import family
from sglang_ext.folder_kinds import ACCEPTANCE, POLICY, READY_FILES
from sglang_ext.folders import check_name, check_place, written_whole

EXPORTED_TO = "stock_drafters"
ONE_GPU = 'nvidia.com/gpu: "1"'  # in the example


def emit(sweep: StoredSweep, folder: Path, source: str | None = None) -> list[Path]:
    """Write, for every traffic under which speculation pays, `NAME/serve.sh` (SGLang's server), `NAME/acceptance.json`
    (what a simulator needs), `NAME/rayservice.yaml` (the champion on Kubernetes), `NAME/policy.json` (draft length by
    load, where at least two loads in streams were measured) with `NAME/adaptive.json` (the same for SGLang without
    rayspec, for chains) and, where vLLM can hold the drafter, `NAME/vllm.sh`. What an earlier call wrote is replaced.
    `source`: what Kubernetes serves, models:/NAME/VERSION; None for the alias of the target's champion.

    Raises ValueError where nothing pays, for a trial whose name is no folder's and for a folder that holds something
    else, and OSError where it cannot be written.
    """
    winners = winners_of(sweep, folder)
    written = []
    for best in winners:
        place = folder / best.trial.name
        with written_whole(place, READY_FILES) as draft:
            for name, text in _files(sweep, best, source).items():
                (draft / name).write_text(text)
        for name in sorted(file.name for file in place.iterdir()):
            (place / name).chmod(0o755 if name.endswith(".sh") else 0o644)
            written.append(place / name)
    return written


def winners_of(sweep: StoredSweep, folder: Path) -> list[TrialResult]:
    """The winners whose files `emit` writes into `folder`. Raises ValueError as it does."""
    winners = [c.best for c in choices(sweep.results) if c.pays and c.best]
    if not winners:
        raise ValueError(f"no setting of sweep {sweep.name} is clearly faster than plain decoding: nothing to emit")
    for best in winners:
        check_name(best.trial.name, "the name of a trial, which MLflow holds,")
        check_place(folder / best.trial.name, READY_FILES)
    return winners


def _files(sweep: StoredSweep, best: TrialResult, source: str | None) -> dict[str, str]:
    files = {
        "serve.sh": f'#!/bin/sh\n{serve_command(sweep, best.trial)} "$@"\n',
        ACCEPTANCE: json.dumps(acceptance(sweep, best), indent=1) + "\n",
        "rayservice.yaml": ray_service(
            sweep.params["target"], source, ranks_of(serving_flags(engine_config(sweep), best.trial))
        ),
    }
    policy = measured_policy(sweep, best)
    if policy is not None:
        files[POLICY] = policy_text(policy)
        adaptive = adaptive_config(policy, best.trial, draws=_draws(sweep))
        if adaptive is not None:
            files[FILE] = json.dumps(adaptive, indent=1) + "\n"
    vllm = vllm_command(sweep, best)
    return files if vllm is None else files | {"vllm.sh": vllm}


def ray_service(target: str, source: str | None, gpus: int) -> str:
    """The example of configs/cluster with this target, version and GPUs of a replica; image, claim and other resources
    stay to be named."""
    lines = (SHIPPED / "cluster" / "rayservice.yaml").read_text().splitlines()
    named = {"source:": source or f"models:/{default_model(target)}@{ALIAS}", "target:": target, "gpus:": gpus}
    for i, line in enumerate(lines):
        key = line.strip().partition(" ")[0]
        if key in named:
            lines[i] = f"{line.partition(key)[0]}{key} {json.dumps(named.pop(key))}"
    assert not named, "the example names each"
    text = "\n".join(lines) + "\n"
    assert text.count(ONE_GPU) == 1, "of a worker"
    return text.replace(ONE_GPU, ONE_GPU.replace("1", str(gpus)))


def _draws(sweep: StoredSweep) -> bool:
    return bool((engine_config(sweep).get("extra") or {}).get(DRAWS))


def acceptance(sweep: StoredSweep, best: TrialResult) -> dict[str, Any]:
    """How much of a verify step's drafts is accepted, pooled over all steps of the trial.

    `accepted_at_least`: share of the steps that accepted 1, 2, ... drafts or more. `accepted_if_reached`: of those that
    had accepted all before. Where a step drafts one chain, a shorter one is the longer one's beginning, and
    `tokens_per_step_by_draft_steps` is what 1, 2, ... drafts would emit; trees spend their nodes anew and drafters that
    read all slots at once draft otherwise, so that of those only what was measured is said.
    """
    trial, metrics = best.trial, best.metrics
    shape, steps = trial.drafted.shape, trial.draft_steps
    at_least = [metrics.get(f"accept_pos_{i}", 0.0) for i in range(1, steps + 1)]
    reached = [1.0, *at_least]
    shorter = {str(k): 1 + sum(at_least[:k]) for k in range(1, steps + 1)}
    is_chain = shape.topk == 1 and family(trial.drafted.family).serving.drafts_in_turn
    return {
        "target": sweep.params["target"],
        "drafter": trial.label,
        "workload": sweep.params["workload"],
        "temperature": sweep.temperature(trial),
        "traffic": trial.traffic.label,
        "draft_steps": steps,
        "topk": shape.topk,
        "draft_tokens": trial.drafted.num_draft_tokens,
        "verify_steps": int(metrics["verify_steps"]),
        "accepted_at_least": at_least,
        "accepted_if_reached": [a / b if b else 0.0 for a, b in zip(at_least, reached, strict=False)],
        "tokens_per_step_by_draft_steps": shorter if is_chain else {str(steps): metrics["tau"]},
        "sweep_run_id": sweep.run_id,
    }


def vllm_command(sweep: StoredSweep, best: TrialResult) -> str | None:
    """vLLM's server with the drafter in stock form; None for a head, drafter or tree that has none."""
    trial = best.trial
    path = trial.drafted.path
    try:
        info, _ = stock_form(path)
    except ValueError:
        return None
    assert info.body.stock is not None, "stock_form has looked"
    if info.body.stock.vllm_method is None or trial.drafted.shape.topk != 1:
        return None
    exported = f"{EXPORTED_TO}/{drafter_label(path)}"
    config = {"method": info.body.stock.vllm_method, "model": exported, "num_speculative_tokens": trial.draft_steps}
    target = target_here(sweep.params["target"])
    return (
        "#!/bin/sh\nset -e\n# the drafter in the form that others read, then vLLM's server\n"
        f"{shlex.join(['rayspec', 'export', f'drafters=[{path}]', f'output_dir={EXPORTED_TO}'])}\n"
        f'{shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(config)])} "$@"\n'
    )
