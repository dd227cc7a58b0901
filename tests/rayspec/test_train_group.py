"""An update in pieces, by one worker or several, against the update in one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_rows import rows_of
from checked_configs import check
from torch import Tensor

from rayspec.config import load_config
from rayspec.training.data.answers import AnswersConfig, AnswerSet
from rayspec.training.drafter import batch_indices, train_drafter, train_step
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig, WorkersConfig
from rayspec.training.drafter_runs import plan
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.group import ALONE, Group
from rayspec.training.origin import new_drafter
from rayspec.training.recipe import Recipe
from sglang_ext.drafters import parse_drafter
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import parse_head

FULL = DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))
SLIM = DrafterEntry(name="slim", draft_head=parse_head({"kind": "slimspec", "rank": 8}))
MEDUSA = DrafterEntry(
    name="medusa", draft_head=parse_head({"kind": "full"}), drafter=parse_drafter({"kind": "medusa", "positions": 3})
)
EAGLE = DrafterEntry(
    name="eagle", draft_head=parse_head({"kind": "full"}), drafter=parse_drafter({"kind": "eagle"})
)  # draws noise
# AdamW: Muon's steps round in bfloat16, where a last digit of a gradient becomes a hundredth of a step
RECIPE = Recipe(
    num_steps=6, batch_size=5, warmup_steps=2, ttt_steps=3, bfloat16=False, chunk_rows=16, optimizer="adamw"
)


def ragged_rows() -> AnswerSet:
    """Ten answers of 7 to 25 tokens, so that a piece's rows are not its share of the sequences."""
    length_N = 15 + 2 * torch.arange(10)
    ids_NL = torch.randint(1, 257, (10, int(length_N.max())), generator=torch.Generator().manual_seed(1))
    return rows_of(ids_NL, torch.full((10,), 8), length_N)


def run_config(folder: Path, **changes: Any) -> DrafterTrainConfig:
    base = DrafterTrainConfig(
        target=str(folder / "tiny"),
        output_dir=str(folder / "out"),
        work_dir=str(folder / "work"),
        drafters=[SLIM],
        recipe=RECIPE,
        evaluation=EvaluationConfig(draft_steps=3, every=4, sequences=2),
        checkpoint_every=2,
        log_every=1,
        mlflow=False,
    )
    return replace(base, **changes)


