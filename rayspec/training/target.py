"""Train the demo target, a small Llama for Python source, from nothing on a CPU.

train() coordinates: target_config holds the settings and the schedule, target_data gives the token windows,
target_checkpoint saves and restores; target_export then writes the folder that ships. B = rows, S = positions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaForCausalLM

from rayspec.config import flatten
from rayspec.home import artifact_uri, prepared_home, tracking_uri
from rayspec.provenance import provenance
from rayspec.training.target_checkpoint import load_checkpoint, save_checkpoint
from rayspec.training.target_config import WINDOW, TargetTrainConfig
from rayspec.training.target_data import TargetData, WindowSampler, held_out_batch, prepare
from rayspec.training.tokenizer import token_byte_lengths

EXPERIMENT = "rayspec-targets"


@dataclass(kw_only=True)
class TrainingState:
    """What a checkpoint carries besides weights and optimiser moments."""

    step: int = 0
    token_budget: int = 0
    decay_fraction: float = 0.0
    train_seconds: float = 0.0
    mlflow_run_id: str | None = None
    curve: list[dict[str, float]] = field(default_factory=list)


def build_model(config: TargetTrainConfig, end_of_text: int) -> LlamaForCausalLM:
    torch.manual_seed(config.seed)
    return LlamaForCausalLM(config.model.to_llama(end_of_text))


def build_optimizers(config: TargetTrainConfig, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon (or AdamW) for the matrices between the layers, AdamW for the tied embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    embedding = [p for name, p in model.named_parameters() if "embed_tokens" in name]
    norms = [p for p in model.parameters() if p.ndim == 1]
    betas = (0.9, 0.95)
    groups: list[dict[str, Any]] = [
        {"params": embedding, "lr": config.embedding_lr, "weight_decay": 0.0},
        {"params": norms, "lr": config.embedding_lr, "weight_decay": 0.0},
    ]
    if config.optimizer == "adamw":
        groups.append({"params": matrices, "lr": config.matrix_lr, "weight_decay": config.weight_decay})
        return [torch.optim.AdamW(groups, betas=betas, fused=True)]
    muon = torch.optim.Muon(
        matrices, lr=config.matrix_lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(groups, betas=betas, fused=True)]


def mean_loss(model: LlamaForCausalLM, inputs_BS: Tensor, labels_BS: Tensor, autocast: bool) -> Tensor:
    """Cross-entropy in nats per token; the logits are taken to fp32 first."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = model.model(input_ids=inputs_BS, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.float().flatten(0, 1), labels_BS.flatten())


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM, data: TargetData, *, tokens_per_group: int, seq_len: int, autocast: bool
) -> dict[str, float]:
    """Loss on files never trained on: `{group}_nats_per_token`, `{group}_bits_per_byte`, and `held_out_*` over both."""
    byte_lengths = torch.tensor(token_byte_lengths(data.tokenizer))
    nats, tokens, num_bytes = {}, {}, {}
    for group, stream in data.held_out.items():
        inputs, labels = held_out_batch(stream, tokens_per_group, seq_len)
        if len(inputs):
            chunks = zip(inputs.split(8), labels.split(8), strict=True)
            nats[group] = sum(float(mean_loss(model, x, y, autocast)) * y.numel() for x, y in chunks)
            tokens[group], num_bytes[group] = labels.numel(), int(byte_lengths[labels].sum())
    nats["held_out"], tokens["held_out"] = sum(nats.values()), sum(tokens.values())
    num_bytes["held_out"] = sum(num_bytes.values())
    figures = {f"{group}_nats_per_token": nats[group] / tokens[group] for group in nats}
    figures |= {f"{group}_bits_per_byte": nats[group] / math.log(2) / num_bytes[group] for group in nats}
    return figures


