"""Training on stored hidden states is training on computed ones."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answer_rows import random_rows
from answerers import answer_in_process
from safetensors import safe_open
from torch import Tensor

from rayspec.training import hidden_states
from rayspec.training.data.answers import AnswersConfig, AnswerSet, read_answers
from rayspec.training.drafter import train_drafter
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig, WorkersConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.group import Group
from rayspec.training.hidden_states import StoredTarget, _store, _stored_set, plan_states, with_states
from rayspec.training.origin import new_drafter
from rayspec.training.recipe import Recipe
from rayspec.training.ttt import backward_batch
from sglang_ext.drafters import parse_drafter
from sglang_ext.drafters.specformer.config import specformer_taps
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import parse_head

FULL = {"kind": "full"}
ENTRIES = {
    "eagle3": DrafterEntry(name="eagle3", draft_head=parse_head(FULL)),
    "medusa": DrafterEntry(
        name="medusa", drafter=parse_drafter({"kind": "medusa", "positions": 3}), draft_head=parse_head(FULL)
    ),
    "specformer": DrafterEntry(
        name="specformer", drafter=parse_drafter({"kind": "specformer", "positions": 3}), draft_head=parse_head(FULL)
    ),
    "independent": DrafterEntry(
        name="independent",
        drafter=parse_drafter({"kind": "independent", "hidden_size": 16, "num_layers": 1}),
        draft_head=parse_head(FULL),
    ),
}


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "CHUNK", 4)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences of each call that ran the target."""
    calls: list[int] = []
    for name in ("features", "last_hidden"):
        original = getattr(FrozenTarget, name)

        def counted(self: FrozenTarget, ids_BT: Tensor, *rest: Any, _original: Callable[..., Any] = original) -> Any:
            calls.append(len(ids_BT))
            return _original(self, ids_BT, *rest)

        monkeypatch.setattr(FrozenTarget, name, counted)
    return calls


def config(folder: Path, target: FrozenTarget, *names: str, **changes: Any) -> DrafterTrainConfig:
    base = DrafterTrainConfig(
        target=target.folder,
        output_dir=str(folder / "out"),
        work_dir=str(folder / "work"),
        hidden_states="offline",
        answers=AnswersConfig(count=10, min_prompt_tokens=8, max_prompt_tokens=20, answer_tokens=14, batch_size=10),
        drafters=[ENTRIES[name] for name in names or ("eagle3",)],
        recipe=Recipe(num_steps=4, batch_size=4, warmup_steps=1, ttt_steps=3, bfloat16=False, chunk_rows=16),
        evaluation=EvaluationConfig(draft_steps=3, every=4, sequences=2, served_prompts=0),
        mlflow=False,
    )
    return replace(base, **changes)


def files(folder: Path) -> dict[str, int]:
    return {f.name: f.stat().st_mtime_ns for f in (folder / "work" / "hidden_states" / "rows").iterdir()}


def losses(target: FrozenTarget, asked: DrafterTrainConfig, kind: str, answers: AnswerSet) -> tuple[Tensor, Tensor]:
    """Of one batch, and the gradients of everything that is trained."""
    drafter = new_drafter(target, ENTRIES[kind], asked.recipe, answers)
    batch = Batch.of(answers, torch.tensor([7, 2, 5]))
    with torch.autocast("cpu", torch.bfloat16, enabled=asked.recipe.bfloat16):
        loss = backward_batch(drafter, target, batch, num_steps=3, decay=0.8, chunk_rows=16)
    grads = [p.grad.flatten() for p in drafter.parameters() if p.grad is not None]
    return loss.head_K, torch.cat(grads)


@pytest.mark.parametrize("kind", ENTRIES)
def test_losses_and_gradients_are_those_of_computed_states(
    kind: str, tiny_target: FrozenTarget, tmp_path: Path, computed: list[int]
) -> None:
    """In float32, where batches of other shapes differ in the last bits alone."""
    answers, asked = random_rows(), config(tmp_path, tiny_target, kind)
    expected_K, expected_grad = losses(tiny_target, asked, kind, answers)
    stored = with_states(asked, tiny_target, [answers])
    computed.clear()
    found_K, found_grad = losses(stored, asked, kind, answers)
    assert computed == [], "the target does not run"
    torch.testing.assert_close(found_K, expected_K, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_grad, expected_grad, rtol=1e-3, atol=1e-5)


