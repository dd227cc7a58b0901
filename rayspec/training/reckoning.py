"""What a training would cost, reckoned from its settings before anything runs: tokens, memory, GPU hours.

Every figure is printed with its formula. Sequences are counted at their longest. Matrix products count, 2 FLOPs a
parameter and token forward and 4 backward; attention over the context, norms and the optimizer do not.
Time is that of one kind of GPU at a share of its peak that a good implementation reaches; more GPUs take as many hours
in all.

P = parameters of the target (Pa: those that a token meets, of a mixture of experts), G = its hidden size, L = tokens of
a sequence, A = answer tokens of a sequence, B = sequences of a step, b = those that one worker computes at once, W =
workers, K = draft positions, D = parameters of the
drafter's body, Ht, Hf = trained and frozen parameters of its head, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rayspec.messages import gib
from rayspec.training.data.answers import AnswersConfig, missing_shards
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters import body_for
from sglang_ext.heads import build_head


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """`flops`: dense products in bfloat16 a second; `bytes_per_s`: of its memory; `share`: of both that is reached."""

    name: str
    flops: float
    bytes_per_s: float
    share: float = 0.4

    def hours(self, flops: float) -> float:
        return flops / (self.flops * self.share) / 3600

    def read_hours(self, read_bytes: float) -> float:
        return read_bytes / (self.bytes_per_s * self.share) / 3600


H100 = Gpu(name="H100 SXM", flops=989e12, bytes_per_s=3.35e12)  # NVIDIA's data sheet; the share is an assumption


@dataclass(frozen=True, kw_only=True)
class TargetSize:
    """`params`: all; `active`: those that a token meets, without the head; `head`: of the LM head."""

    params: int
    active: int
    head: int

    @classmethod
    def of(cls, model: Any) -> TargetSize:
        """The size of a model on any device. Experts are told by transformers' names of their parameters."""
        config = model.config.get_text_config()
        parameters = dict(model.named_parameters())
        total = sum(p.numel() for p in parameters.values())
        experts = sum(p.numel() for name, p in parameters.items() if ".experts." in name)
        count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
        idle = experts * (1 - (getattr(config, "num_experts_per_tok", None) or count) / count)
        head = model.get_output_embeddings().weight.numel()
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        looked_up = 0 if tied else head  # rows of the embedding are looked up, not multiplied
        return cls(params=total, active=int(total - idle - head - looked_up), head=head)


@dataclass(frozen=True, kw_only=True)
class DrafterSize:
    """Parameters of a drafter by what is done with them; `positions`: draft positions that are trained; `reuses`:
    whether one body makes all of them, in turn. `attention_heads`: of a body that attends to its own steps, else 0."""

    body: int
    trained_head: int
    frozen_head: int
    is_body_frozen: bool
    positions: int
    reuses: bool
    attention_heads: int

    @property
    def is_trained(self) -> bool:
        return bool(self.trained_head) or not self.is_body_frozen

    @property
    def trained(self) -> int:
        return self.trained_head + (0 if self.is_body_frozen else self.body)

    @classmethod
    def of(cls, entry: DrafterEntry, config: DrafterTrainConfig, target: FrozenTarget) -> DrafterSize:
        own, body = entry.family, body_for(target, entry.drafter, config.recipe)
        sizes = {"hidden_size": body.hidden_size, "vocab_size": body.vocab_size}
        with torch.device("meta"):
            drafter = own.drafter_class(body, body.heads(lambda: build_head(entry.draft_head, **sizes)), None)
            taken_over = drafter.lm_head.at(0).config.taken_over
        heads = dict(drafter.lm_head.named_parameters())
        is_on_base = entry.base is not None and not entry.train_body
        keeps_rows = is_on_base or entry.freeze_head
        frozen = sum(p.numel() for name, p in heads.items() if keeps_rows and name.endswith(taken_over))
        in_heads = sum(p.numel() for p in heads.values())
        return cls(
            body=sum(p.numel() for p in drafter.parameters()) - in_heads,
            trained_head=in_heads - frozen,
            frozen_head=frozen,
            is_body_frozen=is_on_base,
            positions=own.training.draft_steps(body, config.recipe),
            reuses=body.feeds_back,
            attention_heads=getattr(body, "num_attention_heads", 0) if body.feeds_back else 0,
        )


def reckon(config: DrafterTrainConfig, target: FrozenTarget) -> list[str]:
    """Lines of a plan, from the target's sizes alone. Raises ValueError."""
    size = TargetSize.of(target.model)
    lines = [
        f"reckoned for {H100.name} at {H100.share:.0%} of {H100.flops / 1e12:.0f} TFLOP/s and of "
        f"{H100.bytes_per_s / 1e12:.2f} TB/s (docs/training.md): P = {size.params / 1e9:.3g}e9 parameters of the "
        f"target, of which a token meets Pa = {size.active / 1e9:.3g}e9"
    ]
    hours = 0.0
    for name in ("held_out", "answers"):
        settings: AnswersConfig = getattr(config, name)
        share = len(missing_shards(config.work_folder / name, settings)) / settings.num_shards
        line, own = answer_cost(name, settings, size, config.engines.max_running_requests, H100, share)
        lines.append(line)
        hours += own
    drafters = {entry.name: DrafterSize.of(entry, config, target) for entry in config.drafters}
    for name, drafter in drafters.items():
        line, own = training_cost(name, config, size, drafter, H100)
        lines.append(line)
        hours += own
    if config.hidden_states == "offline":
        tokens = sum(s.count * s.most_tokens for s in (config.answers, config.held_out))
        own = H100.hours(2 * size.active * tokens)
        hours += own
        lines.append(
            f"hidden states: {tokens:.3g} tokens, once for all drafters: {_hours(own)} = 2 Pa x tokens / FLOP/s"
        )
    line, needed = training_memory(config, target, size, list(drafters.values()))
    lines += [line, *_too_little(config, needed)]
    lines.append(f"in all {_hours(hours)}, to which evaluation and starts come")
    return lines


