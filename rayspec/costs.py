"""What a decoded token costs by count: FLOPs, and bytes read (MBSU). H = hidden size, V = vocabulary.

FLOPs are those of matrix products and of attention, two per multiplication and addition; norms, activations and the
choice of tokens are left out. They count what SGLang computes in a verify step, not what a perfect implementation
would: the drafter's extend runs over every verified token, the accepted ones and the others. How many of these a step
had is counted by an engine with a clock: a CPU verifies no more than the largest tree of a batch, where a tree on an
accelerator is padded to what was asked for. So is how many tokens a head with a router scored.

Heads are asked for their own cost at every draft step; they are kept without weights, as shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayspec.records import RequestRecord
from sglang_ext.drafters.checkpoint import drafter_shapes
from sglang_ext.drafters.independent import IndependentDrafter
from sglang_ext.drafters.last_hidden import LastHiddenDrafter
from sglang_ext.drafters.specformer import SpecFormerDrafter
from sglang_ext.heads import DraftHead, HeadCost
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.heads.quantized import QuantizedMatrix
from sglang_ext.trees import CandidateTree

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DecoderCost:
    """A stack of dense layers: what one row (token) costs, and one key that it attends to."""

    flops_per_row: int
    flops_per_row_and_key: int

    def flops(self, rows: float, keys: float) -> float:
        """Of `rows` rows that each attend to `keys` keys."""
        return rows * (self.flops_per_row + keys * self.flops_per_row_and_key)


@dataclass(frozen=True, kw_only=True)
class TargetCost:
    """`params`: tied matrices once. `decoder` is None for what these counts do not describe (mixtures of experts)."""

    params: int
    embedding_params: int
    decoder: DecoderCost | None


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Rows of a verify step of one request. `draft_steps` 0 is plain decoding. `num_draft_tokens` were asked for, with
    the root. Where an engine counted them: `counted` is what a step verified in the mean, `scored` the tokens that the
    head scored for a row."""

    draft_steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1
    counted: float | None = None
    scored: float | None = None

    @property
    def rows(self) -> list[int]:
        """That the head is asked about at each draft step of a drafter that goes step by step."""
        return [1] + [self.topk] * (self.draft_steps - 1)

    @property
    def verified(self) -> float:
        return self.num_draft_tokens if self.counted is None else self.counted


@dataclass(frozen=True, kw_only=True)
class Eagle3Cost:
    """`params`: body and head, without the token embedding, which an EAGLE-3 drafter takes from its target.
    `body_bytes`: without the head. `fuse_flops`: of turning the taps of a row into its first feature. `head`: shapes.
    """

    params: int
    body_bytes: int
    fuse_flops: int
    layer: DecoderCost
    head: DraftHead | PositionHeads

    def drafting(self, shape: StepShape, keys: float) -> float:
        """FLOPs of one step: the drafter extends by every verified token, scores the last of them, and makes
        draft_steps - 1 further forwards of `topk` rows with their scores."""
        fused = shape.verified * self.fuse_flops
        return _step_by_step(shape, keys, self.layer, self.head) + fused

    def read_bytes(self, shape: StepShape, embedding_bytes: int) -> float:
        """Of one step. The token embedding is counted with the body, at every forward, as VocabTrim counts."""
        return shape.draft_steps * (self.body_bytes + embedding_bytes) + head_cost(self.head, shape.rows, shape).bytes


@dataclass(frozen=True, kw_only=True)
class IndependentCost:
    """`params`: body, head and the token embedding, which is the drafter's own. `body_bytes`: without the head."""

    params: int
    body_bytes: int
    layers: DecoderCost
    head: DraftHead | PositionHeads

    def drafting(self, shape: StepShape, keys: float) -> float:
        """FLOPs of one step: the passes of an EAGLE-3 drafter, with nothing to fuse."""
        return _step_by_step(shape, keys, self.layers, self.head)

    def read_bytes(self, shape: StepShape, embedding_bytes: int) -> float:
        """Of one step; `embedding_bytes` are the target's, and the drafter's own are in its body."""
        return shape.draft_steps * self.body_bytes + head_cost(self.head, shape.rows, shape).bytes


