"""Whether an engine draws its drafts from the distribution that the head itself gives, at every draft position.

The number of accepted drafts and the next emitted token follow from the target's distribution p and the drafts'
distribution q alone: P(the first draft is accepted and is v) = min(p, q)(v), P(it is rejected and v is emitted) = max(p
- q, 0)(v). So their counts are held against p by Hugging Face and q by `DraftHead.distribution` in plain torch.

V = vocabulary, R = requests or sequences, S = pairs of tokens, T = tokens of a sequence, K = draft positions,
A = numbers of accepted drafts.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distributions import MIN_P, pooled, sum_of_draws
from torch import Tensor
from toy import DRAFT_STEPS, PROMPTS, Toy, V, filtered

from sglang_ext.adapter.engine import swap_drafter
from sglang_ext.drafters import family
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.eagle import EagleDrafter
from sglang_ext.drafters.independent import IndependentDrafter
from sglang_ext.drafters.shared.features.training import unroll
from sglang_ext.drafters.shared.last_hidden import LastHiddenDrafter

PROMPT = PROMPTS[1]
NEW_TOKENS = 3  # from the prompt, from the first round, and from the second where no draft of the first was accepted


@dataclass(frozen=True)
class Rounds:
    """What requests of PROMPT did at one setting."""

    tokens_RJ: np.ndarray  # the first 3 tokens
    rounds_R: np.ndarray
    correct_R: np.ndarray  # accepted drafts


def run_rounds(engine: Any, settings: Mapping[str, Mapping[str, Any]], *, requests: int) -> dict[str, Rounds]:
    """Seeded requests of all settings, mixed in the same batches."""
    asked = list(settings) * requests
    options = [
        {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "sampling_seed": i} | settings[name]
        for i, name in enumerate(asked)
    ]
    answers = engine.generate(input_ids=[list(PROMPT)] * len(asked), sampling_params=options)
    runs = {}
    for i, name in enumerate(settings):
        mine = answers[i :: len(settings)]
        runs[name] = Rounds(
            np.array([answer["output_ids"] for answer in mine]),
            np.array([answer["meta_info"]["spec_verify_ct"] for answer in mine]),
            np.array([answer["meta_info"]["spec_num_correct_drafts"] for answer in mine]),
        )
    return runs


def check_drafts(
    engine: Any, toy: Toy, folder: Path, settings: Mapping[str, Mapping[str, Any]], *, requests: int
) -> None:
    """That the engine draws this drafter's drafts from its head's distribution at these settings, of which one is
    `warm`, and that drafts of another temperature would be seen."""
    swap_drafter(engine, str(folder))
    drafter, _ = load_drafter(folder)
    runs = run_rounds(engine, settings, requests=requests)
    for name, run in runs.items():
        assert draft_p_value(toy, drafter, run, settings[name]) > MIN_P, name
    assert draft_p_value(toy, drafter, runs["warm"], settings["warm"], drafted_at=0.25) < 1e-6


def draft_p_value(
    toy: Toy, drafter: Drafter, run: Rounds, sampling: Mapping[str, Any], drafted_at: float | None = None
) -> float:
    """Of the first round, whose first draft comes from the prompt's pass, and of the first draft of the second round,
    which comes from the pass after a verification.

    `drafted_at`: the temperature that q is taken at; None for the request's.
    """
    x1_R, x2_R, x3_R = run.tokens_RJ.T
    distribution_VVA = _first_round(*_distributions(toy, drafter, DRAFT_STEPS, 0, sampling, drafted_at))
    again_R = run.rounds_R == 2  # so the first round accepted nothing
    cell_R = x2_R * (DRAFT_STEPS + 1) + np.where(again_R, 0, run.correct_R)
    first = sum_of_draws(cell_R, distribution_VVA.reshape(V, -1)[x1_R])

    p_S1V, q_S1V = _distributions(toy, drafter, 2, 1, sampling, drafted_at)
    distribution_SVA = np.stack([(p_S1V - q_S1V).clip(0)[:, 0], np.minimum(p_S1V, q_S1V)[:, 0]], axis=-1)
    cell_R = x3_R * 2 + (run.correct_R > 0)
    second = sum_of_draws(cell_R[again_R], distribution_SVA.reshape(V * V, -1)[(x1_R * V + x2_R)[again_R]])
    return pooled([first, second])


def _first_round(p_RKV: np.ndarray, q_RKV: np.ndarray) -> np.ndarray:
    """P(next token, accepted drafts | first token), [V, V, A], of R = V^3 sequences in order."""
    both_VVVKV = np.minimum(p_RKV, q_RKV).reshape(V, V, V, DRAFT_STEPS, V)
    first_VV, second_VVV, third_VVVV = both_VVVKV[:, 0, 0, 0], both_VVVKV[:, :, 0, 1], both_VVVKV[:, :, :, 2]
    two_VV = second_VVV.sum(axis=-1)  # P(second draft accepted | the tokens before)
    three_VV = (second_VVV * third_VVVV.sum(axis=-1)).sum(axis=-1)
    rejected_VV = (p_RKV - q_RKV).clip(0).reshape(V, V, V, DRAFT_STEPS, V)[:, 0, 0, 0]
    return np.stack(
        [rejected_VV, first_VV * (1 - two_VV), first_VV * (two_VV - three_VV), first_VV * three_VV], axis=-1
    )


@functools.cache
def _target_part(toy: Toy, free: int) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
    """(ids [R, T], taps, last hidden state, logits [R, T, V]) of all sequences of PROMPT and `free` more tokens."""
    ids_RT = torch.tensor([PROMPT + rest for rest in itertools.product(range(V), repeat=free)])
    taps, last_hidden = toy.target.features(ids_RT)
    return ids_RT, taps, last_hidden, (last_hidden @ toy.target.head_VG.T).double().numpy()


@functools.lru_cache(maxsize=2)
@torch.no_grad()
def _given(toy: Toy, drafter: Drafter, free: int, verified: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What the head of each draft position is given behind PROMPT and its first 1 + `verified` tokens, the last of
    which is the root: its hidden state, and the feature and the embedding that a router sees."""
    ids_RT, taps, last_hidden, _ = _target_part(toy, free)
    last, steps = len(PROMPT) + verified, free - verified
    if isinstance(drafter, LastHiddenDrafter):
        before_RH = family(drafter.kind).training.carried(drafter, toy.target, ids_RT)[0][:, last - 1]
        own_RKH = drafter.begin(before_RH, steps)
        path_RdH = toy.target.embed(ids_RT[:, last : last + steps])
        return [
            (
                drafter.state(step, own_RKH[:, step], path_RdH[:, : step + 1]),
                before_RH,
                path_RdH[:, step if drafter.reads_path else 0],
            )
            for step in range(steps)
        ]
    if isinstance(drafter, IndependentDrafter):
        hidden_RTH, embed_RTH = drafter(ids_RT[:, 1:]), drafter.embed(ids_RT)
        return [(hidden_RTH[:, n - 1], embed_RTH[:, n], embed_RTH[:, n]) for n in range(last, last + steps)]
    states_RTG = last_hidden if isinstance(drafter, EagleDrafter) else taps
    unrolled = unroll(drafter, toy.target, ids_RT, states_RTG, steps)
    return [
        (unrolled.hiddens[s][:, last - 1], unrolled.features[s][:, last - 1], toy.target.embed(ids_RT[:, last + s]))
        for s in range(steps)
    ]


