"""What a decoded token costs by count: FLOPs, and bytes read (MBSU). H = hidden size, V = vocabulary.

FLOPs are those of matrix products and of attention, two per multiplication and addition; norms, activations and the
choice of tokens are left out. They count what SGLang computes in a verify step, not what a perfect implementation
would: the drafter's extend runs over every verified token, the accepted ones and the others. How many of these a step
had is counted by an engine with a clock: a CPU verifies no more than the largest tree of a batch, where a tree on an
accelerator is padded to what was asked for. So is how many tokens a head with a router scored at each draft position,
which a mean over the positions does not tell: a tree asks about one row at the first of them, and about many later.
Where that was not counted there are no FLOPs and no bytes of such a head.

Heads are asked for their own cost at every draft step; they are kept without weights, as shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rayspec.records import RequestRecord
from sglang_ext.drafters import family
from sglang_ext.drafters.checkpoint import drafter_shapes
from sglang_ext.drafters.counting import DecoderCost, DrafterCost, StepShape, is_scoring_known

logger = logging.getLogger(__name__)

# fields of a config that number the experts of a layer
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# settings of SGLang's that quantise the weights of target or drafter as they are loaded
QUANTIZING = ("quantization", "modelopt_quant", "quantize_and_serve", "speculative_draft_model_quantization")


@dataclass(frozen=True, kw_only=True)
class TargetCost:
    """`params`: tied matrices once. `decoder` is None for what these counts do not describe (mixtures of experts).

    `is_read_whole`: whether a pass reads every parameter once, in the dtype that it is served in. A mixture of experts
    reads those experts that the tokens of the pass are sent to, a quantised target its own bits and scales: of neither
    is there a count here.
    """

    params: int
    embedding_params: int
    decoder: DecoderCost | None
    is_read_whole: bool


def mbsu(tau: float, drafted_bytes: float, target_bytes: float) -> float:
    """Memory-bound speed-up tau / (drafted_bytes / target_bytes + 1), by what one step of drafting reads and one pass
    of the target.

    VocabTrim's tables (Goel et al. 2025) count c gamma for the ratio: gamma draft forwards, one more than the depth of
    an EAGLE-2 tree (SGLang's draft steps), that each read all parameters of the drafter, token embedding and LM head
    included. For one dense head at the target's precision that is the same.
    """
    return tau / (drafted_bytes / target_bytes + 1)


def target_cost(target: str) -> TargetCost:
    """Cost of a Hugging Face causal LM (folder or name); only its config is read. Raises what that raises."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(target)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    is_dense = not any(getattr(text, name, None) for name in EXPERTS)
    decoder = DecoderCost(
        flops_per_row=2 * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)),
        flops_per_row_and_key=4 * text.num_hidden_layers * text.num_attention_heads * head_dim,
    )
    return TargetCost(
        params=sum(p.numel() for p in model.parameters()),
        embedding_params=model.get_input_embeddings().weight.numel(),
        decoder=decoder if is_dense else None,
        is_read_whole=is_dense and not _is_quantized(target, config),
    )


def _is_quantized(target: str, config: Any) -> bool:
    """Whether a checkpoint says that its weights are stored in fewer bits; older ones of ModelOpt say it in a file."""
    return bool(getattr(config, "quantization_config", None)) or (Path(target) / "hf_quant_config.json").is_file()


def drafter_cost(path: str, dtype: torch.dtype = torch.bfloat16) -> DrafterCost:
    """Cost of the drafter in a folder, served in `dtype` but for matrices stored in fewer bits. Raises ValueError for a
    broken one."""
    drafter = drafter_shapes(path, dtype)
    return family(drafter.kind).count(drafter, dtype.itemsize)


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Costs of the models of a sweep; drafters by label. `dtype`: the one that they are served in."""

    target: TargetCost
    drafters: Mapping[str, DrafterCost]
    dtype: torch.dtype = torch.bfloat16


def read_costs(
    target: str, drafters: Mapping[str, str], dtype: str | None = None, settings: Mapping[str, Any] | None = None
) -> ModelCosts | None:
    """Count the target and {label: drafter folder}, served in `dtype` (None: 16 bits) under these settings of SGLang's;
    None, with a warning, where the target's config cannot be read."""
    try:
        counted = target_cost(target)
    except (OSError, ValueError) as error:
        logger.warning("MBSU and FLOPs are left out, target %s cannot be counted: %s", target, error)
        return None
    settings = settings or {}
    is_quantized = any(settings.get(name) not in (None, False, "", "unquant") for name in QUANTIZING)
    if is_quantized or settings.get("load_format") == "bitsandbytes":
        counted = replace(counted, is_read_whole=False)
    served = getattr(torch, dtype or "", torch.bfloat16)
    return ModelCosts(
        target=counted,
        drafters={label: drafter_cost(path, served) for label, path in drafters.items()},
        dtype=served,
    )


def step_flops(target: DecoderCost, drafter: DrafterCost | None, shape: StepShape, keys: float) -> float:
    """FLOPs of one verify step of a request with `keys` tokens of context: the target sees every verified token."""
    verified = target.flops(shape.verified, keys)
    return verified if drafter is None else verified + drafter.drafting(shape, keys)


def cost_metrics(
    metrics: Mapping[str, float],
    requests: Sequence[RequestRecord],
    shape: StepShape,
    target: TargetCost,
    drafter: DrafterCost | None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, float]:
    """`gflops_per_token` at the mean context of the requests, and of a drafter `mbsu` and `budget_kappa`; by the pooled
    `tau`.

    `budget_kappa` is SpecFormer's kappa = tau l_d / k: how long the draft is, l_d, over the draft tokens that a step
    verifies, k. It is tau for a chain, and less for a tree, which spends more tokens on the same length.
    """
    out: dict[str, float] = {}
    tau = metrics.get("tau") if drafter is not None else 1.0
    if tau is None:  # no step was ever verified
        return out
    is_known = drafter is None or is_scoring_known(drafter, shape)
    if target.decoder is not None and is_known:
        keys = sum(r.prompt_tokens + r.output_tokens / 2 for r in requests) / len(requests)
        out["gflops_per_token"] = step_flops(target.decoder, drafter, shape, keys) / tau / 1e9
    if drafter is not None:
        out["budget_kappa"] = tau * shape.draft_steps / (shape.verified - 1)
    if drafter is not None and is_known and target.is_read_whole:
        drafted_bytes = drafter.read_bytes(shape, target.embedding_params * dtype.itemsize)
        out["mbsu"] = mbsu(tau, drafted_bytes, target.params * dtype.itemsize)
    return out
