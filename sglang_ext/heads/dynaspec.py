"""DynaSpec: a router looks at what enters the drafter's layer and picks the clusters of tokens to score.

s = W2 relu(W1 [norm(E(x)); norm(f)] + b1) + b2 with x the step's input token and f the feature that enters the layer
(the target's at step 0, the drafter's own later), so that the router can run beside the layer.
T = rows, H = hidden, R = router width, M = routed clusters, V = vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayspec_kernels.router_topk import router_scores
from rayspec_kernels.router_topk.reference import Router
from sglang_ext.heads.base import may_fuse
from sglang_ext.heads.clustered import ClusteredConfig, ClusteredHead
from sglang_ext.heads.losses import KL, Objective
from sglang_ext.settings import Count, one_of

RULES = ("fixed", "rounded", "floor")
_EPS = torch.finfo(torch.float32).eps  # what rms_norm takes by itself in float32 and below


@dataclass(frozen=True, kw_only=True, repr=False)
class DynaSpecConfig(ClusteredConfig):
    """`first` clusters at draft step 0 and `later` at step 1; from step 2 on, `rule` says how many: "fixed" (`later`),
    "rounded" (floor((later + t) / (2 t)), the paper's text) or "floor" (later // (2 t), its algorithm box), and never
    fewer than one. `label_tokens` (the paper's L): of the full head, whose clusters the router learns to find."""

    kind: ClassVar[str] = "dynaspec"
    inference_options = ClusteredConfig.inference_options | {"first", "later", "rule"}
    added = frozenset({"label_tokens"})

    first: Count
    later: Count
    rule: Annotated[str, one_of(RULES)] = "rounded"
    router_width: Count
    label_tokens: Count = 10

    def __post_init__(self) -> None:
        for name in ("first", "later"):
            if getattr(self, name) > self.clusters:
                raise ValueError(
                    f"draft_head.{name} must be in 1..{self.clusters} (clusters), got {getattr(self, name)}"
                )

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        super().check_sizes(hidden_size, vocab_size)
        if self.label_tokens > vocab_size:
            raise ValueError(
                f"draft_head.label_tokens must be in 1..{vocab_size} (the vocabulary), got {self.label_tokens}"
            )

    @property
    def starts_at_random(self) -> bool:
        return True  # its router

    def budget(self, step: int) -> int:
        if step == 0:
            return self.first
        if step == 1 or self.rule == "fixed":
            return self.later
        decayed = (self.later + step) // (2 * step) if self.rule == "rounded" else self.later // (2 * step)
        return max(1, decayed)


class DynaSpecHead(ClusteredHead):
    projections = ("router_in", "router_out")
    routes = True
    Config = DynaSpecConfig

    def __init__(self, config: DynaSpecConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size)
        self.router_in = self.new_parameter(config.router_width, 2 * hidden_size)
        self.router_in_bias = self.new_parameter(config.router_width)
        self.router_out = self.new_parameter(config.clusters, config.router_width)
        self.router_out_bias = self.new_parameter(config.clusters)

    def init_router(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for weight in (self.router_in, self.router_out):
            nn.init.kaiming_uniform_(weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(self.router_in_bias)
        nn.init.zeros_(self.router_out_bias)

    def route(self, token_embed_TH: Tensor, feature_TH: Tensor, step: int) -> Tensor:
        """Scores of the clusters [T, M]. Both inputs are brought to unit size: their scales differ a hundredfold."""
        H, dtype = self.hidden_size, self.router_in_bias.dtype
        if may_fuse(token_embed_TH, self.router_in_bias):
            router = Router(
                self.stored("router_in"), self.router_in_bias, self.stored("router_out"), self.router_out_bias
            )
            return router_scores(token_embed_TH.to(dtype), feature_TH.to(dtype), router, _EPS)
        x_T2H = torch.cat([F.rms_norm(t, (H,), eps=_EPS) for t in (token_embed_TH, feature_TH)], dim=-1)
        hidden_TR = F.relu(self.project(x_T2H.to(dtype), "router_in") + self.router_in_bias)
        return self.project(hidden_TR, "router_out") + self.router_out_bias

    def cluster_scores(self, hidden_TH: Tensor, routed: Tensor | None) -> Tensor:
        assert routed is not None, "the drafter calls `route` first"
        return routed

    def loss(
        self, hidden_TH: Tensor, step: int, routed: Tensor | None, p_TV: Tensor, objective: Objective = KL
    ) -> Tensor:
        """Multi-label binary cross-entropy of the router, summed over clusters: a cluster is wanted if it holds one of
        the full head's best tokens. Nothing else is trained."""
        scores_TM = self.cluster_scores(hidden_TH, routed).float()
        with torch.no_grad():
            best_TL = self.project(hidden_TH, "weight").topk(self.config.label_tokens, dim=-1).indices
            wanted_TM1 = scores_TM.new_zeros(len(scores_TM), self.config.clusters + 1)
            wanted_TM1.scatter_(1, self.cluster_of[best_TL], 1.0)
        labels_TM = wanted_TM1[:, 1:]  # cluster 0 is scored anyway
        return F.binary_cross_entropy_with_logits(scores_TM, labels_TM, reduction="none").sum(dim=-1)
