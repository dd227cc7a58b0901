"""The recipes for published models: planned at their real sizes, and trained and attached at the tests' own."""

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from answerers import answerer
from planned_home import make_calibrations, make_drafter, make_target, planned_home
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from rayspec.calibration.config import CalibrationConfig, NamedRule
from rayspec.config import load_config
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.prepare import prepare
from rayspec.targets.catalogue import hub_folder
from rayspec.training.data.answers import AnswersConfig, Prompt, TargetName, make_answers
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig
from rayspec.training.drafter_runs import plan, train_all
from rayspec.training.frozen_target import FrozenTarget, target_sha256
from rayspec.training.reckoning import DrafterSize, TargetSize, training_memory
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.heads import parse_head

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
# the sizes of their config.json on the hub
MODELS: dict[str, PreTrainedConfig] = {
    "llama-3.1-8b-instruct": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rope_parameters=LLAMA3, bos_token_id=0, eos_token_id=0,
        architectures=["LlamaForCausalLM"],
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True, max_position_embeddings=40960, sliding_window=None, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, architectures=["Qwen3MoeForCausalLM"],
    ),
    "gpt-oss-20b": GptOssConfig(
        num_hidden_layers=24, num_local_experts=32, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
                         "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096},
        architectures=["GptOssForCausalLM"],
    ),
}  # fmt: skip
TRAIN = ("train", "train_truncated", "heads")
CARD_GIB = 80 * 0.9  # of an 80 GB card, the rest for what the reckoning leaves out
TEMPLATE = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"


def file_of(model: str, name: str) -> Path:
    return RECIPES / model / f"{name}.yaml"


@cache
def training(model: str, name: str) -> DrafterTrainConfig:
    return load_config(DrafterTrainConfig, file_of(model, name))


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One in which both targets were fetched, and all but the last step of the recipes was done."""
    with planned_home(tmp_path_factory.mktemp("home")) as folder:
        for model, config in MODELS.items():
            target = FrozenTarget.without_weights(
                make_target(folder, hub_folder(training(model, "train").target), config)
            )
            make_calibrations(folder, target, load_config(CalibrationConfig, file_of(model, "calibrate")))
            for name in TRAIN:
                for entry in training(model, name).drafters:
                    make_drafter(folder, target, entry, training(model, name))
        yield folder


def test_there_is_a_recipe_for_each_model() -> None:
    rehearsal = "smollm2-135m"  # test_rehearsal_recipe.py
    assert {f.name for f in RECIPES.iterdir()} == {*MODELS, rehearsal}
    assert {f.stem for f in RECIPES.glob("*/*.yaml")} == {*TRAIN, "calibrate", "sweep"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["train", "train_truncated"])  # the base of heads.yaml would be read, gigabytes
def test_training_is_planned_with_its_cost(model: str, name: str, tmp_path: Path) -> None:
    config = load_config(DrafterTrainConfig, file_of(model, name), [f"output_dir={tmp_path}", f"work_dir={tmp_path}"])
    lines = plan(config)
    assert [line.split()[0] for line in lines if line.endswith("to train")] == [e.name for e in config.drafters]
    for entry in config.drafters:
        cost = next(line for line in lines if line.startswith(f"{entry.name}: "))
        assert "GPU hours = (2 Pa x tokens + " in cost
        assert "1.35e+10 tokens (steps x B x L)" in cost  # ten passes over 660000 sequences of 2048
    assert any(line.startswith("answers: 9.72e+08 tokens to write") for line in lines)
    b = config.sequences_at_once
    assert any(line.startswith(f"memory of a training process, b = {b} of B = 64 at once: ") for line in lines)


@pytest.mark.parametrize("model", MODELS)
def test_a_training_fits_an_80_gb_card(model: str) -> None:
    """In bfloat16, as on any GPU; also one of eight, shared out as the recipe says."""
    file = file_of(model, "train")
    (eight,) = re.findall(r"of eight: workers='(.*)' (recipe\.accumulate=\d+)$", file.read_text(), re.M)
    for name in ("train", "train_truncated"):
        for changes in ([], [f"workers={eight[0]}", eight[1]]):
            config = load_config(DrafterTrainConfig, file_of(model, name), ["recipe.bfloat16=true", *changes])
            target = FrozenTarget.without_weights(config.target_folder)
            drafters = [DrafterSize.of(entry, config, target) for entry in config.drafters]
            line, needed = training_memory(config, target, TargetSize.of(target.model), drafters)
            assert needed / 2**30 < CARD_GIB, line
            assert config.sequences_at_once == training(model, "train").sequences_at_once


@pytest.mark.parametrize("model", MODELS)
def test_few_chunks_of_rows_feed_a_gpu(model: str) -> None:
    """The default is for a CPU: each chunk reads and writes the head's gradient, as large as the head."""
    for name in TRAIN:
        config = training(model, name)
        rows = config.sequences_at_once * config.answers.answer_tokens
        assert rows / config.recipe.chunk_rows <= 2
        assert config.recipe.chunk_rows >= 1024
        assert config.recipe.accumulate == training(model, "train").recipe.accumulate


