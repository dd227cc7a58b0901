"""An ordinary language model as the drafter, under SGLang's own model, head and draft loop; and the same weights as an
independent drafter of ours, which drafts the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ids, Oracle, generate, output_ids, running_engine
from fixture_models import TARGET
from independent_cases import as_hugging_face, save_with_heads, trained_drafter
from last_hidden_cases import as_answers
from lossless import check_counts

from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.adapter.engine import swap_drafter
from sglang_ext.drafters.checkpoint import load_drafter

STEPS = 3
COUNTS = ("spec_verify_ct", "spec_num_correct_drafts")


@pytest.fixture(scope="module")
def drafter(prompts: list[Ids], oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, answers = FrozenTarget.load(TARGET, torch.float32), as_answers(prompts, oracle.answers)
    made = trained_drafter(target, answers, {}, steps=20, batch_size=16)
    folder = tmp_path_factory.mktemp("drafters")
    return save_with_heads(folder, made, target, {"full": {"kind": "full"}}, {})["full"]


def counts(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [[answer["meta_info"][name] for answer in answers] for name in COUNTS]


def test_ours_drafts_what_sglang_s_own_does(drafter: Path, prompts: list[Ids], oracle: Oracle, tmp_path: Path) -> None:
    as_hugging_face(load_drafter(drafter)[0]).save_pretrained(tmp_path / "llama")
    with running_engine(tmp_path / "llama", draft_steps=STEPS) as engine:
        stock = generate(engine, prompts)
        with pytest.raises(ValueError, match="the running drafter is a LlamaForCausalLM"):
            swap_drafter(engine, str(drafter))
    assert output_ids(stock) == oracle.answers
    check_counts(stock, STEPS)
    with running_engine(drafter, draft_steps=STEPS) as engine:
        ours = generate(engine, prompts)
    assert output_ids(ours) == oracle.answers
    assert counts(ours) == counts(stock)