def _step_by_step(shape: StepShape, keys: float, layers: DecoderCost, head: DraftHead | PositionHeads) -> float:
    later = (shape.draft_steps - 1) * shape.topk
    return layers.flops(shape.verified + later, keys) + head_cost(head, shape.rows, shape).flops


def head_cost(head: DraftHead | PositionHeads, rows: Sequence[int], shape: StepShape) -> HeadCost:
    """Of a step that asks the head about so many rows at each draft position."""
    parts = [head.at(i).cost(n, i, shape.scored) for i, n in enumerate(rows)]
    return HeadCost(bytes=sum(part.bytes for part in parts), flops=sum(part.flops for part in parts))


@dataclass(frozen=True, kw_only=True)
class LastHiddenCost:
    """Of a drafter that reads the target's last hidden state alone.

    `position_flops`: of one row at each draft position, its head left out. `reads_path`: whether every node with
    children is a row of its own; otherwise a position is one row. `tree`: None for a chain.
    """

    params: int
    body_bytes: int
    position_flops: tuple[int, ...]
    head: DraftHead | PositionHeads
    reads_path: bool
    tree: CandidateTree | None

    def rows(self, shape: StepShape) -> list[int]:
        """Of each draft position."""
        if self.tree is None or shape.topk == 1:
            return [1] * shape.draft_steps
        fitted = self.tree.fit(shape.draft_steps, shape.topk, shape.num_draft_tokens, torch.device("cpu"))
        return [n if self.reads_path else 1 for n in fitted.rows_by_level()]

    def drafting(self, shape: StepShape, keys: float) -> float:
        """FLOPs of one step."""
        rows = self.rows(shape)
        states = sum(n * flops for n, flops in zip(rows, self.position_flops, strict=False))
        return states + head_cost(self.head, rows, shape).flops

    def read_bytes(self, shape: StepShape, embedding_bytes: int) -> float:
        """Of one step; without an embedding of its own, and the body is read once."""
        return self.body_bytes + head_cost(self.head, self.rows(shape), shape).bytes


@dataclass(frozen=True, kw_only=True)
class SpecFormerCost:
    """`layer`: of a row of the context layer, with what comes before it. `slots_flops`: of one draft up to its SwiGLU,
    for all slots that it was made for. `swiglu_flops`: of one draft position."""

    params: int
    body_bytes: int
    layer: DecoderCost
    slots_flops: int
    swiglu_flops: int
    head: DraftHead | PositionHeads

    def drafting(self, shape: StepShape, keys: float) -> float:
        """FLOPs of one step: the context layer sees every verified token, and one row is drafted from."""
        head = head_cost(self.head, [1] * shape.draft_steps, shape).flops
        return self.layer.flops(shape.verified, keys) + self.slots_flops + shape.draft_steps * self.swiglu_flops + head

    def read_bytes(self, shape: StepShape, embedding_bytes: int) -> float:
        """Of one step; without an embedding of its own, and the body is read once."""
        return self.body_bytes + head_cost(self.head, [1] * shape.draft_steps, shape).bytes


DrafterCost = Eagle3Cost | LastHiddenCost | SpecFormerCost | IndependentCost


def mbsu(tau: float, drafted_bytes: float, target_bytes: float) -> float:
    """Memory-bound speed-up tau / (drafted_bytes / target_bytes + 1), by what one step of drafting reads and one pass
    of the target.

    VocabTrim's tables (Goel et al. 2025) count c gamma for the ratio: gamma draft forwards, one more than the depth of
    an EAGLE-2 tree (SGLang's draft steps), that each read all parameters of the drafter, token embedding and LM head
    included. For one dense head at the target's precision that is the same.
    """
    return tau / (drafted_bytes / target_bytes + 1)


