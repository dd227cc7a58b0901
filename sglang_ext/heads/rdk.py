"""RDK: gives mass back to the tokens that a reduced head cannot propose, along a fixed affinity between tokens.

q'' = q M with q the base head's distribution at the request's temperature and M [V, V] row-stochastic. The paper's
affinity was not published; ours is one of
- cosine: a token keeps `self_weight` and hands the rest to its nearest neighbours, by the cosine of output-embedding
  rows less their mean row (which a softmax does not see), softmax weights;
- counted: along the states of the full drafter, whose distribution is q_full, a token v hands on a `share` of what the
  base cannot propose where it proposes v, E[q(v) q_full(u)] / E[q(v)] to u outside of the support, and keeps the rest.
  The largest entries of a row are stored, and the others are handed to one distribution for all tokens, so that all of
  it arrives.
affinity.py makes either. T = rows, V = vocabulary, H = hidden, J = neighbours.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

import torch
from pydantic import PlainValidator
from torch import Tensor

from sglang_ext.heads import build_head, head_class, head_from_target, parse_head
from sglang_ext.heads.affinity import count_affinity, nearest_tokens
from sglang_ext.heads.base import NO_TOKEN, Candidates, DraftHead, HeadCost
from sglang_ext.heads.config import HeadConfig
from sglang_ext.heads.losses import KL, Objective
from sglang_ext.settings import Count, one_of

_ONE = 2.0**60  # 1 in fixed-point numbers: a row's sum is at most 1, and 64 bits hold 8
AFFINITIES = ("cosine", "counted")
SELF_WEIGHT, SHARE = 0.9, 0.5


@contextmanager
def _of_the_base() -> Iterator[None]:
    """Errors name the base's settings where they lie."""
    try:
        yield
    except ValueError as error:
        said = str(error)
        is_named = "draft_head" in said
        raise ValueError(
            said.replace("draft_head", "draft_head.base") if is_named else f"draft_head.base: {said}"
        ) from error


def _parse_base(entry: Any) -> HeadConfig:
    with _of_the_base():
        return parse_head(entry)


@dataclass(frozen=True, kw_only=True, repr=False)
class RdkConfig(HeadConfig):
    """`base`: the head whose distribution is redistributed. `self_weight`: what a token keeps
    with affinity cosine (None: 0.9). `share`: of the counted mass that is handed on (None: 0.5). Whole, it would be
    right in the mean, but where nothing was cut all of it is lost: about a half accepts most (docs/heads.md)."""

    kind: ClassVar[str] = "rdk"
    inference_options = HeadConfig.inference_options | {"share"}

    base: Annotated[HeadConfig, PlainValidator(_parse_base)]
    affinity: Annotated[str, one_of(AFFINITIES)] = "cosine"
    neighbours: Count = 8
    self_weight: float | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if self.weight_format is not None:
            raise ValueError(
                "draft_head.weight_format of an rdk head belongs into draft_head.base, whose weights it is"
            )
        if isinstance(self.base, RdkConfig):
            raise ValueError("draft_head.base cannot be another rdk head")
        if self.is_counted:
            if self.self_weight is not None:
                raise ValueError(
                    f"draft_head.self_weight is {self.self_weight}, but with affinity counted each token keeps "
                    "what was counted; leave it out"
                )
            if head_class(self.base.kind).routes:
                raise ValueError(
                    "draft_head.affinity counted needs a base that looks at the hidden state alone, but "
                    f"{self.base.kind} routes before the layer; use affinity cosine"
                )
            if self.share is None:
                object.__setattr__(self, "share", SHARE)
            if not 0.0 <= self.share <= 1.0:  # type: ignore[operator]
                raise ValueError(f"draft_head.share must be in 0..1, got {self.share}")
            return
        if self.share is not None:
            raise ValueError(f"draft_head.share is of affinity counted, got {self.share} with cosine; leave it out")
        if self.self_weight is None:
            object.__setattr__(self, "self_weight", SELF_WEIGHT)
        if not 0.0 < self.self_weight <= 1.0:  # type: ignore[operator]
            raise ValueError(f"draft_head.self_weight must be in (0, 1], got {self.self_weight}")

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        super().check_sizes(hidden_size, vocab_size)
        with _of_the_base():
            self.base.check_sizes(hidden_size, vocab_size)
        if self.neighbours >= vocab_size:
            raise ValueError(f"draft_head.neighbours must be in 1..{vocab_size - 1}, got {self.neighbours}")

    def complete(self, artifacts: Mapping[str, Tensor]) -> Self:
        with _of_the_base():
            return replace(self, base=self.base.complete(artifacts))

    def check_artifacts(self, artifacts: Mapping[str, Tensor], vocab_size: int) -> None:
        with _of_the_base():
            self.base.check_artifacts(artifacts, vocab_size)
        if self.is_counted and "states" not in artifacts:
            raise ValueError(
                "draft_head.affinity counted is counted along a trained drafter with a full head, on the target's "
                "answers; give it both, or use affinity cosine"
            )

    @property
    def is_counted(self) -> bool:
        return self.affinity == "counted"

    @property
    def taken_over(self) -> tuple[str, ...]:
        return tuple(f"base.{name}" for name in self.base.taken_over)

    @property
    def uses_states(self) -> bool:
        return self.is_counted

    @property
    def starts_at_random(self) -> bool:
        return self.base.starts_at_random

    def spec(self) -> dict[str, Any]:
        """The options of the affinity in use. Cosine is left unnamed, so that heads older than `affinity` are known."""
        left_out = {"self_weight"} if self.is_counted else {"affinity", "share"}
        return {name: value for name, value in super().spec().items() if name not in left_out}


