"""Training on a tiny target of each architecture, and the targets that it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_rows import rows_of
from checked_configs import check
from safetensors.torch import load_file, save_file
from small_world import untrained
from target_kinds import GPT_OSS_ROPE, LAYERS, LINEAR, LLAMA3, TARGETS, WORDS, YARN, V, save_target
from torch import Tensor

from rayspec.training.drafter import train_step
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.recipe import Recipe
from sglang_ext.drafters import parse_drafter
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import parse_head

ROPES = {
    "llama3": LLAMA3,
    "mistral": YARN,
    "qwen2": YARN,
    "qwen3_moe": LINEAR,
    "gpt_oss": GPT_OSS_ROPE,
    "gemma3": LINEAR,
}
RECIPE = Recipe(num_steps=2, batch_size=4, warmup_steps=1, ttt_steps=3, bfloat16=False, chunk_rows=16)


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    folder = tmp_path_factory.mktemp("targets") / request.param
    return FrozenTarget.load(save_target(folder, request.param), torch.float32)


def random_ids(rows: int = 4, length: int = 20) -> Tensor:
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(0))


def test_taps_are_the_inputs_of_their_layers(target: FrozenTarget) -> None:
    seen: dict[int, Tensor] = {}

    def keep(i: int) -> Callable[..., None]:
        return lambda module, args, kwargs: seen.update({i: args[0] if args else kwargs["hidden_states"]})

    layers = target.model.get_decoder().layers
    hooks = [layers[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in target.taps]
    taps, _ = target.features(random_ids())
    for hook in hooks:
        hook.remove()
    assert torch.equal(taps, torch.cat([seen[i] for i in target.taps], dim=-1))


def test_states_and_distribution_are_the_models_own(target: FrozenTarget) -> None:
    last_hidden = target.last_hidden(random_ids())
    expected = target.model(random_ids()).logits.softmax(-1)
    found = target.distribution(last_hidden.flatten(0, 1), torch.float32).view_as(expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)  # the same product in another order of rows

    ids = random_ids()
    _, last_hidden = target.features(ids)
    before: list[Tensor] = []
    hook = target.model.get_decoder().norm.register_forward_pre_hook(lambda module, args: before.append(args[0]))
    target.last_hidden(ids)
    hook.remove()
    unit = torch.nn.functional.rms_norm(before[0], before[0].shape[-1:], eps=1e-5)
    torch.testing.assert_close(unit * target.final_norm_G, last_hidden, rtol=1e-5, atol=1e-5)


def test_embeddings_are_the_stored_rows(target: FrozenTarget) -> None:
    """Which SGLang shares with the drafter."""
    assert torch.equal(target.embed(torch.arange(V)), target.model.get_input_embeddings().weight)


@pytest.mark.parametrize("kind", ["eagle3", "specformer", "medusa", "hydra", "independent"])
def test_a_training_step(target: FrozenTarget, kind: str, tmp_path: Path) -> None:
    drafter = untrained(target, kind, {"hidden_size": 32} if kind == "independent" else {}, {"kind": "full"})
    if kind in ("eagle3", "specformer"):
        name = Path(target.folder).name
        assert drafter.config.rope.to_json() == ROPES.get(name, {"rope_type": "default", "rope_theta": 10000.0})
        assert drafter.config.head_dim == (16 if name == "qwen2" else 32)
    check_step(target, drafter)
    save_drafter(tmp_path / "d", drafter, target.info(tap_layers=drafter.config.tap_layers), {"recipe": "one step"})
    assert load_drafter(tmp_path / "d")[0].config == drafter.config


def check_step(target: FrozenTarget, drafter: Drafter) -> None:
    lengths = torch.full((4,), 20)
    batch = Batch.of(rows_of(random_ids(), lengths - 10, lengths), torch.arange(4))
    before = {name: p.clone() for name, p in drafter.named_parameters()}
    optimizers = RECIPE.make_optimizers(drafter)
    loss_K = train_step(drafter, target, [batch], RECIPE, optimizers, 0).loss_K
    assert bool(loss_K.isfinite().all())
    assert any(not torch.equal(before[name], p) for name, p in drafter.named_parameters())


def run_config(target: Path, **drafter: Any) -> DrafterTrainConfig:
    prompts = target.parent / "texts"
    prompts.mkdir(exist_ok=True)
    (prompts / "a.txt").write_text("t1 t2 t3")
    base = DrafterTrainConfig(
        target=str(target),
        output_dir=str(target.parent / "out"),
        work_dir=str(target.parent / "work"),
        drafters=[DrafterEntry(name="a", draft_head=parse_head({"kind": "full"}), **drafter)],
        evaluation=EvaluationConfig(draft_steps=3),
        mlflow=False,
    )
    sizes = {"prompts": str(prompts), "min_prompt_tokens": 16, "max_prompt_tokens": 32, "answer_tokens": 32}
    answers, held_out = ({**vars(part), **sizes} for part in (base.answers, base.held_out))
    return DrafterTrainConfig(**{
        **vars(base), "answers": type(base.answers)(**answers), "held_out": type(base.held_out)(**held_out)
    })  # fmt: skip


def edited(target: Path, **changes: Any) -> Path:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def test_a_plan_takes_every_architecture(target: FrozenTarget) -> None:
    check(run_config(Path(target.folder)))


FAULTY: dict[str, tuple[str, dict[str, Any], str]] = {
    "no_capture": ("llama3", {"architectures": ["Gemma2ForCausalLM"]}, "no set_eagle3_layers_to_capture.*independent"),
    "never_tried": ("llama3", {"architectures": ["OlmoForCausalLM"]}, "has not been compared with training"),
    "nameless": ("llama3", {"architectures": None}, r"architectures is \[None\]"),
    "windows": ("mistral", {"sliding_window": 100}, "sliding_window is 100, but SGLang .* without one"),
    "rope": ("llama3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
             r"drafters\[a\]: the target's rope_parameters.rope_type must be one of default, linear, llama3, yarn, got "
             "'dynamic'; train a drafter without such a layer, of kind medusa, hydra or independent"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTY)
def test_a_plan_refuses_targets_that_training_would_see_otherwise(fault: str, tmp_path: Path) -> None:
    name, changes, message = FAULTY[fault]
    folder = edited(save_target(tmp_path / "target", name), **changes)
    with pytest.raises(ValueError, match=message):
        check(run_config(folder))
    check(run_config(folder, drafter=parse_drafter({"kind": "independent", "hidden_size": 32})))


def test_a_window_as_long_as_the_context_changes_nothing(tmp_path: Path) -> None:
    check(run_config(edited(save_target(tmp_path / "target", "mistral"), sliding_window=256)))


def test_packed_experts_are_read_as_the_numbers_they_stand_for(tmp_path: Path) -> None:
    """MXFP4 as GPT-OSS is published: sixteen bytes of two values each, low half first, and one exponent."""
    folder, generator = save_target(tmp_path / "target", "gpt_oss"), torch.Generator().manual_seed(0)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values, tensors = torch.tensor(positive + [-v for v in positive]), load_file(folder / "model.safetensors")
    expected = {}
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = values[torch.stack([blocks & 15, blocks >> 4], dim=-1).long()].flatten(-2)
        expected[name] = (pairs * 2.0 ** (scales.float() - 127)[..., None]).flatten(2).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = FrozenTarget.load(edited(folder, quantization_config={"quant_method": "mxfp4"}), torch.float32)
    found = target.model.state_dict()
    assert len(expected) == 2 * LAYERS
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    check(run_config(folder))
