"""What training asks of a drafter family, and what it hands to it.

B = sequences, T = positions, N = answer positions of the batch, K = draft steps, H = drafter hidden size, G = target
hidden size, V = vocabulary.

A row is a position p whose next token x_{p+1} lies in an answer. Step i predicts it given the tokens that are really
before it, so that one target distribution serves all K steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_ext.drafters.base import Drafter, DrafterConfig
from sglang_ext.drafters.rope import Rope
from sglang_ext.heads import DraftHead


class Target(Protocol):
    """The frozen target."""

    @property
    def num_layers(self) -> int: ...
    @property
    def taps(self) -> tuple[int, ...]:
        """SGLang's default. Raises ValueError where the target has too few layers for them."""
        ...

    @property
    def rope(self) -> Rope:
        """Raises ValueError for a rotary embedding that drafters do not have."""
        ...

    @property
    def head_VG(self) -> Tensor: ...
    @property
    def final_norm_G(self) -> Tensor:
        """Weight of the norm before the LM head."""
        ...

    def sizes(self) -> dict[str, Any]:
        """What a drafter that is shaped like the target has of it, by the names of its config."""
        ...

    def embed(self, ids: Tensor) -> Tensor: ...

    def features(self, ids_BT: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(taps [B, T, taps * G], normed last hidden state [B, T, G])."""
        ...

    def last_hidden(self, ids_BT: Tensor) -> Tensor: ...


class Steps(Protocol):
    """The settings of a recipe that decide on the body."""

    @property
    def ttt_steps(self) -> int: ...
    @property
    def intermediate_size(self) -> int | None: ...


def layer_sizes(target: Target, recipe: Steps | None) -> dict[str, Any]:
    """Sizes of a drafter with a layer shaped like one of the target's, but for an `intermediate_size` of the recipe."""
    own = None if recipe is None else recipe.intermediate_size
    sizes = target.sizes() | {"rope": target.rope.to_json()}
    return sizes | ({} if own is None else {"intermediate_size": own})


def check_no_layer(kind: str, recipe: Steps | None, way_out: str = "leave it out") -> None:
    """Raise ValueError for a recipe that sizes an MLP which a drafter does not take from the target."""
    if recipe is not None and recipe.intermediate_size is not None:
        raise ValueError(
            f"recipe.intermediate_size={recipe.intermediate_size} sizes the MLP of a layer like the target's, which a "
            f"drafter of kind '{kind}' has not; {way_out}"
        )


class Answers(Protocol):
    """Sequences in rows, padded on the right, and which of their tokens are answers."""

    @property
    def token_ids_NL(self) -> Tensor: ...
    @property
    def loss_mask_NL(self) -> Tensor: ...
    @property
    def length_N(self) -> Tensor: ...


@dataclass(frozen=True)
class Batch:
    """Sequences (trimmed to the longest) and their rows as (sequence, position) pairs, in order.

    `numbers` of the sequences in their set and the `step` of training: what is drawn for a sequence hangs on these
    alone, so that an update comes out the same whole, in pieces and spread over workers.
    """

    ids_BT: Tensor  # int64
    sequence_N: Tensor  # int64
    position_N: Tensor  # int64, p
    numbers: tuple[int, ...] = ()  # B of them; none where nothing is drawn
    step: int = 0

    @classmethod
    def of(cls, answers: Answers, indices: Tensor, device: torch.device | None = None, step: int = 0) -> Batch:
        """`device`: where the target computes; None for where the answers are."""
        T = int(answers.length_N[indices].max())
        # row p predicts p + 1, so the mask moves one to the left
        mask_BT = answers.loss_mask_NL[indices, 1:T]
        sequence_N, position_N = mask_BT.nonzero(as_tuple=True)
        ids_BT = answers.token_ids_NL[indices, :T].long()
        numbers = tuple(indices.tolist())
        return cls(ids_BT.to(device), sequence_N.to(device), position_N.to(device), numbers, step)

    @property
    def next_ids_N(self) -> Tensor:
        return self.ids_BT[self.sequence_N, self.position_N + 1]

    def at_answers(self, states_BTG: Tensor) -> Tensor:
        """The states of the rows, [N, G]."""
        return states_BTG[self.sequence_N, self.position_N]

    def rms(self, states_BTG: Tensor) -> float:
        """Root mean square of the rows' states."""
        return self.at_answers(states_BTG).float().pow(2).mean().sqrt().item()


class Rows(NamedTuple):
    """What the head sees of each row, at every step."""

    hidden_KNH: Tensor
    feature_KNH: Tensor | None  # without gradient; None for a head that does not route
    embed_KNH: Tensor  # embedding of the token that a router sees
    last_hidden_NG: Tensor  # the target's, of the position before the predicted token
    next_ids_N: Tensor  # the predicted token, as it stands in the answer
    body_loss_KN: Tensor | None = None  # added to the head's loss, for a body that is trained on more than that

    def chunks(self, size: int) -> Iterator[tuple[slice, Rows]]:
        for start in range(0, len(self.last_hidden_NG), size):
            rows = slice(start, start + size)
            feature = None if self.feature_KNH is None else self.feature_KNH[:, rows]
            yield (
                rows,
                Rows(
                    self.hidden_KNH[:, rows],
                    feature,
                    self.embed_KNH[:, rows],
                    self.last_hidden_NG[rows],
                    self.next_ids_N[rows],
                ),
            )

    def route(self, head: DraftHead, step: int) -> Tensor | None:
        return None if self.feature_KNH is None else head.route(self.embed_KNH[step], self.feature_KNH[step], step)


class Choose(Protocol):
    """Picks the next token (ids int64 [B]) of texts, by what the head reads there and what a router does."""

    def __call__(self, hidden_BH: Tensor, embed_BH: Tensor, feature_BH: Tensor) -> Tensor: ...


class Training(Protocol):
    """The functions of a family's training.py."""

    def config_for(self, target: Target, options: Any, recipe: Steps | None = None) -> DrafterConfig:
        """The config of a new drafter for the target; `options` are the family's own. Raises ValueError for a target
        that the family cannot draft for."""
        ...

    def draft_steps(self, config: DrafterConfig, recipe: Steps) -> int:
        """How many are trained."""
        ...

    def head_rows(self, target: Target, config: DrafterConfig) -> Tensor:
        """The full head that a new drafter's head is made from, float32 [V, H], on the CPU: there every new drafter is
        made, so that one seed gives one drafter wherever it is trained."""
        ...

    def init_body(self, drafter: Drafter, target: Target, probe: Batch, seed: int) -> None:
        """Initialise everything but the head; one seed gives one body, whatever the head. `probe`: some answers."""
        ...

    def roll_out(self, drafter: Drafter, target: Target, batch: Batch, num_steps: int) -> Rows:
        """What the head reads at every row over `num_steps` draft steps, each given the tokens that are really before
        it."""
        ...

    def carried(self, drafter: Drafter, target: Target, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The vector [B, T, H], after each token, from which a family with `max_draft_steps` drafts at once, and the
        target's last hidden state [B, T, G]. Other families lack this function."""
        ...

    def write(
        self, drafter: Drafter, target: Target, ids_BT: Tensor, length_B: Tensor, num_tokens: int, choose: Choose
    ) -> Tensor:
        """Text of the drafter alone, int64 [B, num_tokens]: it goes on after the first `length_B` (at least 2) tokens
        of each row, reading what `choose` picked as it reads its own drafts in service. Families that draft from
        one state of the target, and cannot go on, lack this function."""
        ...
