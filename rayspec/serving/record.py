"""What a champion's folder says of itself: `serving.json`, written when it is promoted."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_ext.adapter.server_fields import check_overrides
from sglang_ext.artefacts import SERVING
from sglang_ext.fingerprints import file_sha256
from sglang_ext.json_text import check_mapping, parse_json
from sglang_ext.settings import Settings, build

RECORD = SERVING
# of SGLang's server: what is checked, and who may reach it
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


@dataclass(frozen=True, kw_only=True)
class ServingRecord(Settings):
    """`target` and `target_sha256`: what it was measured on. `files`: SHA-256 of each file of the drafter. `flags`:
    ServerArgs fields that it was measured with, without paths. `evidence`: the figures that it was chosen by."""

    head: str
    target: str
    target_sha256: str
    files: dict[str, str]
    flags: dict[str, Any]
    num_threads: int | None = None
    nodes: int = 1
    evidence: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = sorted(set(self.flags) & NOT_OF_A_RECORD)
        if own:
            raise ValueError(f"flags must be without {', '.join(own)}, which whoever serves it decides")
        check_overrides(self.flags, "flags")
        others = sorted(set(self.flags) - set(MEASURED))
        if others:
            raise ValueError(
                f"flags must be without {', '.join(others)}: no setting of speed that a champion may bring; sweep "
                "without it, and give it to SGLang's server yourself (rayspec serve ... -- --flag)"
            )
        for name, value in (("num_threads", self.num_threads), ("nodes", self.nodes)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def write(self, folder: Path) -> str:
        """The fingerprint of the file that is written."""
        (folder / RECORD).write_text(json.dumps(asdict(self), indent=1) + "\n")
        return file_sha256(folder / RECORD)


def read_record(folder: Path) -> ServingRecord:
    """Raises ValueError for a folder without a record, and for one that is damaged."""
    file = folder / RECORD
    if not file.is_file():
        raise ValueError(
            f"{folder} carries no evidence of what it was measured to be ({RECORD} is missing); rayspec report "
            "--promote registers a champion with it"
        )
    try:
        return build(ServingRecord, check_mapping(parse_json(file.read_bytes()), "it"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); promote the champion again") from error


def files_sha256(folder: Path) -> dict[str, str]:
    """Of every file below a folder but its record, by its path there. Raises ValueError for what is no plain file."""
    found = sorted(p for p in folder.rglob("*") if p != folder / RECORD and not (p.is_dir() and not p.is_symlink()))
    odd = [str(p.relative_to(folder)) for p in found if p.is_symlink() or not p.is_file()]
    if odd or (folder / RECORD).is_symlink():
        raise ValueError(
            f"{folder} holds {', '.join(odd) or RECORD}, which are no plain files: what they stand for can be "
            "exchanged; put the files themselves there (cp -rL)"
        )
    return {str(p.relative_to(folder)): file_sha256(p) for p in found}
