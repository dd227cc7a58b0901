"""A head whose rows of a request share what they have chosen, in SGLang's draft loop: no request sees another's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ids, running_engine
from toy import DRAFT_STEPS, Toy, V, make_toy

from sglang_ext.adapter.engine import swap_drafter

PROMPTS: list[Ids] = torch.randint(V, (4, 5), generator=torch.Generator().manual_seed(1)).tolist()
NEW_TOKENS = 30


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy") / "target")


def answers_of(engine: Any, prompts: list[Ids]) -> list[tuple[Ids, int, int]]:
    """(tokens, verify steps, accepted drafts) of greedy answers, all at once."""
    sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    found = engine.generate(input_ids=prompts, sampling_params=sampling)
    return [
        (a["output_ids"], a["meta_info"]["spec_verify_ct"], a["meta_info"]["spec_num_correct_drafts"]) for a in found
    ]


def test_what_a_request_drafts_does_not_depend_on_its_batch_but_on_its_beam(toy: Toy, tmp_path: Path) -> None:
    """By the number of accepted drafts. A union over the batch, and each row its own clusters, are the controls."""
    folders = {
        head: toy.save_drafter(tmp_path / head, head) for head in ("dynaspec_request", "dynaspec_union", "dynaspec")
    }
    shape = {"target": toy.folder, "draft_steps": DRAFT_STEPS, "topk": 3, "num_draft_tokens": 8}
    with running_engine(folders["dynaspec_request"], skip_tokenizer_init=True, **shape) as engine:
        together, alone = {}, {}
        for head, folder in folders.items():
            swap_drafter(engine, str(folder))
            together[head] = answers_of(engine, PROMPTS)
            alone[head] = [answers_of(engine, [prompt])[0] for prompt in PROMPTS]
    assert together["dynaspec_request"] == alone["dynaspec_request"]
    assert alone["dynaspec_request"] == alone["dynaspec_union"], "a union over one request is the same"
    assert together["dynaspec_union"] != alone["dynaspec_union"], "a batch shares more"
    assert alone["dynaspec"] != alone["dynaspec_request"], "a row alone has less"
    for head in folders:
        assert [tokens for tokens, _, _ in together[head]] == [tokens for tokens, _, _ in alone["dynaspec"]]
