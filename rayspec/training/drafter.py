"""Train one draft head with its EAGLE-3 body, and export it.

recipe.py says how, ttt.py is one batch's loss, acceptance.py measures, train_state.py survives a kill, and this file
is the loop that calls them. Nothing here knows one kind of head from another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rayspec.calibration.artifacts import load_artifacts
from rayspec.provenance import git_state
from rayspec.training.acceptance import Acceptance, measure
from rayspec.training.answers import AnswerSet
from rayspec.training.drafter_config import DrafterTrainConfig, NamedHead
from rayspec.training.drafter_log import DrafterLog
from rayspec.training.drafter_report import report_files
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.recipe import Recipe, init_body
from rayspec.training.train_state import Progress, load_state, save_state
from rayspec.training.ttt import Batch, backward_batch, check_prompt_lengths
from sglang_ext.drafters.checkpoint import WEIGHTS, load_drafter, save_drafter, weights_sha256
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.heads import head_config, head_from_target


@dataclass(frozen=True)
class Origin:
    """What a head is made of besides the target: calibration artifacts, and the drafter whose body it takes over."""

    artifacts: Mapping[str, Tensor] = field(default_factory=dict)
    base: Path | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


NOTHING = Origin()


def origin_of(config: DrafterTrainConfig, head: NamedHead, target: FrozenTarget) -> Origin:
    """Read a head's artifacts and find its base. Raises ValueError for artifacts or a base of another target."""
    base = config.base_folder(head)
    provenance: dict[str, Any] = {}
    artifacts: Mapping[str, Tensor] = {}
    if base is not None:
        provenance["base"] = {"drafter": base.name, "sha256": weights_sha256(base / WEIGHTS)}
    if head.artifacts is not None:
        artifacts, provenance["calibration"] = load_artifacts(
            head.artifacts, target.info(config.target_name), target.eos_ids
        )
    return Origin(artifacts, base, provenance)


def new_drafter(
    target: FrozenTarget, head: NamedHead, recipe: Recipe, answers: AnswerSet, origin: Origin = NOTHING
) -> Eagle3Drafter:
    """A drafter at step 0: the head made from the target's and the body from the seed, or both from the base, whose
    parameters are then frozen. Raises ValueError."""
    if origin.base is not None:
        return _drafter_on_base(target, head, origin)
    probe = Batch.of(answers, torch.arange(min(8, len(answers))))
    taps, _ = target.features(probe.ids_BT)
    deepest = taps[probe.sequence_N, probe.position_N, -target.model.config.hidden_size :]
    tap_rms = deepest.float().pow(2).mean().sqrt().item()
    lm_head = head_from_target(head.draft_head, target.head_VG.float(), origin.artifacts)
    drafter = Eagle3Drafter(target.drafter_config(recipe.intermediate_size), lm_head)
    init_body(drafter, target.final_norm_G.float(), tap_rms, recipe.seed)
    return drafter


def _drafter_on_base(target: FrozenTarget, head: NamedHead, origin: Origin) -> Eagle3Drafter:
    assert origin.base is not None, "the caller looked"
    drafter, info = load_drafter(origin.base, stop_ids=target.eos_ids)
    if info.target is not None:
        info.target.check_served_with(target.info(), str(origin.base))
    drafter.requires_grad_(False)
    body, found = drafter.config, drafter.lm_head.config
    kind, wanted = head_config(head.draft_head, hidden_size=body.hidden_size, vocab_size=body.vocab_size)
    if kind is type(drafter.lm_head) and found.weight_format is None:
        knobs = {name: getattr(wanted, name) for name in wanted.knobs}
        if replace(found, **knobs) == wanted:  # the same head with other knobs
            drafter.lm_head.config = wanted
            return drafter
    if info.head != {"kind": "full"}:
        raise ValueError(
            f"heads[{head.name}].base is {origin.base}, whose head is {dict(info.head)}; a base needs a full head, "
            f"whose rows the new head takes over, or the same head up to {', '.join(sorted(wanted.knobs))}, "
            "not yet stored in fewer bits"
        )
    lm_head = head_from_target(head.draft_head, drafter.lm_head.weight.data, origin.artifacts)
    drafter.lm_head = lm_head
    for name, parameter in lm_head.named_parameters():
        parameter.requires_grad_(name not in lm_head.taken_over)
    return drafter


