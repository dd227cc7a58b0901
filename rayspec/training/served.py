"""Checks whether SGLang accepts as many of a finished drafter's drafts as training predicts.

A drafter that was trained on other states, positions or embeddings than an engine gives it drafts worse there, and
nothing but its tau shows it. So a few held-out prompts are answered in SGLang, and teacher forcing goes over the very
tokens that came: the two take as many verify steps, but for rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rayspec.training.acceptance import greedy_sequences, verify_steps
from rayspec.training.data.answers import AnswerSet
from rayspec.training.data.asking import Request
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint import load_drafter

TOLERANCE = 0.03  # relative to tau

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedTau:
    """Tokens of a verify step behind the first token of each answer: as SGLang counted, and by teacher forcing."""

    served: float
    predicted: float
    tokens: int

    @property
    def agrees(self) -> bool:
        return abs(self.served / self.predicted - 1) <= TOLERANCE

    def __str__(self) -> str:
        return f"tau in SGLang {self.served:.3f}, by training {self.predicted:.3f} (the same {self.tokens} tokens)"


def check_served(
    config: DrafterTrainConfig, entry: DrafterEntry, target: FrozenTarget, held_out: AnswerSet
) -> ServedTau | None:
    """Answer the held-out prompts with the exported drafter. A difference, and an engine that fails, is a warning: the
    drafter is there. None without prompts to ask, and for a drafter with a tree, which teacher forcing does not follow.
    """
    from rayspec.farm.runtime import EngineFailed  # with Ray, a second

    folder = config.output_folder / entry.name
    drafter, info = load_drafter(folder, stop_ids=target.eos_ids)
    count = config.evaluation.served_prompts
    if not count or info.tree is not None:
        return None
    asked = config.evaluation.draft_steps
    draft_steps = min(asked, drafter.config.max_draft_steps or asked)
    greedy = greedy_sequences(held_out)[:count].tolist()
    prompts = [held_out.token_ids_NL[n, : held_out.prompt_length_N[n]].tolist() for n in greedy]
    try:
        with target.set_aside():  # an engine on a GPU wants all of its memory
            answers, steps = _serve(config, folder, prompts, draft_steps, target.eos_ids)
    except EngineFailed as error:
        logger.warning("%s: was trained, but not served by SGLang: %s", entry.name, error)
        return None
    predicted = verify_steps(
        drafter.to(target.device),
        target,
        answers,
        num_steps=draft_steps,
        batch_size=config.sequences_at_once,
        chunk_rows=config.recipe.chunk_rows,
    )
    tokens = answers.num_answer_tokens - len(answers)
    if not steps or not sum(predicted):
        return None
    found = ServedTau(tokens / steps, tokens / sum(predicted), tokens)
    if not found.agrees:
        logger.warning(
            "%s: %s differ by more than %.0f%%, so an engine gives this drafter something else than training did; "
            "look at the positions, the embeddings and the tapped layers of this target before it is used",
            entry.name,
            found,
            100 * TOLERANCE,
        )
    return found


def _serve(
    config: DrafterTrainConfig, folder: Path, prompts: Sequence[list[int]], draft_steps: int, stop_ids: Sequence[int]
) -> tuple[AnswerSet, int]:
    """(what SGLang answered, verify steps in all). Raises EngineFailed."""
    from rayspec.farm.actor import RuntimeHandle, cluster, node_gpus
    from rayspec.farm.runtime import EngineSpec
    from rayspec.training.data.engine_pool import sampling_params

    longest = max(map(len, prompts)) + config.held_out.answer_tokens + draft_steps
    spec = EngineSpec(
        target=config.target_folder,
        drafter=str(folder),
        draft_steps=draft_steps,
        num_threads=config.engines.num_threads,
        overrides={
            "max_running_requests": len(prompts),
            "max_total_tokens": 2 * len(prompts) * longest,
            "context_length": longest + 8,
            **config.engines.extra,
        },
    )
    log = config.work_folder / "logs" / f"served-{folder.name}.log"
    with cluster(None, min_cpus=config.engines.num_cpus):
        engine = RuntimeHandle(
            spec,
            log,
            num_cpus=config.engines.num_cpus,
            num_gpus=config.engines.gpus_each(node_gpus()),
            block_timeout_s=config.engines.batch_timeout_s,
        )
        try:
            engine.finish_start(engine.begin_start(), config.engines.start_timeout_s)
            requests = [Request(ids, 0.0, config.held_out.answer_tokens) for ids in prompts]
            generated = engine.generate(list(prompts), [sampling_params(r, stop_ids) for r in requests])
        finally:
            engine.stop()
    answers = [g.output_ids for g in generated]
    return _as_answers(prompts, answers), sum(g.verify_steps for g in generated)


def _as_answers(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> AnswerSet:
    lengths = torch.tensor([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)])
    prompt_lengths = torch.tensor([len(p) for p in prompts])
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int32)
    for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[n, : lengths[n]] = torch.tensor([*prompt, *answer], dtype=torch.int32)
    places = torch.arange(ids.shape[1])
    return AnswerSet(
        name="served",
        sha256="",
        token_ids_NL=ids,
        loss_mask_NL=(places >= prompt_lengths[:, None]) & (places < lengths[:, None]),
        prompt_length_N=prompt_lengths,
        length_N=lengths,
        temperature_N=torch.zeros(len(prompts)),
    )
