"""Targets whose states SGLang gives a drafter as training reads them. Nothing of SGLang is imported: a plan asks."""

from typing import Any

from sglang_ext.adapter import SGLANG_VERSION

# each has a test that serves a drafter of it, and compares what the engine drafts with what training would
HOSTS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
)

NO_CAPTURE = f"SGLang {SGLANG_VERSION} does not give the states of its layers (no set_eagle3_layers_to_capture)"
REFUSED = {
    "Gemma3ForCausalLM": f"SGLang {SGLANG_VERSION} gives what the last layer added, or on CUDA the norm of its sum, in "
    "place of the states themselves",
    "GemmaForCausalLM": NO_CAPTURE,
    "Gemma2ForCausalLM": NO_CAPTURE,
}
WAY_OUT = "choose another target, or drafter.kind independent, which reads tokens alone"


def check_host(config: Any) -> None:
    """Raise ValueError for a target, by its config in transformers, whose states a drafter of it would not meet in
    SGLang as it met them in training."""
    architectures = getattr(config, "architectures", None)
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if named not in HOSTS:
        reason = REFUSED.get(str(named), "what SGLang gives a drafter of it has not been compared with training")
        raise ValueError(
            f"the target's architectures is [{named}], but a drafter that reads the target's states needs one of "
            f"{', '.join(HOSTS)}: {reason}; {WAY_OUT}"
        )
    window, longest = getattr(config, "sliding_window", None), config.max_position_embeddings
    if window is not None and window < longest:
        raise ValueError(
            f"the target's sliding_window is {window}, but SGLang {SGLANG_VERSION} runs a {named} without one, so that "
            f"its states would differ from training's beyond {window} tokens; {WAY_OUT}"
        )
