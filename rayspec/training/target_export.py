"""From a finished run to the folder that ships: bf16 weights for Hugging Face and SGLang, and their provenance."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from rayspec.config import to_yaml
from rayspec.training.target import TrainingState, build_model, held_out_loss
from rayspec.training.target_checkpoint import load_checkpoint
from rayspec.training.target_config import TargetTrainConfig
from rayspec.training.target_data import TargetData, prepare, write_json
from rayspec.training.tokenizer import save_tokenizer
from sglang_ext.artefacts import RECIPE, TRAINED_TARGET
from sglang_ext.folders import written_whole

FINAL_HELD_OUT_TOKENS = 131_072  # per group


def export(config: TargetTrainConfig, state: TrainingState, data: TargetData | None = None) -> dict[str, Any]:
    """Write config.export_folder (whole or not at all) from the run's checkpoint; returns what training.json holds."""
    if state.step < config.total_steps:
        raise ValueError(
            f"run '{config.name}' is at step {state.step} of {config.total_steps}; train it to the end first"
        )
    data = data or prepare(config.run_dir, config.corpus, config.model.vocab_size, config.tokenizer_bytes, config.seed)
    end_of_text = data.tokenizer.eos_token_id
    model = build_model(config, end_of_text)
    load_checkpoint(config.run_dir / "checkpoint.safetensors", asdict(config), model, [])
    model.bfloat16()
    model.generation_config = GenerationConfig(
        bos_token_id=end_of_text, eos_token_id=end_of_text, pad_token_id=end_of_text
    )

    final = config.export_folder
    with written_whole(final, TRAINED_TARGET) as folder:
        model.save_pretrained(folder)
        save_tokenizer(data.tokenizer, folder)
        shipped: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        figures = held_out_loss(
            shipped, data, tokens_per_group=FINAL_HELD_OUT_TOKENS, seq_len=config.long_seq_len, autocast=config.autocast
        )
        report = {
            "final": {
                "parameters": sum(p.numel() for p in shipped.parameters()),
                "steps": state.step,
                "tokens": state.step * config.batch_tokens,
                "passes_over_stream": round(state.step * config.batch_tokens / len(data.train), 3),
                "wall_minutes": round(state.train_seconds / 60, 1),
                "exported_bf16": {name: round(value, 4) for name, value in figures.items()},
                "held_out_context": config.long_seq_len,
            },
            "versions": _versions(),
            "curve": state.curve,
        }
        write_json(folder / "training.json", report)
        write_json(folder / "manifest.json", data.manifest)
        (folder / RECIPE).write_text(to_yaml(config))
        plot_loss(state.curve, folder / "loss.png")
        if (final / "README.md").exists():  # the model card is written by a person
            shutil.copy(final / "README.md", folder)
    return report


def plot_loss(curve: Sequence[dict[str, float]], path: Path) -> None:
    """Training and held-out loss over tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    tokens = [point["tokens"] / 1e6 for point in curve]
    for name, label in (
        ("train_nats_per_token", "training (mean since last point)"),
        ("stdlib_nats_per_token", "held out: standard library"),
        ("packages_nats_per_token", "held out: packages"),
    ):
        if curve and name in curve[0]:
            axes.plot(tokens, [point[name] for point in curve], marker=".", label=label)
    axes.set(xlabel="training tokens (millions)", ylabel="loss (nats per token)", ylim=(None, 7))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _versions() -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
        versions["rayspec_commit"] = git.stdout.strip() or "unknown"
    return versions
