"""What a measured trial is served with: SGLang's settings, and the command line that says them."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from rayspec.shipped import target_path
from rayspec.sweep.plan.trials import Trial
from rayspec.sweep.record.stored import StoredSweep

ENGINE_FLAGS = ("dtype", "context_length", "max_total_tokens")  # mem_fraction_static leaves room for a second engine


def engine_config(sweep: StoredSweep) -> dict[str, Any]:
    """`engine` of the sweep's resolved config; no EngineConfig, as old sweeps may name what is no setting now."""
    return yaml.safe_load(sweep.config_yaml())["engine"]


def serving_flags(engine: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
    """ServerArgs fields that a trial was measured with, but for the paths of target and drafter. `engine` is that of
    the sweep's config."""
    flags: dict[str, Any] = {}
    if trial.candidate is not None:
        flags |= {
            "speculative_algorithm": trial.algorithm,
            "speculative_num_steps": trial.draft_steps,
            "speculative_eagle_topk": trial.candidate.shape.topk,
            "speculative_num_draft_tokens": trial.candidate.num_draft_tokens,
        }
    flags |= {name: engine[name] for name in ENGINE_FLAGS if engine.get(name) is not None}
    return flags | (engine.get("extra") or {})


def serve_command(sweep: StoredSweep, trial: Trial, drafter: str | None = None) -> str:
    """A line for a shell; `drafter` is the folder to take instead of the measured one."""
    engine = engine_config(sweep)
    flags = serving_flags(engine, trial)
    if trial.candidate is not None:
        flags |= {"speculative_draft_model_path": drafter or trial.candidate.path}
    if engine.get("nodes", 1) > 1:
        flags |= {"nnodes": engine["nodes"], "node_rank": "RANK", "dist_init_addr": "HOST:PORT"}
    threads = engine.get("num_threads")
    words = [f"OMP_NUM_THREADS={threads}"] if threads else []
    target = target_here(sweep.params["target"])
    return shlex.join([*words, "python", "-m", "sglang.launch_server", *arguments({"model_path": target, **flags})])


def arguments(flags: Mapping[str, Any]) -> list[str]:
    """ServerArgs fields as SGLang's command line takes them; None and False are what a flag left out is."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def target_here(name: str) -> str:
    """The folder of the target, or the name where this machine does not have it."""
    try:
        return target_path(name)
    except ValueError:
        return name
