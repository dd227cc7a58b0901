"""What a plan says a training would cost, against counts by hand."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from target_kinds import save_target
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3MoeConfig

from rayspec.training.data.answers import AnswersConfig
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, WorkersConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.recipe import Recipe
from rayspec.training.reckoning import DrafterSize, Gpu, TargetSize, answer_cost, reckon, training_cost, training_memory
from sglang_ext.drafters import parse_drafter
from sglang_ext.heads import parse_head

UNIT = Gpu(name="unit", flops=2.0, bytes_per_s=4.0, share=0.5)  # one FLOP and two bytes a second
FULL = DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))
SLIM = DrafterEntry(name="slim", draft_head=parse_head({"kind": "slimspec", "rank": 4}))
LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8,
)  # fmt: skip
QWEN_30B = Qwen3MoeConfig(
    vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
)  # fmt: skip


def on_meta(config: object) -> object:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_parameters_of_published_models() -> None:
    """Llama-3.1-8B has 8.03e9, Qwen3-30B-A3B 30.5e9 of which a token meets 3.3e9, embedding and head included,
    GPT-OSS-20B 20.9e9 and 3.6e9, without the embedding."""
    llama = TargetSize.of(on_meta(LLAMA_8B))
    assert llama.params == 8_030_261_248
    assert llama.head == 128256 * 4096
    assert llama.active == llama.params - 2 * llama.head
    qwen = TargetSize.of(on_meta(QWEN_30B))
    assert qwen.params == pytest.approx(30.53e9, rel=1e-3)
    experts = 48 * 128 * 3 * 2048 * 768
    assert qwen.active == qwen.params - 2 * qwen.head - experts * 120 // 128
    assert qwen.active + 2 * qwen.head == pytest.approx(3.35e9, rel=1e-2)
    gpt_oss = TargetSize.of(on_meta(GptOssConfig(num_hidden_layers=24, num_local_experts=32)))
    assert gpt_oss.params == pytest.approx(20.91e9, rel=1e-3)
    assert gpt_oss.active + gpt_oss.head == pytest.approx(3.61e9, rel=1e-3)


def config(target: Path, *entries: DrafterEntry, **fields: object) -> DrafterTrainConfig:
    answers = AnswersConfig(count=100, max_prompt_tokens=36, answer_tokens=28, batch_size=10)  # L = 128
    return DrafterTrainConfig(
        target=str(target),
        work_dir=str(target.parent / "work"),
        drafters=list(entries or (FULL,)),
        answers=answers,
        held_out=replace(answers, count=10),
        recipe=Recipe(num_steps=50, batch_size=4, warmup_steps=1, ttt_steps=7, chunk_rows=16, bfloat16=True),
        **fields,  # type: ignore[arg-type]
    )


def test_a_drafter_is_counted_by_what_is_done_with_it(tiny_target_folder: Path) -> None:
    """The tiny target's drafter by hand: H = 32, three taps, 4 heads of 8, 2 of keys, a layer of width 48."""
    target = FrozenTarget.without_weights(tiny_target_folder)
    body = 3 * 32 * 32 + 64 * 32 + 2 * 64 * 16 + 32 * 32 + 3 * 32 * 48 + 4 * 32
    head = 257 * 32
    found = DrafterSize.of(FULL, config(tiny_target_folder), target)
    assert (found.body, found.trained_head, found.frozen_head) == (body, head, 0)
    assert (found.positions, found.reuses, found.attention_heads) == (7, True, 4)
    frozen = DrafterSize.of(replace(FULL, freeze_head=True), config(tiny_target_folder), target)
    assert (frozen.trained_head, frozen.frozen_head) == (0, head)
    slim = DrafterSize.of(SLIM, config(tiny_target_folder), target)
    assert slim.trained_head == 4 * (257 + 32)
    based = DrafterSize.of(replace(SLIM, base="full"), config(tiny_target_folder), target)
    assert (based.is_body_frozen, based.trained, based.is_trained) == (True, 4 * (257 + 32), True)
    cut = replace(FULL, base="full", artifacts="ids", draft_head=parse_head({"kind": "truncated", "size": 64}))
    assert not DrafterSize.of(cut, config(tiny_target_folder), target).is_trained
    heads = DrafterEntry(
        name="m", drafter=parse_drafter({"kind": "medusa", "positions": 3}), draft_head=parse_head({"kind": "full"})
    )
    medusa = DrafterSize.of(heads, config(tiny_target_folder), target)
    assert (medusa.positions, medusa.reuses, medusa.attention_heads) == (3, False, 0)


def test_training_time_is_the_formula(tiny_target_folder: Path) -> None:
    asked = config(tiny_target_folder)
    size = TargetSize(params=1000, active=600, head=200)
    drafter = DrafterSize(
        body=30, trained_head=5, frozen_head=7, is_body_frozen=False, positions=7, reuses=True, attention_heads=4
    )
    tokens, rows = 50 * 4 * 128, 50 * 4 * 28
    flops = 2 * 600 * tokens + 2 * 200 * rows + 6 * 30 * 7 * tokens + 7 * (6 * 5 + 4 * 7) * rows
    line, hours = training_cost("full", asked, size, drafter, UNIT)
    assert hours == pytest.approx(flops / 3600)
    assert "2.56e+04 tokens (steps x B x L), 5.6e+03 of them answers, K = 7" in line
    once = replace(drafter, reuses=False, is_body_frozen=True)
    flops -= (6 * 7 - 2) * 30 * tokens
    assert training_cost("full", asked, size, once, UNIT)[1] == pytest.approx(flops / 3600)
    nothing = replace(once, trained_head=0)
    assert training_cost("full", asked, size, nothing, UNIT) == ("full: trains nothing", 0.0)


