"""The target's trainer on a corpus of a few kilobytes: it learns, it resumes exactly, and its export loads."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from fixture_models import TARGET, prompt_texts
from fixtures.target_trainer.checkpoint import load_checkpoint
from fixtures.target_trainer.config import TargetModelConfig, TargetTrainConfig
from fixtures.target_trainer.data import TargetData, WindowSampler, prepare
from fixtures.target_trainer.export import export
from fixtures.target_trainer.train import build_model, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rayspec.training.data.sources import STDLIB, CorpusConfig
from tests.rayspec.test_corpus import make_document

ROOT = Path(__file__).parents[1]
TINY = TargetTrainConfig(
    name="tiny",
    corpus=CorpusConfig(min_bytes=10, held_out_percent=20),
    model=TargetModelConfig(
        vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48
    ),
    token_budget=12 * 1024,
    batch_tokens=1024,
    seq_len=64,
    long_seq_len=128,
    warmup_tokens=1024,
    matrix_lr=0.01,
    embedding_lr=0.01,
    compile=False,
    num_threads=1,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    return tmp_path


def tiny_data(home: Path, config: TargetTrainConfig) -> TargetData:
    documents = [make_document(home, i, package) for package in (STDLIB, "pkg") for i in range(40)]
    return prepare(config.run_dir, config.corpus, config.model.vocab_size, 10**6, config.seed, documents)


def weights(config: TargetTrainConfig) -> dict[str, torch.Tensor]:
    return load_file(config.run_dir / "checkpoint.safetensors")


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_loss_goes_down(home: Path, optimizer: str) -> None:
    config = replace(TINY, optimizer=optimizer)
    curve = train(config, tiny_data(home, config)).curve
    assert curve[0]["train_nats_per_token"] == pytest.approx(math.log(300), abs=0.1)  # the first batch: a fair guess
    assert curve[-1]["held_out_nats_per_token"] < 3.0


def test_resumed_run_is_bit_identical(home: Path) -> None:
    """Broken off while it warms up, and in its long rows."""
    straight = replace(TINY, name="straight")
    train(straight, tiny_data(home, straight))
    expected = weights(straight)
    for stop in (1, 11):
        broken = replace(TINY, name=f"broken-{stop}")
        train(broken, tiny_data(home, broken), stop_after_step=stop)
        state = train(broken, tiny_data(home, broken))
        assert state.step == broken.total_steps
        found = weights(broken)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=f"{name}, broken off after {stop}")


def test_other_settings_are_refused(home: Path) -> None:
    train(TINY, tiny_data(home, TINY), stop_after_step=1)
    with pytest.raises(ValueError, match=r"matrix_lr was 0\.01, now 0\.1"):
        train(replace(TINY, matrix_lr=0.1), tiny_data(home, TINY))


def test_budget_may_change_only_before_the_decay(home: Path) -> None:
    train(TINY, tiny_data(home, TINY), stop_after_step=3)
    with pytest.raises(ValueError, match="token_budget and decay_fraction were"):
        train(replace(TINY, token_budget=4 * 1024), tiny_data(home, TINY))
    longer = replace(TINY, token_budget=14 * 1024)
    assert train(longer, tiny_data(home, TINY)).step == 14


def test_export_loads_with_equal_logits(home: Path) -> None:
    config = replace(TINY, export_dir=str(home / "out" / "target"))
    data = tiny_data(home, config)
    export(config, train(config, data), data)
    (home / "out" / "target" / "README.md").write_text("card")
    report = export(config, train(config, data), data)  # a second export replaces the first and keeps the card
    assert {p.name for p in (home / "out").iterdir()} == {"target"}
    assert (home / "out" / "target" / "README.md").read_text() == "card"
    assert report["final"]["tokens"] == config.token_budget

    model = build_model(config, end_of_text=0)
    load_checkpoint(config.run_dir / "checkpoint.safetensors", asdict(config), model, [])
    assert AutoModelForCausalLM.from_pretrained(config.export_dir).dtype == torch.bfloat16
    shipped = AutoModelForCausalLM.from_pretrained(config.export_dir, dtype=torch.float32)
    for parameter in model.parameters():  # not model.to(bfloat16), which would round the rotary frequencies as well
        parameter.data = parameter.data.bfloat16().float()
    assert AutoTokenizer.from_pretrained(config.export_dir).encode("x") == data.tokenizer.encode("x")
    tokens = torch.arange(300).view(2, 150)
    torch.testing.assert_close(shipped(tokens).logits, model(tokens).logits, rtol=0, atol=0)


def test_an_export_replaces_nothing_of_others(home: Path) -> None:
    mine = home / "models" / "mine"
    mine.mkdir(parents=True)
    (mine / "model.safetensors").write_bytes(b"weights")
    for place, message in ((mine, "holds model.safetensors and is no target"), (mine / "..", "no folder's own name")):
        config = replace(TINY, export_dir=str(place))
        data = tiny_data(home, config)
        with pytest.raises(ValueError, match=f"cannot write the target .*{message}"):
            export(config, train(config, data), data)
    assert (mine / "model.safetensors").read_bytes() == b"weights"


def test_unfinished_run_is_not_exported(home: Path) -> None:
    data = tiny_data(home, TINY)
    with pytest.raises(ValueError, match="at step 2 of 12"):
        export(TINY, train(TINY, data, stop_after_step=2), data)


def test_every_window_comes_once_a_pass(home: Path) -> None:
    stream = tiny_data(home, TINY).train
    sampler = WindowSampler(stream, seed=0)
    starts = [tuple(sampler.batch(i, 1, 64)[0][0].tolist()) for i in range(sampler.num_windows)]
    assert sampler.num_windows > 1
    inputs, labels = sampler.batch(0, 2, 64)
    assert inputs.shape == labels.shape == (32, 64)
    assert torch.equal(inputs[0, 1:], labels[0, :-1])
    assert len(starts) == sampler.num_windows


def test_learning_rate_schedule() -> None:
    config = replace(TINY, token_budget=100 * 1024, warmup_tokens=10 * 1024, decay_fraction=0.5)
    factors = [config.lr_factor_at(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9:51] == [1.0] * 42
    assert factors[99] == pytest.approx(0.02)


def test_trained_target_predicts_held_out_python() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TARGET), AutoTokenizer.from_pretrained(TARGET)
    nats = []
    for text in prompt_texts(8):
        tokens = torch.tensor([tokenizer.encode(text)])
        nats.append(float(model(tokens, labels=tokens).loss.detach()))
    assert sum(nats) / len(nats) < 6.5  # ln 4096 = 8.3 for a model that knows nothing