def answer_cost(
    name: str, answers: AnswersConfig, target: TargetSize, requests: int, gpu: Gpu, share: float = 1.0
) -> tuple[str, float]:
    """(line, GPU hours) of the `share` of the answers that is missing; `requests` run at once."""
    if answers.as_given:
        return f"{name}: taken as given, the target writes nothing", 0.0
    sequences = answers.count * share
    new, all_tokens = sequences * answers.most_answer_tokens, sequences * answers.most_tokens
    compute = gpu.hours(2 * (target.active + target.head) * all_tokens)
    reading = gpu.read_hours(new / requests * 2 * target.params)
    hours = max(compute, reading)
    line = (
        f"{name}: {new:.3g} tokens to write at most (sequences x answer_tokens), {all_tokens:.3g} with prompts: "
        f"{_hours(hours)} = max(2 (Pa + G V) x tokens / FLOP/s, written / {requests} at once x 2 P bytes / (bytes/s))"
    )
    return line, hours


def training_cost(
    name: str, config: DrafterTrainConfig, target: TargetSize, drafter: DrafterSize, gpu: Gpu
) -> tuple[str, float]:
    """(line, GPU hours) of one drafter."""
    if not drafter.is_trained:
        return f"{name}: trains nothing", 0.0
    r, answers = config.recipe, config.answers
    tokens = r.num_steps * r.batch_size * answers.most_tokens
    rows = r.num_steps * r.batch_size * answers.most_answer_tokens
    passes = drafter.positions if drafter.reuses else 1
    body_flops = (2 if drafter.is_body_frozen else 6) * drafter.body * passes * tokens
    head_flops = drafter.positions * (6 * drafter.trained_head + 4 * drafter.frozen_head) * rows
    is_stored = config.hidden_states == "offline"
    pass_flops, of_pass = (0, "") if is_stored else (2 * target.active * tokens, "2 Pa x tokens + ")
    hours = gpu.hours(pass_flops + 2 * target.head * rows + body_flops + head_flops)
    per_body = f"{2 if drafter.is_body_frozen else 6} D {'K ' if drafter.reuses else ''}x tokens"
    line = (
        f"{name}: {tokens:.3g} tokens (steps x B x L), {rows:.3g} of them answers, K = {drafter.positions}, "
        f"D = {_millions(drafter.body)}, Ht = {_millions(drafter.trained_head)}, "
        f"Hf = {_millions(drafter.frozen_head)}: {_hours(hours)} = ({of_pass}2 G V x answers + {per_body} + "
        "K (6 Ht + 4 Hf) x answers) / FLOP/s"
    )
    return line, hours


def training_memory(
    config: DrafterTrainConfig, target: FrozenTarget, size: TargetSize, drafters: list[DrafterSize]
) -> tuple[str, float]:
    """(line, bytes) of one worker, or of the process that trains alone, with the largest drafter."""
    r, model = config.recipe, target.model.config
    b, L, A = config.sequences_at_once, config.answers.most_tokens, config.answers.most_answer_tokens
    each = config.target_dtype.itemsize
    weights, formula = each * size.params, f"{each} P"
    if config.workers is not None and config.workers.shard_target:
        in_layers = sum(p.numel() for p in target.model.get_decoder().layers.parameters())
        weights = each * (size.params - in_layers + in_layers // config.workers.count)
        formula = f"{each} (P outside of layers + P in layers / W)"
    states = (model.num_hidden_layers + 1) * b * L * model.hidden_size * each
    logits = 3 * min(r.chunk_rows, b * A) * model.vocab_size * 4
    kept = 20 if r.ema else 16
    drafter = max(kept * d.trained + each * d.frozen_head for d in drafters)
    scores = max(8 * (d.positions - 1) * b * d.attention_heads * L * L * d.is_trained for d in drafters)
    answers = 5 * config.answers.count * L
    whole = weights + drafter + states + scores + logits
    terms = [
        f"target {gib(weights)} ({formula})",
        f"drafter {gib(drafter)} ({kept} a trained parameter, {each} a frozen one of a head)",
        f"states of all layers {gib(states)} ((layers + 1) b L G x {each})",
        f"attention of later draft steps {gib(scores)} (8 (K - 1) b heads L^2)",
        f"logits {gib(logits)} (12 V min(chunk_rows, b A))",
    ]
    line = (
        f"memory of a training process, b = {b} of B = {r.batch_size} at once: {gib(whole)} = {' + '.join(terms)}; "
        f"and {gib(answers)} of host memory for the answers (5 count L)"
    )
    return line, whole


def _too_little(config: DrafterTrainConfig, needed: float) -> list[str]:
    """A warning where the GPU has less memory; those of workers are taken to be this machine's kind."""
    if config.training_device.type != "cuda" or not torch.cuda.is_available():
        return []
    there = torch.cuda.get_device_properties(0).total_memory
    if needed <= there:
        return []
    return [
        f"warning: a training process is reckoned to need {gib(needed)}, but the GPU has {gib(there)}; raise "
        "recipe.accumulate, or train by more workers (workers.count, and workers.shard_target for a target that is "
        "most of it)"
    ]


def _hours(hours: float) -> str:
    return f"{hours:.3g} GPU hours"


def _millions(number: int) -> str:
    return f"{number / 1e6:.3g}e6" if number else "0"