@lru_cache(maxsize=2)
def _epoch_order(num_sequences: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(num_sequences, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def batch_indices(num_sequences: int, recipe: Recipe, step: int) -> Tensor:
    """Sequences of a step: shuffled anew each epoch, the same for every head and for a resumed run."""
    picks = []
    for n in range(step * recipe.batch_size, (step + 1) * recipe.batch_size):
        epoch, place = divmod(n, num_sequences)
        picks.append(_epoch_order(num_sequences, recipe.seed, epoch)[place])
    return torch.stack(picks)


def autocast(recipe: Recipe) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16)


def train_step(
    drafter: Eagle3Drafter,
    target: FrozenTarget,
    batch: Batch,
    recipe: Recipe,
    optimizers: list[torch.optim.Optimizer],
    step: int,
) -> tuple[Tensor, dict[str, float]]:
    """One update; (mean loss of each rollout step [K], what is logged)."""
    with autocast(recipe):
        loss = backward_batch(
            drafter,
            target,
            batch,
            num_steps=recipe.ttt_steps,
            decay=recipe.ttt_decay,
            chunk_rows=recipe.chunk_rows,
            csra_weight=recipe.csra_weight,
            csra_temperature=recipe.csra_temperature,
        )
    norm = torch.nn.utils.clip_grad_norm_([p for p in drafter.parameters() if p.requires_grad], recipe.clip_norm)
    if not bool(norm.isfinite()):
        raise FloatingPointError(
            f"step {step}: the gradient norm is {norm.item()}; lower recipe.lr, or set bfloat16=false"
        )
    lr = recipe.set_lr(optimizers, step)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    figures = {"grad_norm": norm.item(), "lr": lr}
    if loss.csra is not None:
        figures["loss_csra"] = loss.csra.item()
    return loss.head_K, figures


def train_drafter(
    config: DrafterTrainConfig,
    head: NamedHead,
    target: FrozenTarget,
    answers: AnswerSet,
    held_out: AnswerSet,
    *,
    on_step: Callable[[int], None] = lambda step: None,
) -> Acceptance:
    """Train, or go on training, one head, and export it to output_dir/<name>/; returns its held-out acceptance.

    `on_step` is called with the number of steps done after each; an exception from it leaves a resumable run.
    """
    recipe = config.recipe
    check_prompt_lengths(answers, recipe.ttt_steps)
    check_prompt_lengths(held_out, config.evaluation.draft_steps)
    origin = origin_of(config, head, target)
    drafter = new_drafter(target, head, recipe, answers, origin)
    num_steps = recipe.num_steps if any(p.requires_grad for p in drafter.parameters()) else 0
    optimizers = recipe.make_optimizers(drafter)
    folder = config.work_folder / "unfinished" / head.name
    fingerprint = {
        **provenance_of(config, target.sha256, answers),
        **origin.provenance,
        "draft_head": dict(head.draft_head),
    }
    progress = load_state(folder, fingerprint, drafter, optimizers) or Progress(fingerprint=fingerprint)

    def evaluate(limit: int | None) -> Acceptance:
        with autocast(recipe):
            return measure(
                drafter,
                target,
                held_out,
                num_steps=config.evaluation.draft_steps,
                batch_size=recipe.batch_size,
                chunk_rows=recipe.chunk_rows,
                limit=limit,
            )

    with DrafterLog(config, head, progress) as log:
        bar = tqdm(total=num_steps, initial=progress.step, desc=head.name, unit="step")
        tokens, since = 0, time.monotonic()
        while progress.step < num_steps:
            started = time.monotonic()
            step = progress.step
            batch = Batch.of(answers, batch_indices(len(answers), recipe, step))
            loss_K, figures = train_step(drafter, target, batch, recipe, optimizers, step)
            progress.step = step + 1
            tokens += len(batch.position_N)
            if progress.step % config.log_every == 0 or progress.step == num_steps:
                elapsed, since = time.monotonic() - since, time.monotonic()
                figures |= {"loss": loss_K.sum().item(), "answer_tokens_per_s": tokens / elapsed}
                figures |= {f"loss_step_{i}": loss for i, loss in enumerate(loss_K.tolist())}
                tokens = 0
                log.record(figures)
                bar.set_postfix(loss=f"{loss_K[0].item():.3f}", refresh=False)
            progress.seconds += time.monotonic() - started
            bar.update()
            if progress.step % config.evaluation.every == 0 and progress.step < num_steps:
                acceptance = evaluate(config.evaluation.sequences)
                log.evaluated(acceptance)
                bar.write(f"{head.name} step {progress.step}: {summary(acceptance)}")
                since = time.monotonic()
            if progress.step % config.checkpoint_every == 0 and progress.step < num_steps:
                save_state(folder, progress, drafter, optimizers)
            on_step(progress.step)
        bar.close()
        drafter.lm_head.quantize()
        acceptance = evaluate(None)
        log.evaluated(acceptance)
        export(config, head, origin, drafter, target, answers, held_out, progress, acceptance)
    return acceptance


def provenance_of(config: DrafterTrainConfig, target_sha256: str, answers: AnswerSet) -> dict[str, Any]:
    """What must be equal for two drafters to differ in their head alone."""
    return {
        "trained_on": {**answers.provenance(), "target_sha256": target_sha256},
        "recipe": config.recipe.to_dict(),
    }


def export(
    config: DrafterTrainConfig,
    head: NamedHead,
    origin: Origin,
    drafter: Eagle3Drafter,
    target: FrozenTarget,
    answers: AnswerSet,
    held_out: AnswerSet,
    progress: Progress,
    acceptance: Acceptance,
) -> Path:
    """Write the drafter folder, its curves beside the weights, whole or not at all."""
    folder = Path(config.output_dir) / head.name
    provenance = {**provenance_of(config, target.sha256, answers), **origin.provenance, "commit": git_state()[0]}
    report = {
        "name": head.name,
        "draft_head": dict(head.draft_head),
        **provenance,
        "held_out": {**held_out.provenance(), **acceptance.to_dict()},
        "training_seconds": round(progress.seconds, 1),
        "evaluations": progress.evaluations,
        "history": progress.history,
    }
    save_drafter(
        folder,
        drafter,
        target.info(config.target_name),
        provenance,
        extras=report_files(report),
        share_with=origin.base,
    )
    return folder


def summary(acceptance: Acceptance) -> str:
    taus = ", ".join(f"{k}: {tau:.3f}" for k, tau in enumerate(acceptance.tau, start=1))
    conditional = " ".join(f"{a:.3f}" for a in acceptance.conditional)
    return f"held-out tau by draft steps {taus}; walked {acceptance.tau_walk:.3f}; conditional acceptance {conditional}"
