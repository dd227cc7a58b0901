"""A metric's name in MLflow and back: which group it sorts into."""

from rayspec.metrics import TAU_CATEGORY

# Groups of metrics, all of which sort behind output_tokens_per_s: names, and beginnings of names (ending in "_"). A
# metric that is not here keeps its bare name.
GROUPS = {
    "position": ("accept_pos_", "accept_cond_"),
    "slo": ("goodput_",),
    "step": ("step_", "cycle_ms", "request_head_ms"),
    "time": ("ttft_ms_", "tpot_ms_", "itl_ms_"),
    "total": ("requests", "requests_per_s", "output_tokens", "wall_s", "verify_steps", "accepted_drafts"),
    "valid": ("output_mismatches", "other_cpu_share"),
    "tradeoff": ("rho", "nu", "kappa", "head_latency_us", "shortlist_mean", "shortlist_max"),
    "work": ("mbsu", "gflops_per_token", "budget_kappa", "theta", "peak_host_memory_gib"),
}


def metric_key(name: str) -> str:
    """The metric's name in MLflow, with its group."""
    for group, members in GROUPS.items():
        if any(name == m or (m.endswith("_") and name.startswith(m)) for m in members):
            return f"{group}/{name}"
    return name


def metric_name(key: str) -> str | None:
    """The metric of a name in MLflow; None for what is no metric of the trial (per_block/..., system/...)."""
    key = key.replace("speedup_vs_full", "speedup_vs_baseline")  # as runs had it, whatever the baseline was
    group, slash, name = key.partition("/")
    if not slash or key.startswith(TAU_CATEGORY):
        return key
    return name if group in GROUPS else None
