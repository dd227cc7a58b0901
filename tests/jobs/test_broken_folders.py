"""Drafters, targets and calibrations with one thing broken: refused by name, and a drafter alone among others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import FULL, JSON_TEXTS, Case, ask, base, complaints, one
from safetensors.torch import load_file, save_file
from small_world import World, tiny_info

from sglang_ext.drafters.checkpoint import check_files, load_drafter
from sglang_ext.drafters.checkpoint_config import read_info

pytestmark = pytest.mark.usefixtures("untouched_home")


ODD: tuple[Any, ...] = (None, True, 3, -1, 0, 1.5, 10**30, 1e308, "x", "", [], [1], ["x"], [None], {}, {"a": 1})


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside a JSON value."""
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, child in pairs:
        yield from leaves(child, (*path, key))


def mutations(value: Any) -> Iterator[tuple[str, Any]]:
    """(what was done, the value with one thing of it odd or gone)."""
    for path in leaves(value):
        for odd in (*ODD, "gone"):
            changed = json.loads(json.dumps(value))
            parent = changed
            for key in path[:-1]:
                parent = parent[key]
            if odd == "gone":
                del parent[path[-1]]
            else:
                parent[path[-1]] = odd
            yield f"{'.'.join(map(str, path))}={odd!r}", changed
    for odd in ODD:
        if not isinstance(odd, dict):
            yield f"whole={odd!r}", odd


def strangely(read: Callable[[], object], named: str) -> str | None:
    """What is wrong with the way in which something odd is read: nothing, where it is taken, or refused by its name."""
    try:
        read()
    except ValueError as error:
        return None if named in str(error) else f"UNCLEAR {error!s:.300}"
    except BaseException as error:
        return f"TRACEBACK {type(error).__name__}: {error!s:.300}"
    return None


@pytest.mark.parametrize("name", ["full", "medusa", "independent", "stock"])
def test_drafters_with_an_odd_config(name: str, world: World) -> None:
    folder = world.copy_of(world.drafters / name, f"odd-{name}")
    config = json.loads((folder / "config.json").read_text())
    found, refused = [], 0

    def read() -> None:
        nonlocal refused
        refused += 1
        info = read_info(folder)
        check_files(info)
        refused -= 1

    cases = list(mutations(config))
    for what, changed in cases:
        (folder / "config.json").write_text(json.dumps(changed))
        trouble = strangely(read, str(folder))
        found += [f"{what}: {trouble}"] if trouble else []
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found[:60])
    assert refused > 200  # of names that SGLang alone reads, anything goes


def broken_drafters(world: World) -> dict[str, Callable[[Path], object]]:
    def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
        def break_(folder: Path) -> None:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors")

        return break_

    def config(**entries: Any) -> Callable[[Path], object]:
        def break_(folder: Path) -> None:
            found = json.loads((folder / "config.json").read_text())
            found["rayspec"].update(entries)
            (folder / "config.json").write_text(json.dumps(found))

        return break_

    other = tiny_info(world.target, (2, 4, 5))
    strange = {**other.to_dict(), "tokenizer_sha256": "0" * 64}
    deeper = {**other.to_dict(), "tap_layers": [2, 4, 99]}
    return {
        "no_weights": lambda d: (d / "model.safetensors").unlink(),
        "weights_are_a_folder": lambda d: ((d / "model.safetensors").unlink(), (d / "model.safetensors").mkdir()),
        "weights_cut": lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-9]),
        "weights_empty": lambda d: (d / "model.safetensors").write_bytes(b""),
        "weights_are_text": lambda d: (d / "model.safetensors").write_text("hello" * 99),
        "tensor_gone": weights(lambda t: t.pop("fc.weight")),
        "tensor_too_much": weights(lambda t: t.update(extra=torch.zeros(3))),
        "tensor_of_other_shape": weights(lambda t: t.update({"fc.weight": torch.zeros(3, 3)})),
        "of_another_target": config(target=strange),
        "taps_outside": config(target=deeper),
        "shares_nothing": config(shares=[{"drafter": "nowhere", "sha256": "0", "tensors": ["fc.weight"]}]),
        "shares_itself": config(shares=[{"drafter": ".", "sha256": "0", "tensors": []}]),
        "shares_zero_byte": config(shares=[{"drafter": "a\0b", "sha256": "0", "tensors": []}]),
        **{
            f"config_{name}": (lambda d, text=text: (d / "config.json").write_bytes(text))
            for name, text in JSON_TEXTS.items()
        },
    }