@pytest.mark.parametrize("model", MODELS)
def test_the_sweep_is_planned_with_all_that_is_made(model: str) -> None:
    config = load_config(SweepConfig, file_of(model, "sweep"))
    prepared = prepare(config)
    assert {c.label: c.problem for c in prepared.plan.candidates if c.problem} == {}
    assert set(config.drafters) == {e.name for name in TRAIN for e in training(model, name).drafters}
    assert (prepared.dropped, len(prepared.plan.spans), len(prepared.plan.traffic)) == (0, 5, 2)
    assert "warning" not in prepared.describe()


@pytest.mark.parametrize("model", MODELS)
def test_papers_hyperparameters(model: str) -> None:
    """SlimSpec's: ten epochs in batches of 64, AdamW 4e-4, no decay, clip 0.5, rank H/8; EAGLE-3's seven steps."""
    for name in TRAIN:
        config = training(model, name)
        r = config.recipe
        assert (r.optimizer, r.lr, r.weight_decay, r.clip_norm) == ("adamw", 4e-4, 0.0, 0.5)
        assert (r.batch_size, r.ttt_steps, r.ttt_decay, r.divergence) == (64, 7, 0.8, "kl")
        assert r.num_steps * r.batch_size == 10 * config.answers.count
        assert (r.cut_rows == "keep") == (name == "train_truncated")
        assert config.answers.most_tokens == 2048
    ranks = {e.draft_head.spec().get("rank") for e in training(model, "train").drafters}
    assert MODELS[model].hidden_size // 8 in ranks  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", MODELS)
def test_files_of_a_recipe_agree(model: str) -> None:
    """One set of answers, and heads are attached to what was trained, by lists that were calibrated."""
    configs = [training(model, name) for name in TRAIN]
    assert len({repr((c.target, c.answers, c.held_out, c.engines)) for c in configs}) == 1
    calibrated = load_config(CalibrationConfig, file_of(model, "calibrate"))
    made = {e.name for c in configs for e in c.drafters}
    for entry in (e for c in configs for e in c.drafters):
        assert entry.base is None or entry.base in made
        assert entry.artifacts is None or entry.artifacts in {c.name for c in calibrated.calibrations}
    assert {calibrated.target, load_config(SweepConfig, file_of(model, "sweep")).target} == {configs[0].target}


def toy(model: str, tiny_target_folder: Path, folder: Path) -> Path:
    """The tests' tiny target, with a chat template; as wide and deep, of GPT-OSS's architecture for its recipe."""
    shutil.copytree(tiny_target_folder, folder)
    if model == "gpt-oss-20b":
        tiny = LlamaConfig.from_pretrained(folder)
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "max_position_embeddings", "initializer_range", "bos_token_id",
                 "eos_token_id")  # fmt: skip
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8}
        config = GptOssConfig(**{name: getattr(tiny, name) for name in names}, **experts)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return folder


