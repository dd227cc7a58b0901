"""Settings of the target's training run, and its schedule as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from transformers import LlamaConfig

from rayspec.home import home
from rayspec.targets.catalogue import models_folder
from rayspec.training.sources import CorpusConfig
from sglang_ext.settings import Settings

WINDOW = 1024  # tokens; the unit of shuffling, cut into WINDOW // seq_len rows, so every sequence length sees one order


MAX_SIZE = 2**24  # of a size; tensors of such sides can still be counted


def _check(is_valid: bool, setting: str, allowed: str, value: object) -> None:
    if not is_valid:
        raise ValueError(f"{setting} must be {allowed}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class TargetModelConfig(Settings):
    """Shape of the Llama. EAGLE-3 taps layers 2, L//2 and L-3, which are three different ones from 8 layers on."""

    vocab_size: int = 16384
    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 688
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        sizes = ("num_heads", "num_kv_heads", "hidden_size", "intermediate_size", "max_position_embeddings")
        for key, most in (("num_layers", 512), *((size, MAX_SIZE) for size in sizes)):
            _check(1 <= getattr(self, key) <= most, f"model.{key}", f"in 1..{most}", getattr(self, key))
        is_even = self.head_dim % 2 == 0
        _check(2 <= self.head_dim <= MAX_SIZE and is_even, "model.head_dim", f"even, in 2..{MAX_SIZE}", self.head_dim)
        _check(0 < self.rope_theta < math.inf, "model.rope_theta", "above 0 and finite", self.rope_theta)
        if not 257 <= self.vocab_size <= 65536:
            raise ValueError(
                f"model.vocab_size must be in 257..65536 (tokens are stored as uint16), got {self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads ({self.num_heads}) must be a multiple of model.num_kv_heads ({self.num_kv_heads})"
            )

    def to_llama(self, end_of_text: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            max_position_embeddings=self.max_position_embeddings,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
        )


@dataclass(frozen=True, kw_only=True)
class TargetTrainConfig(Settings):
    """One run: data, model, optimiser, schedule. The schedule counts tokens, so an interrupted run keeps it."""

    name: str
    token_budget: int
    export_dir: str | None = None  # the folder of the trained model; None = the home folder's models/<name>
    seed: int = 0
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    model: TargetModelConfig = field(default_factory=TargetModelConfig)
    tokenizer_bytes: int = 30_000_000  # training text that the tokenizer is learnt from
    batch_tokens: int = 4096
    seq_len: int = 256
    long_seq_len: int = 512  # the last part of the run, so that positions past seq_len are known
    long_fraction: float = 0.15
    optimizer: str = "muon"  # for the hidden matrices; embeddings and norms always take AdamW
    matrix_lr: float = 0.01
    embedding_lr: float = 0.008
    weight_decay: float = 0.1
    warmup_tokens: int = 150_000
    decay_fraction: float = 0.41  # the last part of the budget, over which the learning rate goes linearly to zero
    grad_clip: float = 1.0
    autocast: bool = True  # bf16 matrix products, fp32 weights
    compile: bool = True
    num_threads: int = 2
    eval_every_s: float = 300.0
    checkpoint_every_s: float = 240.0
    held_out_tokens: int = 16_384  # per group (standard library, packages) at each evaluation during training
    mlflow: bool = True

    def __post_init__(self) -> None:
        is_plain = Path(self.name).name == self.name and self.name not in ("", ".", "..") and len(self.name) <= 200
        _check(is_plain and self.name.isprintable(), "name", "a plain folder name", self.name)
        _check(self.export_dir is None or bool(self.export_dir.strip()), "export_dir", "a folder", self.export_dir)
        longest = self.model.max_position_embeddings
        for key in ("seq_len", "long_seq_len"):
            value = getattr(self, key)
            if value < 1 or WINDOW % value:
                raise ValueError(f"{key} must divide {WINDOW}, got {value}")
            _check(value <= longest, key, f"at most model.max_position_embeddings ({longest})", value)
        for key, least, most in (
            ("seed", 0, 2**32 - 1),
            ("num_threads", 1, 4096),
            ("tokenizer_bytes", 1, 2**48),
            ("warmup_tokens", 0, 2**48),
            ("held_out_tokens", 1, 2**48),
        ):
            _check(least <= getattr(self, key) <= most, key, f"in {least}..{most}", getattr(self, key))
        for key in ("matrix_lr", "embedding_lr", "grad_clip", "eval_every_s", "checkpoint_every_s"):
            _check(0 < getattr(self, key) < math.inf, key, "above 0 and finite", getattr(self, key))
        _check(0 <= self.weight_decay < math.inf, "weight_decay", "at least 0 and finite", self.weight_decay)
        if self.batch_tokens % WINDOW or self.batch_tokens < WINDOW:
            raise ValueError(f"batch_tokens must be a multiple of {WINDOW}, got {self.batch_tokens}")
        if self.token_budget < self.batch_tokens:
            raise ValueError(
                f"token_budget must be at least batch_tokens ({self.batch_tokens}), got {self.token_budget}"
            )
        if self.optimizer not in ("muon", "adamw"):
            raise ValueError(f"optimizer must be one of muon, adamw, got {self.optimizer!r}")
        for key in ("long_fraction", "decay_fraction"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key} must be in [0, 1), got {getattr(self, key)}")

    @property
    def total_steps(self) -> int:
        return self.token_budget // self.batch_tokens

    @property
    def run_dir(self) -> Path:
        return home() / "targets" / self.name

    @property
    def export_folder(self) -> Path:
        return Path(self.export_dir) if self.export_dir else models_folder() / self.name

    def describe(self) -> str:
        """What a run would do, in a line."""
        return (
            f"{self.name}: {self.total_steps} steps of {self.batch_tokens} tokens, in {self.run_dir} -> "
            f"{self.export_folder}"
        )

    def seq_len_at(self, step: int) -> int:
        return self.long_seq_len if step >= self.total_steps * (1 - self.long_fraction) else self.seq_len

    def lr_factor_at(self, step: int) -> float:
        """Linear warm-up, constant, then linear to (nearly) zero at the last step."""
        warmup = (step + 1) * self.batch_tokens / max(self.warmup_tokens, 1)
        decay = (self.total_steps - step) / max(1.0, self.total_steps * self.decay_fraction)
        return min(1.0, warmup, decay)