def test_a_broken_drafter_is_named_and_does_not_stop_the_others(world: World, place: Path) -> None:
    found = []
    for name, break_ in broken_drafters(world).items():
        folder = world.copy_of(world.drafters / "full", name)
        break_(folder)
        settings = base("sweep", world, place)
        both = ask("sweep", *settings, f"drafters=[{world.drafters}/full,{folder}]")
        if both.code != 0 or f"{name} cannot be measured" not in both.out:
            found.append(f"{name} beside a whole one: {both.trouble or both.err or both.out}"[:900])
        jobs: dict[str, list[str]] = {
            "sweep": [f"drafters=[{folder}]", f"baseline={name}"],
            "export": [f"drafters=[{folder}]"],
            "train": [f"drafters=[{{name: a, base: {folder}, {FULL}}}]"],
        }
        for job, arguments in jobs.items():
            if not (job == "export" and name in ("of_another_target", "taps_outside")):  # which an export does not know
                found += complaints(job, base(job, world, place), [(arguments, (name,))])
    assert not found, "\n".join(found)


def test_drafters_that_cannot_serve_what_is_asked(world: World, place: Path) -> None:
    d = world.drafters
    wide = world.folder / "wide-target"
    cases: list[Case] = [
        ([f"drafters=[{d}/medusa]", "baseline=medusa", "draft_steps=[3]"], ("2 positions", "draft_steps")),
        ([f"drafters=[{d}/medusa@4x9]", "baseline=medusa@4x9"], ("draft_tree", "num_draft_tokens")),
        ([f"drafters=[{d}/stock]", "baseline=stock", f"target={wide}"], ("target", "wide-target")),
        ([f"drafters=[{d}/full]", f"target={wide}"], ("trained for target",)),
    ]
    from transformers import LlamaConfig, LlamaForCausalLM

    copy = world.copy_of(world.target, "wide-target")
    shape = json.loads((copy / "config.json").read_text()) | {"hidden_size": 64, "num_hidden_layers": 6}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(copy)
    found = complaints("sweep", base("sweep", world, place), cases)
    assert not found, "\n".join(found)


def test_a_base_of_no_numbers(world: World, place: Path) -> None:
    for value in (math.nan, math.inf):
        folder = world.copy_of(world.drafters / "full", "no-numbers")
        tensors = load_file(folder / "model.safetensors")
        tensors["fc.weight"][0, 0] = value
        save_file(tensors, folder / "model.safetensors")
        answer = ask("train", *base("train", world, place), f"drafters=[{{name: a, base: {folder}, {FULL}}}]")
        assert answer.is_refusal, answer
        assert "NaN or Inf" in answer.err
        assert str(folder) in answer.err


def broken_targets() -> dict[str, Callable[[Path], object]]:
    def config(**entries: Any) -> Callable[[Path], object]:
        def break_(folder: Path) -> None:
            found = json.loads((folder / "config.json").read_text()) | entries
            (folder / "config.json").write_text(json.dumps(found))

        return break_

    def index(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}})
        )

    weights = "model.safetensors"
    return {
        "no_config": lambda t: (t / "config.json").unlink(),
        "no_tokenizer": lambda t: (t / "tokenizer.json").unlink(),
        "tokenizer_cut": lambda t: (t / "tokenizer.json").write_text("{"),
        "tokenizer_empty": lambda t: (t / "tokenizer.json").write_text("{}"),
        "no_weights": lambda t: (t / weights).unlink(),
        "pickled_weights": lambda t: (t / weights).rename(t / "pytorch_model.bin"),
        "weights_cut": lambda t: (t / weights).write_bytes((t / weights).read_bytes()[:-9]),
        "weights_empty": lambda t: (t / weights).write_bytes(b""),
        "a_file_of_the_index_is_missing": index,
        "index_is_none": lambda t: (t / "model.safetensors.index.json").write_text("3"),
        "no_model_type": config(model_type=None, architectures=None),
        "unknown_model_type": config(model_type="nonsense"),
        "hidden_size_is_text": config(hidden_size="x"),
        "hidden_size_is_zero": config(hidden_size=0),
        "vocab_size_is_null": config(vocab_size=None),
        "vocab_size_is_negative": config(vocab_size=-5),
        "no_layers": config(num_hidden_layers=0),
        **{
            f"config_{name}": (lambda t, text=text: (t / "config.json").write_bytes(text))
            for name, text in JSON_TEXTS.items()
            if name not in ("nan", "digits")
        },
    }


