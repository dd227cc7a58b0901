"""Real engines on the shipped models. An engine start costs half a minute, so a module shares one."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rayspec
from sglang_ext.adapter.engine import assert_plugin_active, engine_arguments

ASSETS = Path(rayspec.__file__).parent / "assets"
TARGET = ASSETS / "target"
DRAFTERS = {kind: ASSETS / "drafters" / name for kind, name in (("full", "full"), ("slimspec", "slimspec-r32"))}
NUM_PROMPTS, NEW_TOKENS = 56, 32
# two concurrent requests at most would hide ragged batches; prompts of 32-160 tokens are prefilled in chunks of 64
ENGINE = {"max_running_requests": 8, "chunked_prefill_size": 64, "max_total_tokens": 16384, "log_level": "error"}

Ids = list[int]


@contextmanager
def running_engine(drafter: Path | None, **options: Any) -> Iterator[Any]:
    import sglang

    assert_plugin_active()
    engine = sglang.Engine(
        **engine_arguments(str(TARGET), None if drafter is None else str(drafter), **(ENGINE | options))
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def generate(engine: Any, prompts: list[Ids], new_tokens: int = NEW_TOKENS, **sampling: Any) -> list[dict[str, Any]]:
    """All prompts at once (up to 8 run together), greedy unless said otherwise."""
    return engine.generate(
        input_ids=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": new_tokens, **sampling}
    )


def output_ids(answers: list[dict[str, Any]]) -> list[Ids]:
    return [answer["output_ids"] for answer in answers]


@dataclass(frozen=True)
class Oracle:
    """Plain SGLang's greedy answers, and where they stop when a token of their middle is made a stop token."""

    answers: list[Ids]
    stop_tokens: Ids
    stopped: list[Ids]
    long_answer: Ids


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


def prompt_texts(count: int) -> list[str]:
    lines = (ASSETS / "prompts" / "heldout_python.jsonl").read_text().splitlines()
    assert len(lines) >= count
    return [json.loads(line)["turns"][0] for line in lines[:count]]


@pytest.fixture(scope="session")
def prompts(tokenizer: Any) -> list[Ids]:
    return [tokenizer.encode(text) for text in prompt_texts(NUM_PROMPTS)]


@pytest.fixture(scope="session")
def long_prompt(prompts: list[Ids]) -> Ids:
    """Nearly the whole context of 2048 tokens."""
    return [token for prompt in prompts for token in prompt][:2000]


@pytest.fixture(scope="session")
def oracle(prompts: list[Ids], long_prompt: Ids) -> Oracle:
    with running_engine(None) as engine:
        answers = output_ids(generate(engine, prompts))
        stop_tokens = [answer[len(answer) // 2] for answer in answers]
        stopped = [
            generate(engine, [prompt], stop_token_ids=[stop])[0]["output_ids"]
            for prompt, stop in zip(prompts[:12], stop_tokens[:12], strict=True)
        ]
        return Oracle(answers, stop_tokens, stopped, generate(engine, [long_prompt], 24)[0]["output_ids"])


@pytest.fixture(scope="session")
def hf_answers(prompts: list[Ids]) -> list[Ids]:
    """Hugging Face's greedy answers, one prompt at a time: an oracle that shares no code with SGLang."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers
