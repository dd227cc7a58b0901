"""Exported drafters under SGLang's own model class, head and draft loop: nothing of rayspec but the CPU platform, the
same answers, and for EAGLE's the same drafts as under ours."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ids, Oracle, generate, output_ids, running_engine
from fixture_models import DRAFTERS, VOCABULARY
from independent_cases import as_hugging_face
from lossless import check_counts
from volume import volume

from rayspec.export import ExportConfig, prepare, write
from sglang_ext.adapter.engine import swap_drafter
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.heads import head_from_target, parse_head

STEPS = 3


def export(kind: str, folder: Path) -> None:
    drafter, info = load_drafter(DRAFTERS["slimspec" if kind == "slimspec" else "full"])
    assert info.target is not None
    if kind == "truncated":  # the stop token is 0
        head = {"kind": "truncated", "size": VOCABULARY // 2}
        drafter.lm_head = head_from_target(
            parse_head(head), drafter.lm_head.weight.data, {"ids": torch.arange(0, VOCABULARY, 2)}
        )
    save_drafter(folder, drafter, info.target, stock=True)
    if kind == "truncated":  # as the first published ones: SGLang's default taps are those of our training
        config = json.loads((folder / "config.json").read_text())
        del config["eagle_config"]
        (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def some(prompts: list[Ids]) -> list[Ids]:
    return prompts[: volume(56, 8)]


@contextmanager
def stock_engine(folder: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "")
        with running_engine(folder, draft_steps=STEPS) as engine:
            yield engine


@pytest.mark.parametrize("kind", ["truncated", "slimspec"])
def test_stock_sglang_serves_it_token_for_token(kind: str, some: list[Ids], oracle: Oracle, tmp_path: Path) -> None:
    export(kind, tmp_path)
    with stock_engine(tmp_path) as engine:
        answers = generate(engine, some)
        with pytest.raises(ValueError, match="the running drafter is a LlamaForCausalLMEagle3"):
            swap_drafter(engine, str(DRAFTERS["full"]))
    assert output_ids(answers) == oracle.answers[: len(some)]
    check_counts(answers, STEPS)  # drafts are accepted, so the id map is right


def test_stock_sglang_drafts_what_ours_does(
    drafters_of: Callable[[str], dict[str, Path]], some: list[Ids], oracle: Oracle, tmp_path: Path
) -> None:
    """An EAGLE drafter as `rayspec export` writes it."""
    folder = drafters_of("eagle")["to_export"]
    (found,) = prepare(ExportConfig(drafters=[str(folder)], output_dir=str(tmp_path)))
    write(found)
    with stock_engine(found.folder) as engine:
        stock = generate(engine, some)
    check_ours_drafts_the_same(folder, stock, some, oracle)


@pytest.mark.slow
def test_an_ordinary_language_model_drafts_what_an_independent_drafter_of_its_weights_does(
    drafters_of: Callable[[str], dict[str, Path]], some: list[Ids], oracle: Oracle, tmp_path: Path
) -> None:
    folder = drafters_of("independent")["full"]
    as_hugging_face(load_drafter(folder)[0]).save_pretrained(tmp_path / "llama")
    with running_engine(tmp_path / "llama", draft_steps=STEPS) as engine:
        stock = generate(engine, some)
        with pytest.raises(ValueError, match="the running drafter is a LlamaForCausalLM"):
            swap_drafter(engine, str(folder))
    check_ours_drafts_the_same(folder, stock, some, oracle)


def check_ours_drafts_the_same(folder: Path, stock: list[dict[str, Any]], prompts: list[Ids], oracle: Oracle) -> None:
    with running_engine(folder, draft_steps=STEPS) as engine:
        ours = generate(engine, prompts)
    assert output_ids(stock) == output_ids(ours) == oracle.answers[: len(prompts)]
    check_counts(stock, STEPS)
    for count in ("spec_verify_ct", "spec_num_correct_drafts"):
        assert [a["meta_info"][count] for a in ours] == [a["meta_info"][count] for a in stock]
