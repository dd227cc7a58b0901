"""What a plan says of SGLang's models, against their source."""

import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_ext.adapter.target_hosts import HOSTS, NO_CAPTURE, REFUSED, WINDOWED, check_tree

MODULES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
           "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe", "Gemma3ForCausalLM": "gemma3_causal",
           "GptOssForCausalLM": "gpt_oss", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2"}  # fmt: skip


@pytest.mark.parametrize("name", [*HOSTS, *REFUSED])
def test_what_is_said_of_sglangs_models_is_so(name: str) -> None:
    module = importlib.import_module(f"sglang.srt.models.{MODULES[name]}")
    assert hasattr(getattr(module, name), "set_eagle3_layers_to_capture") == (REFUSED.get(name) != NO_CAPTURE)
    if name in HOSTS:
        assert ("sliding_window" in inspect.getsource(module)) == (name in WINDOWED)


def test_gemma_3_leaves_the_residual_out_of_what_it_captures() -> None:
    """Once this fails, `gemma3_states` has nothing to mend."""
    source = inspect.getsource(importlib.import_module("sglang.srt.models.gemma3_causal").Gemma3TextModel.forward)
    assert "hidden_states, residual = layer(" in source
    assert "aux_hidden_states.append(hidden_states)" in source


def test_triton_goes_by_the_row_of_a_node_and_flash_attention_by_its_path() -> None:
    """What `check_tree` says. Once the first fails, trees of windowed targets may be exact under Triton."""
    kernel = inspect.getsource(importlib.import_module("sglang.kernels.ops.attention.extend_attention"))
    row_is_distance = (
        "cur_seq_len_prefix + cur_block_m * BLOCK_M + offs_m[:, None]) <= "
        "(start_n + offs_n_prefix[None, :] + SLIDING_WINDOW_SIZE)"
    )
    assert row_is_distance.replace(" ", "") in "".join(kernel.split())
    spec = importlib.util.find_spec("sglang.srt.layers.attention.flashattention_backend")  # imported on CUDA alone
    assert spec is not None
    assert spec.origin is not None
    assert "metadata_swa.max_seq_len_q = 1" in Path(spec.origin).read_text()  # each node is a text of its own


def test_trees_of_windowed_targets_need_flash_attention() -> None:
    windowed = SimpleNamespace(layer_types=["sliding_attention", "full_attention"], sliding_window=128)
    with pytest.raises(ValueError, match=r"eagle-topk is 4, .* window of 128 tokens, .* --attention-backend triton"):
        check_tree(windowed, 4, ("fa3", "triton"))
    check_tree(windowed, 1, ("triton", "triton"))
    check_tree(windowed, 4, ("fa3", "fa3"))
    check_tree(SimpleNamespace(layer_types=["full_attention"], sliding_window=128), 4, ("triton", "triton"))
    check_tree(SimpleNamespace(), 4, ("triton", "triton"))
