"""Heads made on a trained drafter: what is frozen, what is trained, what is stored."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answerers import short_answers
from safetensors.torch import load_file

from rayspec.training.data.answers import AnswerSet
from rayspec.training.drafter import train_drafter
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig
from rayspec.training.drafter_runs import is_exported
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.origin import Origin, new_drafter
from rayspec.training.recipe import Recipe
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.folder_kinds import WEIGHTS
from sglang_ext.heads import parse_head

SPECVOCAB = {"kind": "specvocab", "rank": 4, "size": 20}
Family = tuple[DrafterTrainConfig, AnswerSet]


def make(family: Family, target: FrozenTarget, name: str, base: str | None, spec: dict[str, Any]) -> Path:
    config, answers = family
    train_drafter(config, DrafterEntry(name=name, base=base, draft_head=parse_head(spec)), target, answers, answers)
    return Path(config.output_dir) / name


@pytest.fixture(scope="module")
def family(tiny_target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A trained `full`, `routed` on its frozen body, and `wider`: the same router with a longer shortlist."""
    folder = tmp_path_factory.mktemp("family")
    answers = short_answers(folder / "answers", tiny_target, 6)
    config = DrafterTrainConfig(
        target=str(folder / "tiny"),
        output_dir=str(folder / "out"),
        work_dir=str(folder / "work"),
        drafters=[DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))],
        recipe=Recipe(num_steps=4, batch_size=3, warmup_steps=1, ttt_steps=2, bfloat16=False),
        evaluation=EvaluationConfig(draft_steps=2, every=4, sequences=2),
        log_every=1,
        mlflow=False,
    )
    made = config, answers
    make(made, tiny_target, "full", None, {"kind": "full"})
    make(made, tiny_target, "routed", "full", SPECVOCAB)
    make(made, tiny_target, "wider", "routed", {**SPECVOCAB, "size": 40})
    return made


def test_the_body_is_frozen_and_stored_once(family: Family) -> None:
    out = Path(family[0].output_dir)
    full, _ = load_drafter(out / "full")
    routed, info = load_drafter(out / "routed")
    assert set(load_file(out / "routed" / WEIGHTS)) == {"lm_head.down", "lm_head.up"}
    assert all(torch.equal(t, routed.state_dict()[name]) for name, t in full.state_dict().items())
    assert [shares.drafter for shares in info.shares] == ["../full"]
    assert len(json.loads((out / "routed" / "training.json").read_text())["history"]) == 4


def test_another_inference_option_needs_no_training_and_no_tensors(family: Family) -> None:
    out = Path(family[0].output_dir)
    routed, _ = load_drafter(out / "routed")
    wider, info = load_drafter(out / "wider")
    assert load_file(out / "wider" / WEIGHTS) == {}
    assert [shares.drafter for shares in info.shares] == ["../routed", "../full"]
    assert all(torch.equal(t, wider.state_dict()[name]) for name, t in routed.state_dict().items())
    assert info.head.spec() == {**SPECVOCAB, "size": 40}
    hidden_TH = torch.randn(3, info.body.hidden_size)
    assert wider.lm_head.candidates(hidden_TH).logits_TS.shape == (3, 40)
    assert json.loads((out / "wider" / "training.json").read_text())["history"] == []


def test_a_stock_base_without_taps_is_given_those_of_the_target(family: Family, tiny_target: FrozenTarget) -> None:
    out = Path(family[0].output_dir)
    full, info = load_drafter(out / "full")
    assert info.target is not None
    save_drafter(out / "stock", full, info.target, stock=True)
    config = json.loads((out / "stock" / "config.json").read_text())
    del config["eagle_config"]
    (out / "stock" / "config.json").write_text(json.dumps(config))
    _, on_stock = load_drafter(make(family, tiny_target, "on_stock", "stock", SPECVOCAB))
    assert on_stock.body == info.body
    assert on_stock.body.tap_layers == tiny_target.taps