def gradients(target: FrozenTarget, entry: DrafterEntry, pieces: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss of each step, gradients by name) of one update in these pieces; without an optimizer they stay."""
    answers = ragged_rows()
    drafter = new_drafter(target, entry, RECIPE, answers)
    batches = [Batch.of(answers, indices) for indices in pieces]
    recipe = replace(RECIPE, clip_norm=1e9)
    loss_K, _, num_rows = train_step(drafter, target, batches, recipe, [], 0)
    assert num_rows == sum(len(batch.position_N) for batch in batches)
    return loss_K, {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("entry", [FULL, SLIM, MEDUSA, EAGLE], ids=lambda entry: entry.name)
@pytest.mark.parametrize("count", [2, 3, 5], ids=["two_pieces", "three_pieces", "a_sequence_each"])
def test_pieces_add_up_to_the_update(tiny_target: FrozenTarget, entry: DrafterEntry, count: int) -> None:
    indices = torch.tensor([0, 4, 7, 2, 9])
    whole_K, whole = gradients(tiny_target, entry, [indices])
    pieces = ALONE.part(indices, count)
    loss_K, found = gradients(tiny_target, entry, pieces)
    torch.testing.assert_close(loss_K, whole_K, rtol=1e-5, atol=1e-6)
    assert found.keys() == whole.keys()
    for name, grad in whole.items():
        # float32's rounding of sums in another order, beside the largest entry
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=2e-6 * float(grad.abs().max()), msg=name)
    # a mean over the means of the pieces is something else: answers differ in length
    means_K = torch.stack([gradients(tiny_target, entry, [piece])[0] for piece in pieces]).mean(dim=0)
    assert not torch.allclose(means_K, whole_K, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "pieces", "sequences"), [(1, 1, 3), (2, 1, 5), (3, 2, 7), (4, 2, 8)])
def test_workers_share_out_all_sequences_in_order(size: int, pieces: int, sequences: int) -> None:
    indices = batch_indices(20, replace(RECIPE, batch_size=sequences), step=3)
    shares = [Group(rank, size).part(indices, pieces) for rank in range(size)]
    assert torch.equal(torch.cat([piece for share in shares for piece in share]), indices)
    sizes = [len(piece) for share in shares for piece in share]
    assert [len(share) for share in shares] == [pieces] * size
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_one_worker_alone_leaves_tensors_as_they_are() -> None:
    tensors = [torch.ones(2), torch.arange(3)]
    ALONE.sum_(tensors)
    ALONE.copy_first_(tensors)
    assert torch.equal(tensors[0], torch.ones(2))
    assert torch.equal(tensors[1], torch.arange(3))
    assert ALONE.is_writer
    assert not Group(1, 2).is_writer


def test_a_run_goes_on_in_pieces_where_it_was_cut_off_in_one(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    answers = ragged_rows()
    whole, cut = run_config(tmp_path / "whole"), run_config(tmp_path / "cut")
    train_drafter(whole, SLIM, tiny_target, answers, answers)

    def interrupt(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_drafter(cut, SLIM, tiny_target, answers, answers, on_step=interrupt)
    in_pieces = replace(cut, recipe=replace(RECIPE, accumulate=2))
    train_drafter(in_pieces, SLIM, tiny_target, answers, answers)
    a, b = (json.loads((c.output_folder / "slim" / "training.json").read_text()) for c in (whole, cut))
    assert a["recipe"] == b["recipe"] == RECIPE.to_dict()
    torch.testing.assert_close(
        torch.tensor([entry["loss"] for entry in a["history"]]),
        torch.tensor([entry["loss"] for entry in b["history"]]),
        rtol=1e-5,
        atol=1e-5,
    )
    found = load_drafter(cut.output_folder / "slim")[0].state_dict()
    for name, tensor in load_drafter(whole.output_folder / "slim")[0].state_dict().items():
        # stored in bfloat16, whose last digit is at most 2^-7 of a value
        torch.testing.assert_close(tensor, found[name], rtol=2**-7, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["recipe.accumulate=9"], r"recipe\.accumulate=9 pieces need as many sequences, but recipe\.batch_size is 8"),
        (["recipe.accumulate=0"], r"recipe\.accumulate must be at least 1"),
        (["recipe.accumulate=2", "recipe.csra_weight=0.1"], "compares each row with all others of its update"),
        (["workers.count=2", "recipe.csra_weight=0.1"], "which workers.count=2 share out"),
        (["workers.count=9"], r"batch_size=8 sequences .* workers\.count=9 .* must be at least 9"),
        (["workers.count=3", "recipe.accumulate=3"], "must be at least 9"),
        (["workers.count=0"], r"workers\.count must be at least 1 and at most 1000, got 0"),
        (["workers.count=100000"], r"workers\.count must be at least 1 and at most 1000, got 100000"),
        (["engines.count=100000"], r"engines\.count must be at least 1 and at most 1000, got 100000"),
        (["workers.num_cpus=0"], r"workers\.num_cpus must be at least 1 and at most 1000, got 0"),
        (["workers.num_gpus=2"], r"workers\.num_gpus must be 0 or 1.*more workers"),
        (["workers.shard_target=true"], r"workers\.count is 1; raise it"),
        (["workers.max_failures=-1"], r"workers\.max_failures must be at least 0"),
        (["workers.cpus=2"], "num_cpus"),
        (["device=gpu"], "device must be one of auto, cpu, cuda, got 'gpu'"),
        (["device=cuda", "workers.count=2"], r"device=cuda contradicts workers\.num_gpus=0"),
        (["device=cpu", "workers.num_gpus=1"], r"device=cpu contradicts workers\.num_gpus=1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_shared_out_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(DrafterTrainConfig, "configs/train/drafters.yaml", settings)


def test_workers_are_given_on_the_command_line() -> None:
    config = load_config(DrafterTrainConfig, "configs/train/drafters.yaml", ["workers={count: 4, num_gpus: 1}"])
    assert config.workers == WorkersConfig(count=4, num_gpus=1)
    assert config.sequences_at_once == 2
    assert load_config(DrafterTrainConfig, "configs/train/drafters.yaml").workers is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_gpus_that_are_not_there_are_refused(
    tiny_target_folder: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = AnswersConfig(prompts=str(text_folder), count=4, max_prompt_tokens=20, answer_tokens=14)
    held_out = replace(short, greedy_share=1.0)
    config = run_config(tmp_path, target=str(tiny_target_folder), answers=short, held_out=held_out)
    check(config)
    with pytest.raises(ValueError, match="no CUDA GPU here"):
        check(replace(config, device="cuda"))
    two = replace(config, workers=WorkersConfig(count=2, num_gpus=1))
    with pytest.raises(ValueError, match="ask for 2 GPUs, but this machine has 0"):
        check(two)
    monkeypatch.setenv("RAY_ADDRESS", "ray.example:6379")  # whose GPUs are not known here
    check(two)


def test_a_plan_says_where_it_is_trained(tiny_target_folder: Path, text_folder: Path, tmp_path: Path) -> None:
    short = AnswersConfig(prompts=str(text_folder), count=4, max_prompt_tokens=20, answer_tokens=14)
    held_out = replace(short, greedy_share=1.0)
    config = run_config(tmp_path, target=str(tiny_target_folder), answers=short, held_out=held_out, device="cpu")
    assert any(line.startswith("trained in this process, on cpu, in ") for line in plan(config))
    two = WorkersConfig(count=2, num_cpus=3, shard_target=True)
    text = "\n".join(plan(replace(config, workers=two, recipe=replace(RECIPE, accumulate=2))))
    assert "by 2 worker(s) of Ray Train with 3 CPU(s) each, which share out the target's layers; at most 2" in text
    assert "each update in 2 pieces a worker" in text
    assert "b = 2 of B = 5 at once" in text
