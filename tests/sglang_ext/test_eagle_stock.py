"""An exported EAGLE drafter under SGLang's own model class, head and draft loop, and the same under ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_cases import trained_eagle
from engines import Ids, Oracle, generate, output_ids, running_engine
from fixture_models import TARGET
from last_hidden_cases import as_answers
from lossless import check_counts

from rayspec.export import ExportConfig, prepare, write
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint import save_drafter

STEPS = 3
COUNTS = ("spec_verify_ct", "spec_num_correct_drafts")


def counts(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [[answer["meta_info"][name] for answer in answers] for name in COUNTS]


def test_stock_sglang_drafts_what_ours_does(prompts: list[Ids], oracle: Oracle, tmp_path: Path) -> None:
    target, answers = FrozenTarget.load(TARGET, torch.float32), as_answers(prompts, oracle.answers)
    drafter = trained_eagle(target, answers, steps=30, batch_size=16)
    save_drafter(tmp_path / "ours", drafter, target.info(tap_layers=()), {"freeze_head": True})
    (export,) = prepare(ExportConfig(drafters=[str(tmp_path / "ours")], output_dir=str(tmp_path / "stock")))
    write(export)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "")
        with running_engine(export.folder, draft_steps=STEPS) as engine:
            stock = generate(engine, prompts)
    assert output_ids(stock) == oracle.answers
    check_counts(stock, STEPS)
    with running_engine(tmp_path / "ours", draft_steps=STEPS) as engine:
        ours = generate(engine, prompts)
    assert output_ids(ours) == oracle.answers
    assert counts(ours) == counts(stock)