def target_cost(target: str) -> TargetCost:
    """Of a Hugging Face causal language model (folder or name); only its config is read. Raises what that raises."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(target)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    is_dense = not any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    decoder = DecoderCost(
        flops_per_row=2 * sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)),
        flops_per_row_and_key=4 * text.num_hidden_layers * text.num_attention_heads * head_dim,
    )
    return TargetCost(
        params=sum(p.numel() for p in model.parameters()),
        embedding_params=model.get_input_embeddings().weight.numel(),
        decoder=decoder if is_dense else None,
    )


def drafter_cost(path: str, dtype: torch.dtype = torch.bfloat16) -> DrafterCost:
    """Of a drafter folder, served in `dtype` but for matrices stored in fewer bits. Raises ValueError for a broken
    one."""
    drafter = drafter_shapes(path, dtype)
    matrices = [m for m in drafter.modules() if isinstance(m, QuantizedMatrix)]
    head_params = {id(p) for p in drafter.lm_head.parameters()}
    common: dict[str, Any] = {
        "head": drafter.lm_head,
        "params": sum(p.numel() for p in drafter.parameters()) + sum(m.shape.numel() for m in matrices),
        "body_bytes": dtype.itemsize * sum(p.numel() for p in drafter.parameters() if id(p) not in head_params),
    }
    if isinstance(drafter, SpecFormerDrafter):
        return _specformer_cost(drafter, common)
    if isinstance(drafter, LastHiddenDrafter):
        return LastHiddenCost(
            **common,
            position_flops=tuple(drafter.state_flops(i) for i in range(drafter.config.positions)),
            reads_path=drafter.reads_path,
            tree=drafter.draft_tree,
        )
    if isinstance(drafter, IndependentDrafter):
        own = drafter.config
        return IndependentCost(
            **common,
            layers=DecoderCost(
                flops_per_row=_row_flops(drafter.model),
                flops_per_row_and_key=4 * own.num_layers * own.num_attention_heads * own.head_dim,
            ),
        )
    body = drafter.config
    return Eagle3Cost(
        **common,
        fuse_flops=2 * drafter.fc.weight.numel(),
        layer=DecoderCost(
            flops_per_row=_row_flops(drafter.midlayer),
            flops_per_row_and_key=4 * body.num_attention_heads * body.head_dim,
        ),
    )


def _row_flops(*modules: nn.Module) -> int:
    """Of the linear layers, for one row."""
    return 2 * sum(m.weight.numel() for module in modules for m in module.modules() if isinstance(m, nn.Linear))


def _specformer_cost(drafter: SpecFormerDrafter, common: Mapping[str, Any]) -> SpecFormerCost:
    c = drafter.config
    assert drafter.context_attn is not None, "read from a folder"
    per_key = 4 * c.num_attention_heads * c.head_dim
    projection = _row_flops(drafter.position_proj) if c.position_projection else 0
    return SpecFormerCost(
        **common,
        layer=DecoderCost(flops_per_row=_row_flops(drafter.fc, drafter.context_attn), flops_per_row_and_key=per_key),
        slots_flops=projection + c.positions * (_row_flops(drafter.slot_attn) + c.positions * per_key),
        swiglu_flops=_row_flops(drafter.mlp),
    )


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Of the models of a sweep; drafters by label. `dtype`: that they are served in."""

    target: TargetCost
    drafters: Mapping[str, DrafterCost]
    dtype: torch.dtype = torch.bfloat16


def read_costs(target: str, drafters: Mapping[str, str], dtype: str | None = None) -> ModelCosts | None:
    """Count the target and {label: drafter folder}, served in `dtype` (None: 16 bits); None, with a warning, where the
    target's config cannot be read."""
    try:
        counted = target_cost(target)
    except (OSError, ValueError) as error:
        logger.warning("MBSU and FLOPs are left out, target %s cannot be counted: %s", target, error)
        return None
    served = getattr(torch, dtype or "", torch.bfloat16)
    return ModelCosts(
        target=counted,
        drafters={label: drafter_cost(path, served) for label, path in drafters.items()},
        dtype=served,
    )


def step_flops(target: DecoderCost, drafter: DrafterCost | None, shape: StepShape, keys: float) -> float:
    """Of one verify step of one request whose context is `keys` tokens long: the target sees every verified token."""
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
    if target.decoder is not None:
        keys = sum(r.prompt_tokens + r.output_tokens / 2 for r in requests) / len(requests)
        out["gflops_per_token"] = step_flops(target.decoder, drafter, shape, keys) / tau / 1e9
    if drafter is not None:
        out["budget_kappa"] = tau * shape.draft_steps / (shape.verified - 1)
        drafted_bytes = drafter.read_bytes(shape, target.embedding_params * dtype.itemsize)
        out["mbsu"] = mbsu(tau, drafted_bytes, target.params * dtype.itemsize)
    return out
