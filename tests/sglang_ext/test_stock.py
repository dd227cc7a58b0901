"""An exported drafter under SGLang's own model class: nothing of rayspec but the CPU platform, and the same answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ids, Oracle, generate, output_ids, running_engine
from fixture_models import DRAFTERS, VOCABULARY
from lossless import check_counts

from sglang_ext.adapter.engine import swap_drafter
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.heads import head_from_target

STEPS = 3


def export(kind: str, folder: Path) -> None:
    drafter, info = load_drafter(DRAFTERS["slimspec" if kind == "slimspec" else "full"])
    assert info.target is not None
    if kind == "truncated":  # the stop token is 0
        head = {"kind": "truncated", "size": VOCABULARY // 2}
        drafter.lm_head = head_from_target(head, drafter.lm_head.weight.data, {"ids": torch.arange(0, VOCABULARY, 2)})
    save_drafter(folder, drafter, info.target, stock=True)
    if kind == "truncated":  # as the first published ones: SGLang's default taps are those of our training
        config = json.loads((folder / "config.json").read_text())
        del config["eagle_config"]
        (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=["truncated", "slimspec"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("stock") / request.param
    export(request.param, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "")
        with running_engine(folder, draft_steps=STEPS) as engine:
            yield engine


def test_stock_sglang_serves_it_token_for_token(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    answers = generate(engine, prompts)
    assert output_ids(answers) == oracle.answers
    check_counts(answers, STEPS)  # drafts are accepted, so the id map is right
    with pytest.raises(ValueError, match="the running drafter is a LlamaForCausalLMEagle3"):
        swap_drafter(engine, str(DRAFTERS["full"]))
