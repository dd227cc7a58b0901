"""How a drafter is trained: one recipe for every head, so that heads differ in nothing else."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rayspec.config import MAX_SEED
from rayspec.training.averaging import WeightAverage
from rayspec.training.precision import Float32Muon, has_bfloat16
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.layers import is_matrix
from sglang_ext.heads.losses import DIVERGENCES, TOP_K, Objective
from sglang_ext.settings import Settings, require

OPTIMIZERS = ("adamw", "muon")
# the first of each is the default
CHOICES = {
    "divergence": DIVERGENCES,
    "labels": ("soft", "hard"),
    "cut_rows": ("drop", "keep"),
    "ttt_reduction": ("sum", "mean"),
}
MAX_SIZE = 2**24  # of a count or a width; far beyond any use
CSRA_TEMPERATURE = 0.07  # ours: CORAL's is not known to us


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """`optimizer`: muon takes the body's matrices and leaves head, norms and a token embedding to AdamW.

    `divergence`: what the head's distribution is trained for, kl, tv (total variation) or lk (a mixture of both).
    `top_k_weight`: of HASS's further loss on the `top_k` tokens that the target likes best; 0 leaves it out.
    `labels`: soft, the target's distribution; hard, the answer's own token. `cut_rows`: whether a reduced head drops or
    keeps the rows whose best token it cannot propose.
    `ttt_reduction`: the losses of all draft steps are weighted and added up (sum), or that is divided by the sum of the
    weights (mean), which matters where gradients are clipped.
    `csra_weight`: share of CORAL's contrastive loss (csra.py) that is added to the head's own; 0 leaves it out.
    `accumulate`: pieces of an update that each worker computes one after the other, whose gradients add up to those of
    the whole: memory for time. Not part of a drafter's provenance, since it changes no more than how sums are rounded
    (and, under lk, which rows a chunk's mean is over).
    """

    ttt_steps: int = 4  # rollout length in training
    ttt_decay: float = 0.8  # weight of step i is ttt_decay^i
    ttt_reduction: str = "sum"
    divergence: str = Objective.divergence
    top_k_weight: float = 0.0
    top_k: int = TOP_K
    labels: str = "soft"
    cut_rows: str = "drop"
    csra_weight: float = 0.0
    csra_temperature: float = CSRA_TEMPERATURE
    batch_size: int = 8  # sequences of an update, over all workers and pieces
    accumulate: int = 1
    num_steps: int = 1000
    # of 10 million parameters, 60 steps: 5.39 nats with muon, 5.99 (lr 1e-3) and 6.14 (3e-3) with AdamW
    optimizer: str = "muon"
    lr: float = 3e-3  # AdamW's
    muon_lr: float = 4e-2
    warmup_steps: int = 30
    final_lr_share: float = 0.05  # of the peak, at the end of the cosine
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 0.5
    ema: float = 0.0  # decay of an average of the weights, which is then evaluated and exported; 0: the last weights
    intermediate_size: int | None = None  # of the drafter's MLP; None = the target's
    bfloat16: bool | None = None  # autocast; None: where the device has instructions for it (precision.py)
    chunk_rows: int = 256  # answer positions whose logits exist at once
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("ttt_steps", "top_k", "batch_size", "accumulate", "num_steps", "chunk_rows"):
            self._require(name, 1 <= getattr(self, name) <= MAX_SIZE, f"at least 1 and at most {MAX_SIZE}")
        for name, allowed in (CHOICES | {"optimizer": OPTIMIZERS}).items():
            self._require(name, getattr(self, name) in allowed, f"one of {', '.join(allowed)}")
        for name in ("lr", "muon_lr", "clip_norm", "csra_temperature"):
            self._require(name, 0.0 < getattr(self, name) < math.inf, "above 0 and finite")
        for name in ("beta1", "beta2", "ema"):
            self._require(name, 0.0 <= getattr(self, name) < 1.0, "in [0, 1)")
        for name in ("top_k_weight", "csra_weight"):
            self._require(name, 0.0 <= getattr(self, name) < math.inf, "at least 0 (0: off) and finite")
        self._require("weight_decay", 0.0 <= self.weight_decay < math.inf, "at least 0 and finite")
        size = self.intermediate_size
        is_size = size is None or 1 <= size <= MAX_SIZE
        self._require("intermediate_size", is_size, f"in 1..{MAX_SIZE}, or absent for the target's")
        self._require("seed", 0 <= self.seed <= MAX_SEED, f"in 0..{MAX_SEED}")
        self._require("ttt_decay", 0.0 < self.ttt_decay <= 1.0, "in (0, 1]")
        self._require("warmup_steps", 0 <= self.warmup_steps < self.num_steps, f"in 0..{self.num_steps - 1}")
        self._require("final_lr_share", 0.0 <= self.final_lr_share <= 1.0, "in 0..1")
        self._check_top_k()
        self._check_csra()
        if self.accumulate > self.batch_size:
            raise ValueError(
                f"recipe.accumulate={self.accumulate} pieces need as many sequences, but recipe.batch_size is "
                f"{self.batch_size}; lower accumulate"
            )

    def _require(self, name: str, is_valid: bool, allowed: str) -> None:
        require(is_valid, f"recipe.{name}", getattr(self, name), allowed)

    def _check_top_k(self) -> None:
        if self.top_k != TOP_K and not self.top_k_weight:
            raise ValueError(
                f"recipe.top_k={self.top_k} says of which tokens there is a further loss, but recipe.top_k_weight is "
                "0; set top_k_weight, or leave top_k out"
            )
        if self.top_k_weight and self.labels == "hard":
            raise ValueError(
                f"recipe.top_k_weight={self.top_k_weight} weighs tokens by the target's distribution, of which "
                "recipe.labels=hard keeps one; set labels=soft, or top_k_weight=0"
            )

    def _check_csra(self) -> None:
        if self.csra_temperature != CSRA_TEMPERATURE and not self.csra_weight:
            raise ValueError(
                f"recipe.csra_temperature={self.csra_temperature} is of a loss that recipe.csra_weight=0 leaves out; "
                "set csra_weight, or leave csra_temperature out"
            )
        if self.csra_weight and self.accumulate > 1:
            raise ValueError(
                f"recipe.csra_weight={self.csra_weight} compares each row with all others of its update, so that it "
                f"cannot be computed in recipe.accumulate={self.accumulate} pieces; set accumulate=1, or csra_weight=0"
            )
        if self.csra_weight and self.ttt_steps < 2:
            raise ValueError(
                f"recipe.csra_weight={self.csra_weight} aligns a position across rollout steps, so recipe.ttt_steps "
                f"must be at least 2, got {self.ttt_steps}"
            )

    def to_dict(self) -> dict[str, Any]:
        """What a drafter and a training state name as their recipe; an option that is off is left out, so that those
        from before it existed are still recognised."""
        left_out = {"accumulate"} if self.csra_weight else {"accumulate", "csra_weight", "csra_temperature"}
        left_out |= set() if self.ema else {"ema"}
        left_out |= set() if self.top_k_weight else {"top_k_weight", "top_k"}
        left_out |= {name for name in CHOICES if getattr(self, name) == CHOICES[name][0]}
        return {key: value for key, value in asdict(self).items() if key not in left_out}

    def in_bfloat16(self, device: torch.device) -> bool:
        return has_bfloat16(device) if self.bfloat16 is None else self.bfloat16

    @property
    def objective(self) -> Objective:
        return Objective(
            divergence=self.divergence,
            top_k_weight=self.top_k_weight,
            top_k=self.top_k,
            keeps_cut_rows=self.cut_rows == "keep",
        )

    def lr_factor(self, step: int) -> float:
        """Share of the peak learning rate at `step` (0-based): linear warm-up, then a cosine."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.final_lr_share + (1 - self.final_lr_share) * cosine

    def make_optimizers(self, drafter: Drafter) -> list[torch.optim.Optimizer]:
        trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        if not trained:
            return []
        body = [p for name, p in trained.items() if is_matrix(name, p)]
        use_muon = self.optimizer == "muon" and bool(body)
        muon_ids = {id(p) for p in body} if use_muon else set()
        rest = [p for p in trained.values() if id(p) not in muon_ids]
        adamw = torch.optim.AdamW(
            rest, lr=self.lr, betas=(self.beta1, self.beta2), weight_decay=self.weight_decay, fused=True
        )
        kind = torch.optim.Muon if not body or has_bfloat16(body[0].device) else Float32Muon
        muon = [kind(body, lr=self.muon_lr, weight_decay=self.weight_decay)] if use_muon else []
        average = [WeightAverage(trained.values(), self.ema)] if self.ema else []  # of the weights that the others make
        return [adamw, *muon, *average]

    def set_lr(self, optimizers: list[torch.optim.Optimizer], step: int) -> float:
        """Set every group's rate for `step`; returns AdamW's."""
        factor = self.lr_factor(step)
        for optimizer in optimizers:
            peak = self.muon_lr if isinstance(optimizer, torch.optim.Muon) else self.lr
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        return self.lr * factor