def test_answers_take_the_longer_of_computing_and_reading(tiny_target_folder: Path) -> None:
    answers, size = config(tiny_target_folder).answers, TargetSize(params=1000, active=600, head=200)
    many = answer_cost("answers", answers, size, 10**6, UNIT)[1]
    assert many == pytest.approx(2 * 800 * 100 * 128 / 3600)
    size = replace(size, params=10**5)  # a mixture of experts: much is read for what little a token meets
    alone = answer_cost("answers", answers, size, 1, UNIT)[1]
    assert alone == pytest.approx(100 * 28 * 2 * 10**5 / 2 / 3600)
    assert answer_cost("answers", answers, size, 1, UNIT, share=0.25)[1] == pytest.approx(alone / 4)
    twice = replace(answers, follow_up_share=0.1)
    assert answer_cost("answers", twice, size, 1, UNIT)[1] == pytest.approx(2 * alone)


def test_a_plan_adds_up(tiny_target_folder: Path) -> None:
    lines = reckon(config(tiny_target_folder, FULL, SLIM), FrozenTarget.without_weights(tiny_target_folder))
    hours = [float(re.findall(r"([\d.e+-]+) GPU hours", line)[0]) for line in lines if "GPU hours" in line]
    assert len(hours) == 5  # both sets of answers, both drafters, the sum
    assert hours[-1] == pytest.approx(sum(hours[:-1]), rel=0.01)
    memory = next(line for line in lines if line.startswith("memory"))
    whole, *parts = (float(x) for x in re.findall(r"([\d.e+-]+) GiB", memory)[:-1])
    assert whole == pytest.approx(sum(parts), rel=0.02)
    B, L, G, V = 4, 128, 32, 257
    params = sum(p.numel() for p in FrozenTarget.without_weights(tiny_target_folder).model.parameters())
    body_and_head = DrafterSize.of(FULL, config(tiny_target_folder), FrozenTarget.without_weights(tiny_target_folder))
    wanted = [2 * params, 16 * body_and_head.trained, 9 * B * L * G * 2, 8 * 6 * B * 4 * L * L, 12 * V * 16]
    assert parts == pytest.approx([x / 2**30 for x in wanted], rel=0.01)


@pytest.mark.parametrize(
    ("device", "gib", "warns"), [("auto", 0.001, True), ("auto", 80, False), ("cpu", 0.001, False)]
)
def test_a_gpu_that_is_too_small_is_warned_of(
    tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, gib: float, warns: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=gib * 2**30))
    lines = reckon(config(tiny_target_folder, device=device), FrozenTarget.without_weights(tiny_target_folder))
    warnings = [line for line in lines if line.startswith("warning")]
    assert len(warnings) == warns
    assert all("but the GPU has 0.001 GiB; raise recipe.accumulate, or train by more workers" in w for w in warnings)


def test_chunks_are_no_larger_than_the_rows_at_once(tiny_target_folder: Path) -> None:
    asked = config(tiny_target_folder)
    target = FrozenTarget.without_weights(tiny_target_folder)
    size, drafters = TargetSize.of(target.model), [DrafterSize.of(FULL, asked, target)]
    rows = asked.recipe.batch_size * asked.answers.answer_tokens
    found = [
        training_memory(replace(asked, recipe=replace(asked.recipe, chunk_rows=n)), target, size, drafters)[1]
        for n in (16, rows, 100 * rows)
    ]
    assert found[1] == found[2] == pytest.approx(found[0] + 12 * 257 * (rows - 16))


def test_pieces_and_shared_layers_take_less_memory_of_a_worker(tiny_target_folder: Path) -> None:
    read = FrozenTarget.without_weights(tiny_target_folder)

    def terms(asked: DrafterTrainConfig) -> list[float]:
        memory = next(line for line in reckon(asked, read) if line.startswith("memory"))
        return [float(x) for x in re.findall(r"([\d.e+-]+) GiB", memory)][1:-1]

    alone = config(tiny_target_folder)  # of four sequences an update
    in_layers = sum(p.numel() for p in read.model.get_decoder().layers.parameters())
    shared = replace(alone, workers=WorkersConfig(count=2, shard_target=True))
    in_pieces = replace(shared, recipe=replace(alone.recipe, accumulate=2))
    target, drafter, states, scores, logits = terms(alone)
    assert terms(shared) == pytest.approx(
        [target - in_layers / 2**30, drafter, states / 2, scores / 2, logits], rel=0.01
    )  # two bytes a parameter, half of them
    assert terms(in_pieces)[2:4] == pytest.approx([states / 4, scores / 4], rel=0.01)


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    target = FrozenTarget.without_weights(save_target(tmp_path / "qwen3", "qwen3"))
    size = TargetSize.of(target.model)
    assert size.active == size.params - size.head
    assert size.head == 32 * 64