class RdkHead(DraftHead):
    """`neighbour_ids` [V, J] and `neighbour_weights` [V, J], shares of what a token hands on. Cosine: their rows sum
    to 1. Counted: to at most 1, the rest follows the distribution `fallback` [V]; a token keeps `kept_share` [V]."""

    Config = RdkConfig
    config: RdkConfig
    neighbour_ids: Tensor
    neighbour_weights: Tensor
    kept_share: Tensor
    fallback: Tensor

    def __init__(self, config: RdkConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size)
        self.base = build_head(config.base, hidden_size=hidden_size, vocab_size=vocab_size)
        self.routes = self.base.routes  # type: ignore[misc]  # set on the instance: it depends on the base
        self.register_buffer("neighbour_ids", torch.full((vocab_size, config.neighbours), -1))
        self.register_buffer("neighbour_weights", torch.full((vocab_size, config.neighbours), float("nan")))
        if config.is_counted:
            self.register_buffer("kept_share", torch.full((vocab_size,), float("nan")))
            self.register_buffer("fallback", torch.full((vocab_size,), float("nan")))

    @classmethod
    def from_target(cls, config: RdkConfig, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        """`artifacts["states"]` [N, H], for counted: what the full head of these rows reads."""
        head = cls.unloaded(config, target_head_VH)
        config.check_artifacts(artifacts, head.vocab_size)
        head.base = head_from_target(config.base, target_head_VH, artifacts)
        if config.is_counted:
            counted = count_affinity(head.base, target_head_VH, artifacts["states"], config.neighbours)
            for name, found in counted.items():
                getattr(head, name).copy_(found)
            return head
        ids_VJ, weights_VJ = nearest_tokens(target_head_VH, config.neighbours)
        head.neighbour_ids.copy_(ids_VJ)
        head.neighbour_weights.copy_(weights_VJ)
        return head

    def pack(self) -> None:
        self.base.pack()

    def expect_rows(self, rows_by_step: Sequence[int]) -> None:
        self.base.expect_rows(rows_by_step)

    def quantize(self, is_loaded: bool = True) -> None:
        self.base.quantize(is_loaded)

    def check(self, stop_ids: Iterable[int] = ()) -> None:
        super().check(stop_ids)
        V = self.vocab_size
        wrong = self.neighbour_ids[(self.neighbour_ids < 0) | (self.neighbour_ids >= V)]
        if len(wrong):
            raise ValueError(
                f"neighbour_ids must be in 0..{V - 1}, got {int(wrong[0])}; make the head again with rayspec train"
            )
        sums_V = self.neighbour_weights.float().sum(dim=1)
        # the weights are stored in bfloat16, whose rounding `distribution` undoes
        is_distribution = (sums_V < 1.02) & ((sums_V > 0.98) | self.config.is_counted)
        if bool((self.neighbour_weights < 0).any()) or not bool(is_distribution.all()):
            bound = "at most 1" if self.config.is_counted else "1"
            raise ValueError(
                f"neighbour_weights must be non-negative rows that sum to {bound}, got sums of "
                f"{float(sums_V.min()):.3g} to {float(sums_V.max()):.3g}; make the head again with rayspec train"
            )
        if self.config.is_counted:
            is_share = bool(((self.kept_share >= 0) & (self.kept_share <= 1)).all())
            if not is_share or bool((self.fallback < 0).any()) or not 0.98 < float(self.fallback.float().sum()) < 1.02:
                raise ValueError(
                    "kept_share must be in 0..1 and fallback a distribution over the vocabulary; make the head again "
                    "with rayspec train"
                )
        self.base.check(stop_ids)

    def fewest_candidates(self, draft_steps: int) -> int:
        return self.base.fewest_candidates(draft_steps)

    def shortlist_size(self, step: int) -> int | None:
        """The base's: what is handed on costs no score."""
        return self.base.shortlist_size(step)

    def scored(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Tensor:
        return self.base.scored(hidden_TH, step, routed)

    def route(self, token_embed_TH: Tensor, feature_TH: Tensor, step: int) -> Tensor | None:
        return self.base.route(token_embed_TH, feature_TH, step)

    def distribution(
        self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None, temperature_T1: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The base's distribution at the temperature, redistributed: q'' at a temperature is not a tempered q''."""
        c = self.config
        q_TS, ids = self.base.distribution(hidden_TH, step, routed, temperature_T1)
        if ids is None:
            ids = torch.arange(self.vocab_size, device=q_TS.device)
        kept_TS = q_TS * (1 - c.share * (1 - self.kept_share[ids].float()) if c.is_counted else c.self_weight)
        handed_TS = q_TS - kept_TS
        # of the candidates alone: [S], or [T, S] where each row has its own
        total_S = self.neighbour_weights[ids].float().sum(dim=-1)
        share_TS = handed_TS / (total_S.clamp(min=1) if c.is_counted else total_S)
        given_TS = torch.zeros_like(handed_TS)

        def given() -> Iterator[tuple[Tensor, Tensor]]:
            # one neighbour of all candidates after the other: J times as much at once is gigabytes for a tree's rows
            for ids_V, weights_V in zip(self.neighbour_ids.T, self.neighbour_weights.T, strict=True):
                part_TS = share_TS * weights_V[ids].float()
                given_TS.add_(part_TS)
                yield part_TS, ids_V[ids].expand_as(part_TS)

        given_TV = sums_of(given(), self.vocab_size)
        # no token comes twice but with a probability of 0, so that these are no sums
        q_TV = torch.zeros_like(given_TV).scatter_add_(1, ids.expand_as(q_TS), kept_TS) + given_TV
        if c.is_counted:
            rest_T1 = (handed_TS - given_TS).sum(dim=-1, keepdim=True).clamp(min=0)
            fallback_V = self.fallback.float()
            q_TV += rest_T1 * (fallback_V / fallback_V.sum())
        return q_TV, None

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        q_TV, _ = self.distribution(hidden_TH, step, routed)
        # a NaN (a base that was not loaded) stays one
        return Candidates(torch.where(q_TV == 0, NO_TOKEN, q_TV.log()).to(hidden_TH.dtype), None)

    def loss(
        self, hidden_TH: Tensor, step: int, routed: Tensor | None, p_TV: Tensor, objective: Objective = KL
    ) -> Tensor:
        return self.base.loss(hidden_TH, step, routed, p_TV, objective)

    def cost(self, rows: int, step: int = 0, scored: float | None = None) -> HeadCost:
        """The base's, and writing each row's distribution; how much is redistributed depends on the base's
        candidates."""
        base = self.base.cost(rows, step, scored)
        return HeadCost(bytes=base.bytes + rows * self.vocab_size * 4, flops=base.flops)


def sums_of(parts: Iterable[tuple[Tensor, Tensor]], num_columns: int) -> Tensor:
    """float32 [T, columns] of pairs of values in [0, 1] and their columns, [T, n] each: the sum of each column, to the
    same bits in any order.

    CUDA adds where it happens to be, and floating-point sums depend on it: tensor-parallel ranks would draft different
    tokens. Integers do not; a float32 of 2^-36 or more is one of these exactly.
    """
    sums_TV: Tensor | None = None
    for values_Tn, columns_Tn in parts:
        fixed_Tn = (values_Tn * _ONE).long()  # a fault, which is no number, stays visible in what tokens keep
        if sums_TV is None:
            sums_TV = fixed_Tn.new_zeros(len(fixed_Tn), num_columns)
        sums_TV.scatter_add_(1, columns_Tn, fixed_Tn)
    assert sums_TV is not None, "there is a neighbour"
    return sums_TV.float() / _ONE
