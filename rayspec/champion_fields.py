"""Which of SGLang's arguments come with a champion, and which are decided where it is served."""

from collections.abc import Iterable

# arguments of SGLang's server that name what is checked, and who may reach it
OWN_FLAGS = (
    *("model-path", "speculative-draft-model-path", "host", "port", "api-key", "admin-api-key", "config"),
    *("load-format", "speculative-draft-load-format", "tokenizer-path", "json-model-override-args"),
)
NOT_OF_A_RECORD = {flag.replace("-", "_") for flag in OWN_FLAGS} | {
    "model",
    "trust_remote_code",
    "ssl_keyfile",
    "ssl_keyfile_password",
}
SHAPE = ("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
# What a champion may bring: how fast it runs, never what is loaded, called, written or listened to. A record comes from
# whoever wrote it, and SGLang has arguments that name code.
MEASURED = (
    *("device", "dtype", "quantization", "kv_cache_dtype", "random_seed", "enable_fp32_lm_head", "enable_tf32_matmul"),
    *("context_length", "max_total_tokens", "mem_fraction_static", "page_size", "swa_full_tokens_ratio"),
    *("max_running_requests", "max_queued_requests", "max_prefill_tokens", "prefill_max_requests"),
    *("chunked_prefill_size", "enable_mixed_chunk", "enable_dynamic_chunking", "num_continuous_decode_steps"),
    *("schedule_policy", "schedule_conservativeness", "disable_overlap_schedule", "disable_radix_cache"),
    *("radix_eviction_policy", "disable_chunked_prefix_cache", "stream_interval"),
    *("tp_size", "pp_size", "dp_size", "ep_size", "attn_dp_size", "attn_cp_size", "moe_dp_size", "moe_dense_tp_size"),
    *("enable_dp_attention", "enable_dp_lm_head", "enable_two_batch_overlap", "enable_single_batch_overlap"),
    *("disable_custom_all_reduce", "enable_nccl_nvls", "enable_symm_mem", "enable_mscclpp"),
    *("enable_flashinfer_allreduce_fusion", "enable_deterministic_inference", "triton_attention_num_kv_splits"),
    *("attention_backend", "decode_attention_backend", "prefill_attention_backend", "sampling_backend"),
    *("grammar_backend", "fp8_gemm_runner_backend", "fp4_gemm_runner_backend", "bf16_gemm_backend"),
    *("moe_runner_backend", "moe_a2a_backend", "deepep_mode"),
    *("disable_cuda_graph", "disable_prefill_cuda_graph", "disable_decode_cuda_graph", "disable_cuda_graph_padding"),
    *("cuda_graph_backend_decode", "cuda_graph_backend_prefill", "cuda_graph_bs_decode", "cuda_graph_bs_prefill"),
    *("cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill", "enable_torch_compile", "torch_compile_max_bs"),
    *SHAPE,
    *("speculative_accept_threshold_single", "speculative_accept_threshold_acc", "speculative_attention_mode"),
    *("speculative_use_rejection_sampling", "speculative_use_block_verification", "speculative_draft_window_size"),
    *("speculative_draft_attention_backend", "speculative_draft_kv_cache_dtype", "speculative_moe_runner_backend"),
    *("speculative_moe_a2a_backend", "speculative_draft_model_quantization"),
)


def not_measured(names: Iterable[str]) -> list[str]:
    """Those of these ServerArgs fields that keep a champion from being promoted."""
    return sorted(set(names) - set(MEASURED) - NOT_OF_A_RECORD)
