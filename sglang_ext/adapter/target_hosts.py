"""Targets whose states SGLang gives a drafter as training reads them. Nothing of SGLang is imported: a plan asks."""

from typing import Any

from sglang_ext.adapter import SGLANG_VERSION
from sglang_ext.drafters import families

# each has a test that serves a drafter of it, and compares what the engine drafts with what training would
HOSTS = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "Gemma3ForCausalLM",
)
WINDOWED = ("GptOssForCausalLM", "Gemma3ForCausalLM")  # whose windows SGLang computes

NO_CAPTURE = f"SGLang {SGLANG_VERSION} does not give the states of its layers (no set_eagle3_layers_to_capture)"
REFUSED = {
    "GemmaForCausalLM": NO_CAPTURE,
    "Gemma2ForCausalLM": NO_CAPTURE,
}


def _way_out() -> str:
    kinds = [kind for kind, own in families().items() if not own.config_class.reads_target]
    return f"choose another target, or drafter.kind {' or '.join(kinds)}, which reads tokens alone"


def check_host(config: Any) -> None:
    """Raise ValueError for a target, by its config in transformers, whose states a drafter of it would not meet in
    SGLang as it met them in training."""
    architectures = getattr(config, "architectures", None)
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if named not in HOSTS:
        reason = REFUSED.get(str(named), "what SGLang gives a drafter of it has not been compared with training")
        raise ValueError(
            f"the target's architectures is [{named}], but a drafter that reads the target's states needs one of "
            f"{', '.join(HOSTS)}: {reason}; {_way_out()}"
        )
    window, longest = getattr(config, "sliding_window", None), config.max_position_embeddings
    if named not in WINDOWED and window is not None and window < longest:
        raise ValueError(
            f"the target's sliding_window is {window}, but SGLang {SGLANG_VERSION} runs a {named} without one, so that "
            f"its states would differ from training's beyond {window} tokens; {_way_out()}"
        )


def check_tree(config: Any, topk: int, attention_backends: tuple[str, str]) -> None:
    """Raise ValueError where SGLang on an accelerator would verify a tree of a windowed target otherwise than text: its
    kernels take a node's row in the tree for its distance from the prefix (`_fwd_kernel` of extend_attention.py),
    and only FlashAttention 3 has the path of each node as a text of its own."""
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if topk > 1 and windowed and set(attention_backends) != {"fa3"}:
        raise ValueError(
            f"--speculative-eagle-topk is {topk}, but layers of the target see a window of {config.sliding_window} "
            f"tokens, and SGLang {SGLANG_VERSION} cuts it short within a tree under --attention-backend "
            f"{attention_backends[1]}; draft a chain (topk 1), or use fa3"
        )