def test_in_bfloat16_they_are_stored_as_computed(tiny_target_folder: Path, tmp_path: Path) -> None:
    """The same states bit for bit where a batch is the one that was computed, and half the bytes."""
    target = FrozenTarget.load(tiny_target_folder, torch.bfloat16)
    answers = random_rows()
    asked = config(tmp_path, target)
    asked = replace(asked, recipe=replace(asked.recipe, bfloat16=True))
    stored = with_states(asked, target, [answers])
    batch = Batch.of(answers, torch.arange(4))
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = (t.features(batch.ids_BT, target.taps) for t in (target, stored))
    for wanted_BTG, states_BTG in zip(expected, found, strict=True):
        assert states_BTG.dtype == torch.bfloat16
        for n, length in enumerate(answers.length_N[:4]):
            assert torch.equal(states_BTG[n, :length], wanted_BTG[n, :length])
    assert torch.equal(found[1], stored.last_hidden(batch.ids_BT))
    assert losses(stored, asked, "eagle3", answers)[0].isfinite().all()


def test_a_whole_training_gives_the_same_drafter(
    tiny_target: FrozenTarget, tmp_path: Path, computed: list[int]
) -> None:
    held_out = AnswersConfig(count=6, min_prompt_tokens=8, answer_tokens=14, batch_size=6, greedy_share=1.0)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 257, (8 + n,), generator=generator).tolist() for n in range(6)]
    answer_in_process(tmp_path / "work" / "held_out", tiny_target, held_out, prompts)
    sets = random_rows(), read_answers(tmp_path / "work" / "held_out")
    online = config(tmp_path / "on", tiny_target, hidden_states="online", held_out=held_out)
    offline = replace(online, hidden_states="offline", output_dir=str(tmp_path / "off" / "out"))
    assert with_states(online, tiny_target, sets) is tiny_target
    expected = train_drafter(online, ENTRIES["eagle3"], tiny_target, *sets)
    stored = with_states(offline, tiny_target, sets)
    computed.clear()
    offline = replace(offline, work_dir=str(tmp_path / "off" / "work"))
    found = train_drafter(offline, ENTRIES["eagle3"], stored, *sets)
    assert computed == []
    assert found.tau == pytest.approx(expected.tau, abs=0.02)
    assert found.overlap == pytest.approx(expected.overlap, rel=1e-3)
    names = [Path(c.output_folder) / "eagle3" / "config.json" for c in (online, offline)]
    assert names[0].read_text() == names[1].read_text(), "where states came from is no part of a drafter"


def test_layers_are_stored_once_and_those_that_come_later_are_added(
    tiny_target: FrozenTarget, tmp_path: Path, computed: list[int]
) -> None:
    """SpecFormer's last tap is what the head reads, and each layer has its own files."""
    answers = random_rows()
    with_states(config(tmp_path, tiny_target, "medusa"), tiny_target, [answers])
    first = files(tmp_path)
    assert sorted(first) == [f"last-0000{n}.safetensors" for n in range(3)]
    both = config(tmp_path, tiny_target, "eagle3", "specformer", "independent")
    with_states(both, tiny_target, [answers])
    second = files(tmp_path)
    assert second.items() >= first.items()
    taps = {*tiny_target.taps, *specformer_taps(8)} - {8}
    assert {name.rsplit("-", 1)[0] for name in second} == {"last", *(f"layer-00{n}" for n in taps)}
    computed.clear()
    with_states(both, tiny_target, [answers])
    assert (files(tmp_path), computed) == (second, [])


def test_a_cut_off_run_goes_on_and_what_changed_is_computed_again(
    tiny_target: FrozenTarget, tmp_path: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, asked = random_rows(), config(tmp_path, tiny_target, "medusa")
    original = hidden_states.save_tensors

    def cut(tensors: Any, draft: Path, metadata: Any) -> None:
        original(tensors, draft, metadata)
        if "00001" in draft.name:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hidden_states, "save_tensors", cut)
        with pytest.raises(KeyboardInterrupt):
            with_states(asked, tiny_target, [answers])
    first = files(tmp_path)
    assert sorted(first) == ["last-00000.safetensors"]
    computed.clear()
    with_states(asked, tiny_target, [answers])
    assert computed == [4, 2], "the files that were missing"
    assert files(tmp_path)["last-00000.safetensors"] == first["last-00000.safetensors"]

    other = replace(answers, token_ids_NL=answers.token_ids_NL.clone())
    other.token_ids_NL[5, 3] += 1
    computed.clear()
    with_states(asked, tiny_target, [other])
    assert computed == [4], "the file whose sequences are others"
    computed.clear()
    with_states(asked, replace(tiny_target, sha256="other"), [other])
    assert sum(computed) == 10, "of another target all"
    half = tmp_path / "work" / "hidden_states" / "rows" / "last-00002.safetensors"
    half.write_bytes(half.read_bytes()[:40])
    computed.clear()
    with_states(asked, replace(tiny_target, sha256="other"), [other])
    assert computed == [2]