@torch.no_grad()
def _distributions(
    toy: Toy,
    drafter: Drafter,
    free: int,
    verified: int,
    sampling: Mapping[str, Any],
    drafted_at: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    """p and q [R, K, V] of the tokens after PROMPT and its first 1 + `verified` tokens, given the tokens before."""
    ids_RT, _, _, logits_RTV = _target_part(toy, free)
    given = _given(toy, drafter, free, verified)
    temperature_R1 = torch.full((len(ids_RT), 1), drafted_at or sampling.get("temperature", 1.0))
    filters = {name: value for name, value in sampling.items() if name != "temperature"}
    q = []
    for step in range(free - verified):
        head, (hidden_RH, feature_RH, embed_RH) = drafter.lm_head.at(step), given[step]
        routed = head.route(embed_RH, feature_RH, step)
        q_RS, ids = head.distribution(hidden_RH, step, routed, temperature_R1)
        ids_RS = (torch.arange(V) if ids is None else ids).expand_as(q_RS)
        q_RV = torch.zeros(len(q_RS), V).scatter_add_(1, ids_RS, q_RS).double().numpy()
        with np.errstate(divide="ignore"):
            q.append(filtered(np.log(q_RV), **filters))
    return filtered(logits_RTV[:, len(PROMPT) + verified :], **sampling), np.stack(q, axis=1)