def train(
    config: TargetTrainConfig, data: TargetData | None = None, stop_after_step: int | None = None
) -> TrainingState:
    """Train to the token budget, or go on from the last checkpoint of this run; returns the final state.

    `stop_after_step` ends early with a checkpoint, as an interruption would, for tests.
    """
    torch.set_num_threads(config.num_threads)
    data = data or prepare(config.run_dir, config.corpus, config.model.vocab_size, config.tokenizer_bytes, config.seed)
    model = build_model(config, data.tokenizer.eos_token_id)
    optimizers = build_optimizers(config, model)
    checkpoint = config.run_dir / "checkpoint.safetensors"
    state = TrainingState(**(load_checkpoint(checkpoint, asdict(config), model, optimizers) or {}))
    _check_schedule(config, state)
    state.token_budget, state.decay_fraction = config.token_budget, config.decay_fraction
    peak_lrs = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    sampler = WindowSampler(data.train, config.seed)
    loss_fn: Callable[..., Tensor] = torch.compile(mean_loss, dynamic=False) if config.compile else mean_loss
    rows_per_batch = config.batch_tokens // WINDOW
    started = time.monotonic() - state.train_seconds
    last_eval = last_save = time.monotonic()
    recent_losses: list[float] = []

    def save() -> None:
        state.train_seconds = time.monotonic() - started
        save_checkpoint(checkpoint, asdict(config), model, optimizers, asdict(state))

    with _mlflow_run(config, state) as log_metrics:
        progress = tqdm(
            total=config.total_steps * config.batch_tokens,
            initial=state.step * config.batch_tokens,
            unit="tok",
            unit_scale=True,
            mininterval=10,
            smoothing=0.05,
        )
        while state.step < config.total_steps:
            factor = config.lr_factor_at(state.step)
            for optimizer, peaks in zip(optimizers, peak_lrs, strict=True):
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * factor
            seq_len = config.seq_len_at(state.step)
            inputs, labels = sampler.batch(state.step * rows_per_batch, rows_per_batch, seq_len)
            loss = loss_fn(model, inputs, labels, config.autocast)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip, error_if_nonfinite=True)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            state.step += 1
            recent_losses.append(loss.item())
            progress.update(config.batch_tokens)
            progress.set_postfix(loss=f"{sum(recent_losses[-20:]) / len(recent_losses[-20:]):.3f}", refresh=False)
            is_last = state.step in (config.total_steps, stop_after_step)
            if is_last or state.step == 1 or time.monotonic() - last_eval > config.eval_every_s:
                figures = held_out_loss(
                    model, data, tokens_per_group=config.held_out_tokens, seq_len=256, autocast=config.autocast
                )
                figures["train_nats_per_token"] = sum(recent_losses) / len(recent_losses)  # mean since the last point
                state.curve.append(
                    {"step": state.step, "tokens": state.step * config.batch_tokens, "lr_factor": factor}
                    | {"seconds": round(time.monotonic() - started, 1)}
                    | {name: round(value, 5) for name, value in figures.items()}
                )
                log_metrics(figures, state.step)
                tqdm.write(f"step {state.step}: " + ", ".join(f"{k} {v:.4f}" for k, v in figures.items()))
                recent_losses.clear()
                last_eval = time.monotonic()
            if is_last or time.monotonic() - last_save > config.checkpoint_every_s:
                save()
                last_save = time.monotonic()
            if state.step == stop_after_step:
                break
        progress.close()
    return state


def _check_schedule(config: TargetTrainConfig, state: TrainingState) -> None:
    """Another length or decay is the same run only while the learning rate is constant under the old and the new."""
    if state.step == 0:
        return
    old = replace(config, token_budget=state.token_budget, decay_fraction=state.decay_fraction)
    if old != config and min(old.lr_factor_at(state.step), config.lr_factor_at(state.step)) < 1:
        raise ValueError(
            f"token_budget and decay_fraction were {old.token_budget} and {old.decay_fraction}, now "
            f"{config.token_budget} and {config.decay_fraction}; they can change only between warm-up and decay, and "
            f"step {state.step} is outside; keep the old ones, or start under another name"
        )


@contextmanager
def _mlflow_run(config: TargetTrainConfig, state: TrainingState) -> Iterator[Callable[[dict[str, float], int], None]]:
    """A function that logs figures to the project's MLflow store, or to nowhere if config.mlflow is off. A resumed run
    goes on in the same curves."""
    if not config.mlflow:
        yield lambda figures, step: None
        return
    from rayspec.tracking import Tracker  # takes seconds to import, so only where it is wanted

    prepared_home()
    tracker = Tracker(tracking_uri(), EXPERIMENT, artifact_uri())
    with tracker.parent(config.name, {"kind": "target", **provenance()}, run_id=state.mlflow_run_id) as run:
        if state.mlflow_run_id is None:
            run.log_params(flatten(config))
            state.mlflow_run_id = run.run_id
        yield run.log_metrics
