"""A measured policy in the form of SGLang's own `--speculative-adaptive`, for servers without rayspec.

SGLang's rule has a list of draft lengths for each number of requests, and moves within it by a running mean of what is
accepted; it knows no costs. So the lists hold what is worth its cost: the lengths that promise nearly as many tokens a
second as the best does.
"""

from typing import Any

from rayspec.sweep.plan.trials import Trial
from sglang_ext.adapter.algorithms import serving_families
from sglang_ext.policy.choice import MeasuredPolicy
from sglang_ext.policy.table import PolicyTable

FILE = "adaptive.json"
NEARLY = 0.95  # share of the best length's expected tokens per second


def adaptive_config(table: PolicyTable, trial: Trial, *, draws: bool) -> dict[str, Any] | None:
    """What `--speculative-adaptive-config` reads: for each measured number of requests, which holds up to the next, the
    lengths. None where SGLang has no rule for the drafter: others than EAGLE's, and trees.

    `draws`: drafts are drawn from the drafter's distribution; SGLang's steps without drafts then fail.
    """
    is_adaptive = any(own.serving.is_adaptive for own in serving_families(trial.algorithm))
    if not is_adaptive or trial.drafted.shape.topk != 1:
        return None
    lengths = [k for k in table.lengths if k > 0 or not draws]
    policy = MeasuredPolicy(table, start=table.lengths[-1])
    loads = sorted({n for curve in table.curves for n in curve.requests})
    config: dict[str, Any] = {}
    for requests in loads:
        rates = {k: policy.tokens_per_ms(k, requests) for k in lengths}
        config[str(requests)] = {"candidate_steps": [k for k in lengths if rates[k] >= NEARLY * max(rates.values())]}
    return config