def scaled(entry: DrafterEntry, model: str) -> DrafterEntry:
    """The same head as a share of the tiny target's 32 and 257."""
    full = MODELS[model]
    shares = {"rank": 32 / full.hidden_size, "size": 257 / full.vocab_size}  # type: ignore[attr-defined]
    head = {k: max(4, round(v * shares[k])) if v and k in shares else v for k, v in entry.draft_head.spec().items()}
    return replace(entry, draft_head=parse_head(head))


def small(config: DrafterTrainConfig, toy: Path, model: str) -> DrafterTrainConfig:
    """The recipe as it is but for its sizes; answers are made here, and no engine is asked at the end."""
    answers = replace(config.answers, count=6, batch_size=6, max_prompt_tokens=24, answer_tokens=20)
    sizes: dict[str, Any] = {"num_steps": 2, "batch_size": 3, "accumulate": 2, "warmup_steps": 1, "chunk_rows": 16}
    return replace(
        config,
        target=str(toy),
        work_dir=str(toy.parent / "work"),
        answers=answers,
        held_out=replace(config.held_out, count=4, batch_size=4, max_prompt_tokens=24, answer_tokens=20),
        recipe=replace(config.recipe, **sizes, bfloat16=False),
        evaluation=EvaluationConfig(draft_steps=config.evaluation.draft_steps, every=2, sequences=2, served_prompts=0),
        drafters=[scaled(entry, model) for entry in config.drafters],
        mlflow=False,
    )


def write_answers(config: DrafterTrainConfig) -> None:
    toy = Path(config.target)
    target = FrozenTarget.load(toy, torch.float32)
    sets: dict[str, AnswersConfig] = {"answers": config.answers, "held_out": config.held_out}
    for n, (name, settings) in enumerate(sets.items()):
        generator = torch.Generator().manual_seed(n)
        rows = [torch.randint(1, 257, (10 + i,), generator=generator).tolist() for i in range(settings.count)]
        prompts = [Prompt(str(ids), ids) for ids in rows]
        make_answers(
            config.work_folder / name, TargetName(toy.name, target_sha256(toy)), settings, prompts, answerer(target)
        )


@pytest.mark.parametrize("model", ["llama-3.1-8b-instruct", "gpt-oss-20b"])  # Qwen3's differs in sizes alone
def test_the_recipe_runs_at_toy_size(model: str, tiny_target_folder: Path, home: Path, tmp_path: Path) -> None:
    """Train, then lists, then what is made of them: the code that would run at the real sizes, engines apart."""
    folder = toy(model, tiny_target_folder, tmp_path / f"toy-{model}")
    configs = [small(training(model, name), folder, model) for name in TRAIN]
    write_answers(configs[0])
    full = load_config(CalibrationConfig, file_of(model, "calibrate"))
    share = 257 / MODELS[model].vocab_size  # type: ignore[attr-defined]
    rules = [
        NamedRule(name=c.name, source=c.source, rule=replace(c.rule, top_k=round(c.rule.top_k * share)))
        for c in full.calibrations
    ]
    made_for = replace(full, target=str(folder), calibrations=rules)
    make_calibrations(home, FrozenTarget.without_weights(folder), made_for)
    for config in configs:
        lines = plan(config)
        assert any("GPU hours" in line for line in lines)
        found = train_all(config)
        assert set(found) == {e.name for e in config.drafters}
        assert all(a is not None and 1 <= a.tau[0] <= 2 for a in found.values())
        for entry in config.drafters:
            _, info = load_drafter(config.output_folder / entry.name)
            assert info.head.spec()["kind"] == entry.draft_head.kind
        assert train_all(config) == dict.fromkeys(found), "a second run makes nothing again"