@pytest.mark.parametrize("shard_target", [False, True])
def test_workers_share_out_the_files_or_compute_each_together(
    tiny_target: FrozenTarget, tmp_path: Path, computed: list[int], shard_target: bool
) -> None:
    """Where layers are shared out, nobody can compute alone, and the first writes."""
    asked = config(tmp_path, tiny_target, "medusa", workers=WorkersConfig(count=2, shard_target=shard_target))
    both = [_stored_set(asked, tiny_target, random_rows()) for _ in range(2)]
    assert [len(own.missing) for own in both] == [3, 3], "they look before anything is written"
    written = []
    for rank, own in enumerate(both):
        _store(asked, tiny_target, own, Group(rank, 2))
        written.append(sorted(files(tmp_path)))
    names = [f"last-0000{n}.safetensors" for n in range(3)]
    assert written == ([names, names] if shard_target else [[names[0], names[2]], names])
    assert sum(computed) == (20 if shard_target else 10)
    assert _stored_set(asked, tiny_target, random_rows()).missing == []


def test_the_plan_says_who_computes_them(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    asked = config(tmp_path, tiny_target, workers=WorkersConfig(count=2, num_gpus=1))
    assert plan_states(asked, tiny_target)[0].endswith("; computed by the 2 worker(s), on a GPU each")


def test_sequences_and_layers_that_are_not_stored_are_computed(
    tiny_target: FrozenTarget, tmp_path: Path, computed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    answers = random_rows()
    stored = with_states(config(tmp_path, tiny_target), tiny_target, [answers])
    batch = Batch.of(answers, torch.arange(2))
    other_BT = batch.ids_BT.clone()
    other_BT[1, 4] = (other_BT[1, 4] + 1) % 257
    computed.clear()
    assert torch.equal(stored.last_hidden(other_BT), tiny_target.last_hidden(other_BT))
    assert caplog.text == ""
    assert torch.equal(stored.features(batch.ids_BT, (1, 3))[0], tiny_target.features(batch.ids_BT, (1, 3))[0])
    assert computed == [2, 2, 2, 2]
    assert "states of layer-001 are not stored" in caplog.text


def test_of_sequences_that_differ_in_padding_alone_the_longest_is_found(
    tiny_target: FrozenTarget, tmp_path: Path
) -> None:
    """Token 0 ends an answer here, and is what rows are padded with."""
    rows = random_rows()
    ids, length = rows.token_ids_NL.clone(), rows.length_N.clone()
    ids[1] = ids[0]
    ids[1, length[0]] = 0
    length[1] = length[0] + 1
    rows = replace(rows, token_ids_NL=ids, length_N=length)
    stored = with_states(config(tmp_path, tiny_target), tiny_target, [rows])
    ids_BT = ids[:2, : length[1]].long()
    torch.testing.assert_close(stored.last_hidden(ids_BT)[1], tiny_target.last_hidden(ids_BT)[1])


def test_the_plan_says_how_large_they_are_and_a_full_disk_is_seen_before(
    tiny_target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(tmp_path, tiny_target)
    assert plan_states(replace(asked, hidden_states="online"), tiny_target) == []
    (line,) = plan_states(asked, tiny_target)
    most = (10 * asked.answers.most_tokens + 128 * asked.held_out.most_tokens) * 4 * 32 * 4
    assert f"hidden states of last, layer-002, layer-004, layer-005 in {tmp_path}" in line
    assert f": at most {most / 2**30:.3g} GiB to compute; " in line
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 257, (8 + n,), generator=generator).tolist() for n in range(10)]
    asked = replace(asked, held_out=replace(asked.answers, greedy_share=1.0))
    for name in ("answers", "held_out"):
        answer_in_process(tmp_path / "work" / name, tiny_target, getattr(asked, name), prompts)
    sets = [read_answers(tmp_path / "work" / name) for name in ("answers", "held_out")]
    exact = sum(int(own.length_N.sum()) for own in sets) * 4 * 32 * 4
    (line,) = plan_states(asked, tiny_target)
    assert f": {exact / 2**30:.3g} GiB to compute; " in line
    usage = namedtuple("usage", "free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: usage(exact - 1))
        for refused in (lambda: plan_states(asked, tiny_target), lambda: with_states(asked, tiny_target, sets)):
            with pytest.raises(ValueError, match=r"hidden_states=offline needs .* GiB in .*name a larger disk"):
                refused()
    assert not (tmp_path / "work" / "hidden_states").exists()
    assert isinstance(with_states(asked, tiny_target, sets), StoredTarget)
    stored = (tmp_path / "work" / "hidden_states").rglob("*.safetensors")
    held = 0
    for file in stored:
        with safe_open(file, framework="pt") as found:
            held += found.get_tensor("states").nbytes
    assert held == exact
    (line,) = plan_states(asked, tiny_target)
    assert ": complete; " in line


def test_an_unknown_choice_is_refused(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden_states must be one of online, offline, got 'stored'"):
        config(tmp_path, tiny_target, hidden_states="stored")
