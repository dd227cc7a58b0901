"""Train one drafter with its head, and export it.

recipe.py says how, origin.py makes the drafter of step 0, ttt.py is one batch's loss, acceptance.py measures, trees.py
chooses what is verified, train_state.py survives a kill, group.py adds up what several workers compute, and this file
is the loop that calls them: the same on one worker and on many, on a CPU and on a GPU. Nothing here knows one kind of
drafter or head from another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from rayspec.farm.processes import peak_memory_bytes
from rayspec.provenance import git_state
from rayspec.training.acceptance import Acceptance, greedy_sequences, measure
from rayspec.training.averaging import averaged
from rayspec.training.data.answers import AnswerSet
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.drafter_log import DrafterLog
from rayspec.training.drafter_report import report_files
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.group import ALONE, Group
from rayspec.training.origin import Origin, new_drafter, origin_of
from rayspec.training.recipe import Recipe
from rayspec.training.train_state import Progress, load_state, save_state
from rayspec.training.tree_acceptance import measure_tree
from rayspec.training.ttt import backward_batch, check_prompt_lengths
from sglang_ext.drafters import family
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.checkpoint import save_drafter
from sglang_ext.drafters.training import Batch

TREE_TOPK = 10  # candidates of a position that a tree may take on held-out answers


@lru_cache(maxsize=2)
def _epoch_order(num_sequences: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(num_sequences, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def batch_indices(num_sequences: int, recipe: Recipe, step: int) -> Tensor:
    """Sequences of a step: shuffled anew each epoch, the same for every drafter and for a resumed run."""
    picks = []
    for n in range(step * recipe.batch_size, (step + 1) * recipe.batch_size):
        epoch, place = divmod(n, num_sequences)
        picks.append(_epoch_order(num_sequences, recipe.seed, epoch)[place])
    return torch.stack(picks)


def autocast(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.in_bfloat16(device))


def memory_figures(device: torch.device) -> dict[str, float]:
    """The most memory that this process has held so far, in GiB: of a GPU what PyTorch has allocated there, else the
    resident set; nothing where the kernel does not tell."""
    if device.type == "cuda":
        return {"peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}
    peak = peak_memory_bytes([psutil.Process()])
    return {} if peak is None else {"peak_memory_gib": peak / 2**30}


def training_steps(drafter: Drafter, recipe: Recipe) -> int:
    """Draft positions that are trained."""
    return family(drafter.kind).training.draft_steps(drafter.config, recipe)


class Update(NamedTuple):
    """What an update of all workers found. `loss_K`: mean over its rows at each rollout step, float32."""

    loss_K: Tensor
    figures: dict[str, float]  # what is logged beside
    num_rows: int

    @property
    def logged(self) -> dict[str, float]:
        steps = {f"loss_step_{i}": loss for i, loss in enumerate(self.loss_K.tolist())}
        return self.figures | {"loss": self.loss_K.sum().item()} | steps


def train_step(
    drafter: Drafter,
    target: FrozenTarget,
    batches: Sequence[Batch],
    recipe: Recipe,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    group: Group = ALONE,
) -> Update:
    """One update, of which `batches` are this worker's pieces. Raises FloatingPointError for a gradient that is not
    finite, on all workers."""
    # answers differ in length: the sums of all pieces are divided by the rows of the whole update
    rows = torch.tensor(sum(len(batch.position_N) for batch in batches), device=target.device)
    group.sum_([rows])
    num_rows = int(rows)
    losses = []
    for batch in batches:
        with autocast(recipe, target.device):
            loss = backward_batch(
                drafter,
                target,
                batch,
                num_steps=training_steps(drafter, recipe),
                decay=recipe.ttt_decay,
                reduction=recipe.ttt_reduction,
                chunk_rows=recipe.chunk_rows,
                csra_weight=recipe.csra_weight,
                csra_temperature=recipe.csra_temperature,
                objective=recipe.objective,
                has_hard_labels=recipe.labels == "hard",
                num_rows=num_rows,
            )
        losses.append(loss)
    loss_K = torch.stack([loss.head_K for loss in losses]).sum(dim=0)
    bodies = [torch.stack([loss.body for loss in losses]).sum()] if loss.body is not None else []
    trained = [p for p in drafter.parameters() if p.requires_grad]
    group.sum_([loss_K, *bodies, *(p.grad for p in trained if p.grad is not None)])
    norm = torch.nn.utils.clip_grad_norm_(trained, recipe.clip_norm)
    if not bool(norm.isfinite()):
        raise FloatingPointError(
            f"step {step}: the gradient norm is {norm.item()}; lower recipe.lr"
            + (", or set recipe.bfloat16=false" if recipe.in_bfloat16(target.device) else "")
        )
    lr = recipe.set_lr(optimizers, step)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    figures = {"grad_norm": norm.item(), "lr": lr}
    if loss.csra is not None:
        figures["loss_csra"] = loss.csra.item()
    if bodies:
        figures["loss_body"] = bodies[0].item()
    return Update(loss_K, figures, num_rows)


def train_drafter(
    config: DrafterTrainConfig,
    entry: DrafterEntry,
    target: FrozenTarget,
    answers: AnswerSet,
    held_out: AnswerSet,
    *,
    group: Group = ALONE,
    on_step: Callable[[int], None] = lambda step: None,
) -> Acceptance:
    """Train, or go on training, one drafter, and export it to output_dir/<name>/; returns its held-out acceptance.

    `group`: the workers that call this together, each with its own copy of everything; the first of them writes. All
    evaluate the same, since their layers of the target may be shared out, and nobody would wait less if one did it.
    `on_step` is called with the number of steps done after each; an exception from it leaves a resumable run.
    """
    # what is missing should not wait for the end
    tree = None if entry.tree is None else entry.tree.given(target.info(config.target_name, ()))
    training = _Training(config, entry, target, answers, held_out, group)
    with DrafterLog(config, entry, training.progress, group) as log:
        training.run(log, on_step)
        return training.finish(log, tree)


class _Training:
    """One drafter, from step 0 or the step of its last checkpoint to its folder."""

    def __init__(
        self,
        config: DrafterTrainConfig,
        entry: DrafterEntry,
        target: FrozenTarget,
        answers: AnswerSet,
        held_out: AnswerSet,
        group: Group,
    ) -> None:
        self.config, self.entry, self.target, self.group = config, entry, target, group
        self.answers, self.held_out = answers, held_out
        self.recipe = recipe = config.recipe
        self.origin = origin_of(config, entry, target)
        self.drafter = new_drafter(target, entry, recipe, answers, self.origin).to(target.device)
        group.copy_first_(self.drafter.parameters())
        asked = config.evaluation.draft_steps
        self.draft_steps = min(asked, self.drafter.config.max_draft_steps or asked)  # that are measured
        check_prompt_lengths(answers, training_steps(self.drafter, recipe))
        check_prompt_lengths(held_out, self.draft_steps)
        self.num_steps = recipe.num_steps if any(p.requires_grad for p in self.drafter.parameters()) else 0
        self.optimizers = recipe.make_optimizers(self.drafter)
        self.folder = config.work_folder / "unfinished" / entry.name
        fingerprint = {
            **provenance_of(config, target.sha256, answers),
            "draft_head": entry.draft_head.spec(),
            **entry.asked(),
            **self.origin.provenance,
        }
        found = load_state(self.folder, fingerprint, self.drafter, self.optimizers)
        self.progress = found or Progress(fingerprint=fingerprint)
        _check_same_start(self.progress.step, self.folder, group, target.device)

    def run(self, log: DrafterLog, on_step: Callable[[int], None]) -> None:
        """The steps that are left."""
        progress, every = self.progress, self.config
        shown = {"desc": self.entry.name, "unit": "step", "disable": not self.group.is_writer}
        tokens, since = 0, time.monotonic()
        with tqdm(total=self.num_steps, initial=progress.step, **shown) as bar:
            while progress.step < self.num_steps:
                started = time.monotonic()
                update = self._update()
                tokens += update.num_rows
                if self._is_due(every.log_every) or progress.step == self.num_steps:
                    pace, since, tokens = tokens / (time.monotonic() - since), time.monotonic(), 0
                    log.record(update.logged | {"answer_tokens_per_s": pace, **memory_figures(self.target.device)})
                    bar.set_postfix(loss=f"{update.loss_K[0].item():.3f}", refresh=False)
                progress.seconds += time.monotonic() - started
                bar.update()
                if self._is_due(every.evaluation.every) and progress.step < self.num_steps:
                    begun = time.monotonic()
                    with averaged(self.optimizers):
                        found = self._measured(log, every.evaluation.sequences)
                    bar.write(f"{self.entry.name} step {progress.step}: {summary(found)}")
                    since += time.monotonic() - begun
                if self._is_due(every.checkpoint_every) and progress.step < self.num_steps and self.group.is_writer:
                    save_state(self.folder, progress, self.drafter, self.optimizers)
                on_step(progress.step)

    def finish(self, log: DrafterLog, tree: Any) -> Acceptance:
        """Quantise, find the tree that is asked for unless it is given, measure, export."""
        entry, drafter = self.entry, self.drafter
        with averaged(self.optimizers):
            drafter.lm_head.quantize()
            if entry.tree is not None:
                drafter.draft_tree = self._found_tree() if tree is None else tree
            acceptance = self._measured(log, limit=None)
            with autocast(self.recipe, self.target.device):
                found = _tree_figures(drafter, self.target, self.held_out, self.draft_steps)
            log.tree_measured(found)
            if self.group.is_writer:
                export(
                    self.config,
                    entry,
                    self.origin,
                    drafter,
                    self.target,
                    self.answers,
                    self.held_out,
                    self.progress,
                    acceptance,
                    found,
                )
        return acceptance

    def _is_due(self, every: int) -> bool:
        return self.progress.step % every == 0

    def _update(self) -> Update:
        step, device = self.progress.step, self.target.device
        indices = batch_indices(len(self.answers), self.recipe, step)
        pieces = self.group.part(indices, self.recipe.accumulate)
        batches = [Batch.of(self.answers, piece, device, step) for piece in pieces]
        update = train_step(self.drafter, self.target, batches, self.recipe, self.optimizers, step, self.group)
        self.progress.step = step + 1
        return update

    def _measured(self, log: DrafterLog, limit: int | None) -> Acceptance:
        """Acceptance on `limit` of the held-out greedy sequences, None for all."""
        with autocast(self.recipe, self.target.device):
            found = measure(
                self.drafter,
                self.target,
                self.held_out,
                num_steps=self.draft_steps,
                batch_size=self.config.sequences_at_once,
                chunk_rows=self.recipe.chunk_rows,
                sequences=greedy_sequences(self.held_out)[:limit],
            )
        log.evaluated(found)
        return found

    def _found_tree(self) -> Any:
        assert self.entry.tree is not None, "asked for only where there is one"
        at_once = replace(self.recipe, batch_size=self.config.sequences_at_once, accumulate=1)
        with autocast(self.recipe, self.target.device):
            return self.entry.tree.find(self.drafter, self.target, self.answers, at_once)


def _check_same_start(step: int, folder: Path, group: Group, device: torch.device) -> None:
    """Raise ValueError on a worker that would go on from another step than the first one."""
    first = torch.tensor(step, device=device)
    group.copy_first_([first])
    if int(first) != step:
        raise ValueError(
            f"worker {group.rank} finds the unfinished training in {folder} at step {step}, the first worker at "
            f"{int(first)}; set work_dir to a folder in a file system that all workers share"
        )


def _tree_figures(
    drafter: Drafter, target: FrozenTarget, held_out: AnswerSet, draft_steps: int
) -> dict[str, Any] | None:
    """What the drafter's own tree accepts, as large as it can be; None for a drafter without one, and for one that
    expands its tree pass by pass, which only an engine does."""
    if drafter.draft_tree is None or drafter.config.expands_tree:
        return None
    tree, topk = drafter.draft_tree, min(TREE_TOPK, drafter.lm_head.fewest_candidates(draft_steps))
    proposer = tree.fit(draft_steps, topk, tree.most_nodes(draft_steps, topk), target.device)
    return measure_tree(drafter, proposer, target, held_out, draft_steps=draft_steps).to_dict()


def provenance_of(config: DrafterTrainConfig, target_sha256: str, answers: AnswerSet) -> dict[str, Any]:
    """What must be equal for two drafters to differ in their head alone."""
    return {
        "trained_on": {**answers.provenance(), "target_sha256": target_sha256},
        "recipe": config.recipe.to_dict(),
    }


def export(
    config: DrafterTrainConfig,
    entry: DrafterEntry,
    origin: Origin,
    drafter: Drafter,
    target: FrozenTarget,
    answers: AnswerSet,
    held_out: AnswerSet,
    progress: Progress,
    acceptance: Acceptance,
    tree: dict[str, Any] | None,
) -> Path:
    """Write the drafter folder, its curves beside the weights, whole or not at all."""
    folder = config.output_folder / entry.name
    provenance = {
        **provenance_of(config, target.sha256, answers),
        **origin.provenance,
        **entry.asked(),
        "commit": git_state()[0],
    }
    report = {
        "name": entry.name,
        "draft_head": entry.draft_head.spec(),
        **provenance,
        "held_out": {
            **held_out.provenance(),
            **acceptance.to_dict(),
            **({} if tree is None else {"tree": tree}),
        },
        "training_seconds": round(progress.seconds, 1),
        "evaluations": progress.evaluations,
        "history": progress.history,
    }
    save_drafter(
        folder,
        drafter,
        target.info(config.target_name, drafter.config.tap_layers),
        provenance,
        extras=report_files(report),
        share_with=None if entry.train_body else origin.base,
    )
    return folder


def summary(acceptance: Acceptance) -> str:
    taus = ", ".join(f"{k}: {tau:.3f}" for k, tau in enumerate(acceptance.tau, start=1))
    conditional = " ".join(f"{a:.3f}" for a in acceptance.conditional)
    return f"held-out tau by draft steps {taus}; walked {acceptance.tau_walk:.3f}; conditional acceptance {conditional}"
