"""An engine with a chain: what it is asked and given that it must refuse, and that it is as before then."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ids, Oracle, generate, output_ids
from faults import replay_prefills
from fixture_models import DRAFTERS
from hostile_requests import in_process
from safetensors.torch import load_file, save_file

from sglang_ext.adapter.engine import swap_drafter


@pytest.fixture
def engine(eagle3_chain: Any) -> Any:
    return eagle3_chain


def test_biases_reach_the_sampled_distribution(engine: Any, prompts: list[Ids]) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 5}
    plain = output_ids(generate(engine, prompts[:8], **sampling))
    used = {str(token): -1000.0 for answer in plain for token in answer}
    biased = output_ids(generate(engine, prompts[:8], logit_bias=used, **sampling))
    assert not {str(token) for answer in biased for token in answer} & set(used)


def test_what_would_end_the_scheduler_is_refused(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    refused = in_process()
    assert len(refused) > 80
    for request in refused:
        with pytest.raises(ValueError, match=re.escape(request.says)):
            engine.generate(**request.body)
    neutral = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "min_new_tokens": 0}
    assert output_ids(generate(engine, prompts[:2], **neutral, stop_token_ids=None)) == oracle.answers[:2]


def test_a_session_is_not_replaced_as_a_whole(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    session, ask = engine.open_session(capacity_of_str_len=999), {"max_new_tokens": 2}
    engine.generate(input_ids=[1], sampling_params=ask, session_params={"id": session})
    with pytest.raises(ValueError, match="replace needs the rid of the request"):
        engine.generate(input_ids=[1], sampling_params=ask, session_params={"id": session, "replace": True})
    engine.close_session(session)
    assert output_ids(generate(engine, prompts[:1])) == oracle.answers[:1]


def break_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.up"] = tensors["lm_head.up"][:, :-1].contiguous()
    save_file(tensors, path / "model.safetensors")


def drop_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, path / "model.safetensors")


def add_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"surplus": torch.zeros(1)}, path / "model.safetensors")


def spoil_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.up"][7, 3] = float("nan")
    save_file(tensors, path / "model.safetensors")


def round_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"fc.weight": tensors["fc.weight"].to(torch.int32)}, path / "model.safetensors")


def edit_config(path: Path, *keys: str, value: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    entry = config
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = value
    (path / "config.json").write_text(json.dumps(config))


FAULTS = {
    "shape": (break_tensor, "lm_head.up has shape"),
    "missing": (drop_tensor, "missing fc.weight"),
    "unknown": (add_tensor, "unknown surplus"),
    "nan": (spoil_tensor, "lm_head.up holds NaN or Inf"),
    "integers": (round_tensor, "fc.weight holds torch.int32, expected floating-point numbers"),
    "kind": (lambda p: edit_config(p, "draft_head", "kind", value="slimspek"), "draft_head.kind must be one of"),
    "tokenizer": (
        lambda p: edit_config(p, "rayspec", "target", "tokenizer_sha256", value="0" * 64),
        "was trained for target",
    ),
    "body": (lambda p: edit_config(p, "max_position_embeddings", value=4096), "differs from"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_drafter_is_refused_and_the_running_one_stays(
    engine: Any, fault: str, tmp_path: Path, prompts: list[Ids], oracle: Oracle
) -> None:
    damage, message = FAULTS[fault]
    swap_drafter(engine, str(DRAFTERS["slimspec"]))
    before = generate(engine, prompts[:2])
    shutil.copytree(DRAFTERS["slimspec"], tmp_path / "faulty")
    damage(tmp_path / "faulty")
    with pytest.raises(ValueError, match=message):
        swap_drafter(engine, str(tmp_path / "faulty"))
    after = generate(engine, prompts[:2])
    assert output_ids(after) == oracle.answers[:2]
    assert [a["meta_info"]["spec_verify_ct"] for a in after] == [a["meta_info"]["spec_verify_ct"] for a in before]


def test_a_head_that_routes_needs_no_code_of_ours_in_a_prefill(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    """SGLang replays the layers of a prefill from graphs. Its end, where the first draft is made, is run by Python."""
    swap_drafter(engine, str(DRAFTERS["dynaspec"]))
    eager = generate(engine, prompts[:8])
    replay_prefills(engine, True)
    try:
        swap_drafter(engine, str(DRAFTERS["dynaspec"]))  # empties the prefix cache
        replayed = generate(engine, prompts[:8])
    finally:
        replay_prefills(engine, False)
    assert output_ids(replayed) == oracle.answers[:8]
    accepted = [[a["meta_info"]["spec_correct_drafts_histogram"] for a in answers] for answers in (eager, replayed)]
    assert accepted[0] == accepted[1]