def test_broken_targets(world: World, place: Path) -> None:
    found = []
    for name, break_ in broken_targets().items():
        folder = world.copy_of(world.target, f"target-{name}")
        break_(folder)
        for job in ("sweep", "train", "calibrate"):
            reads_weights = job != "calibrate"  # which counts text with the tokenizer
            about_weights = name in ("no_weights", "pickled_weights", "weights_cut", "weights_empty") or "index" in name
            if reads_weights or not (about_weights or name in ("no_layers", "hidden_size_is_zero")):
                words = (f"target-{name}",)
                found += complaints(job, base(job, world, place), [([f"target={folder}"], words)])
    assert not found, f"{len(found)}\n" + "\n".join(found)


def test_broken_calibrations(world: World, place: Path) -> None:
    from rayspec.artifacts import load_artifacts, write_artifacts
    from rayspec.training.frozen_target import FrozenTarget
    from sglang_ext.folder_kinds import CALIBRATION_JSON

    target = FrozenTarget.without_weights(world.target)
    info = target.info()
    description = {
        "name": "c",
        "rule": {"kind": "frspec"},
        "target": {"name": "tiny", "vocab_size": info.vocab_size, "tokenizer_sha256": info.tokenizer_sha256},
        "stop_ids": [0],
    }
    folder = place / "calibration"
    tensors = {"ids": torch.arange(8), "counts": torch.zeros(info.vocab_size, dtype=torch.int64)}
    write_artifacts(folder, tensors, description, {})
    entry = "name: a, artifacts: {}, draft_head: {{kind: {}}}"
    good = ask("train", *base("train", world, place), f"drafters=[{{{entry.format(folder, 'truncated, size: 8')}}}]")
    assert good.code == 0, good
    cases: list[Case] = [
        one(f"drafters=[{{{entry.format(folder, 'truncated, size: 9')}}}]", "size 9", "got 8"),
        one(f"drafters=[{{{entry.format(folder, 'coral, clusters: 4, top: 1')}}}]", "cluster map"),
        one(f"drafters=[{{{entry.format(folder, 'rdk, base: {kind: truncated, size: 9}')}}}]", "size 9"),
    ]
    found = complaints("train", base("train", world, place), cases)
    stored = json.loads((folder / CALIBRATION_JSON).read_text())
    for what, changed in mutations(stored):
        (folder / CALIBRATION_JSON).write_text(json.dumps(changed))
        trouble = strangely(lambda: load_artifacts(folder, info, target.eos_ids), str(folder))
        found += [f"{what}: {trouble}"] if trouble else []
    for name, text in JSON_TEXTS.items():
        (folder / CALIBRATION_JSON).write_bytes(text)
        trouble = strangely(lambda: load_artifacts(folder, info), str(folder))
        found += [f"{name}: {trouble}"] if trouble else []
    assert not found, f"{len(found)}\n" + "\n".join(found[:60])


def test_loaded_drafters_are_whole(world: World) -> None:
    """The drafters that everything here is broken from."""
    for name in ("full", "medusa", "independent", "stock"):
        drafter, _ = load_drafter(world.drafters / name)
        assert all(bool(t.isfinite().all()) for t in drafter.state_dict().values() if t.is_floating_point())
