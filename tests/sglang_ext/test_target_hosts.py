"""What a plan says of SGLang's models, against their source."""

import importlib
import inspect

import pytest

from sglang_ext.adapter.target_hosts import HOSTS, NO_CAPTURE, REFUSED

MODULES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
           "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe", "Gemma3ForCausalLM": "gemma3_causal",
           "GptOssForCausalLM": "gpt_oss", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2"}  # fmt: skip


@pytest.mark.parametrize("name", [*HOSTS, *REFUSED])
def test_what_is_said_of_sglangs_models_is_so(name: str) -> None:
    module = importlib.import_module(f"sglang.srt.models.{MODULES[name]}")
    assert hasattr(getattr(module, name), "set_eagle3_layers_to_capture") == (REFUSED.get(name) != NO_CAPTURE)
    if name in HOSTS:
        assert "sliding_window" not in inspect.getsource(module)


def test_gemma_3_leaves_the_residual_out_of_what_it_captures() -> None:
    """Once this fails, it may be a host: tests/sglang_ext/test_target_engines.py says so."""
    source = inspect.getsource(importlib.import_module("sglang.srt.models.gemma3_causal").Gemma3TextModel.forward)
    assert "hidden_states, residual = layer(" in source
    assert "aux_hidden_states.append(hidden_states)" in source