def test_fewer_bits_are_an_inference_option(family: Family, tiny_target: FrozenTarget) -> None:
    folder = make(family, tiny_target, "int8", "routed", {**SPECVOCAB, "weight_format": "int8"})
    routed, _ = load_drafter(folder.parent / "routed")
    rounded, info = load_drafter(folder)
    assert info.head.spec()["weight_format"] == "int8"
    hidden_TH = torch.randn(3, info.body.hidden_size)
    near, exact = (head.lm_head.router_logits(hidden_TH) for head in (rounded, routed))
    assert 0 < (near - exact).norm() / exact.norm() < 0.02
    with pytest.raises(ValueError, match="not yet stored in fewer bits"):
        make(family, tiny_target, "again", "int8", SPECVOCAB)


def test_a_base_with_other_tensors_is_refused(family: Family, tiny_target: FrozenTarget) -> None:
    with pytest.raises(ValueError, match=r"drafters\[other\].base is .*routed.*the same head up to group_size, size,"):
        make(family, tiny_target, "other", "routed", {**SPECVOCAB, "rank": 5})
    with pytest.raises(ValueError, match="a base needs a full head"):
        make(family, tiny_target, "other", "routed", {"kind": "slimspec", "rank": 4})
    with pytest.raises(ValueError, match=r"drafters\[other\].base is .nobody.: not under"):
        make(family, tiny_target, "other", "nobody", SPECVOCAB)


@pytest.mark.parametrize(
    ("spec", "frozen"),
    [
        ({"kind": "full"}, {"weight"}),
        (SPECVOCAB, {"weight"}),
        ({"kind": "rdk", "base": {"kind": "full"}}, {"base.weight"}),
        ({"kind": "rdk", "base": SPECVOCAB}, {"base.weight"}),
    ],
)
def test_the_rows_of_a_frozen_head_alone_are_frozen(
    spec: dict[str, Any], frozen: set[str], family: Family, tiny_target: FrozenTarget
) -> None:
    config, answers = family
    entry = DrafterEntry(name="x", draft_head=parse_head(spec), freeze_head=True)
    drafter = new_drafter(tiny_target, entry, config.recipe, answers)
    parameters = dict(drafter.lm_head.named_parameters())
    assert {name for name, parameter in parameters.items() if not parameter.requires_grad} == frozen


@pytest.mark.parametrize(
    "spec", [{"kind": "slimspec", "rank": 4}, {"kind": "rdk", "base": {"kind": "slimspec", "rank": 4}}]
)
def test_a_head_without_such_rows_cannot_be_frozen(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"drafters\[x\]\.freeze_head keeps rows of the target's head"):
        DrafterEntry(name="x", draft_head=parse_head(spec), freeze_head=True)


def test_a_trained_body_goes_on(family: Family, tiny_target: FrozenTarget) -> None:
    """From the base's weights, not from the seed's; the new drafter stands alone."""
    config, answers = family
    out = Path(config.output_dir)
    more = DrafterEntry(
        name="more", base="full", draft_head=parse_head({"kind": "full"}), train_body=True, freeze_head=True
    )
    start = new_drafter(tiny_target, more, config.recipe, answers, Origin(base=out / "full"))
    full, _ = load_drafter(out / "full")
    assert all(torch.equal(t, start.state_dict()[name]) for name, t in full.state_dict().items())
    train_drafter(config, more, tiny_target, answers, answers)
    trained, info = load_drafter(out / "more")
    assert info.shares == ()
    changed = {name for name, t in full.state_dict().items() if not torch.equal(t, trained.state_dict()[name])}
    assert changed == {name for name, _ in full.named_parameters()} - {"lm_head.weight"}
    losses = [json.loads((out / name / "training.json").read_text())["history"] for name in ("full", "more")]
    assert losses[1][0]["loss"] < losses[0][0]["loss"]
    assert is_exported(config, more, tiny_target.sha256)
    with pytest.raises(ValueError, match="holds a drafter with train_body"):
        is_exported(config, replace(more, train_body=False), tiny_target.sha256)


def test_a_family_is_recognised(family: Family, tiny_target: FrozenTarget) -> None:
    config, _ = family
    wider = DrafterEntry(name="wider", base="routed", draft_head=parse_head({**SPECVOCAB, "size": 40}))
    assert is_exported(config, wider, tiny_target.sha256)
    with pytest.raises(ValueError, match="holds a drafter with draft_head"):
        is_exported(config, replace(wider, draft_head=parse_head(SPECVOCAB)), tiny_target.sha256)
