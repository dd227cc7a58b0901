"""Every SGLang internal that we replace, wrap, call or build upon: the list to go through when the pin moves.

`tests/sglang_ext/test_internals.py` resolves each name in the installed SGLang and compares its parameters with the
ones written here, so that a moved pin fails there and not in a serving process. It also reads the adapter: whatever
that imports from SGLang must be named here. What we change of it, `patches.py` changes.
"""

from typing import NamedTuple


class Internal(NamedTuple):
    """A dotted name in SGLang, the parameters that we rely on, and what stands in for it, or who relies on it."""

    target: str
    parameters: tuple[str, ...]
    replacement: str


_OPS = "sglang_ext.adapter.cpu.spec_ops"
_SPEC = "sglang.kernels.ops.speculative"
_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_OLLAMA = "sglang.srt.entrypoints.ollama.serving.OllamaServing"
_REFUSED = "sglang_ext.adapter.requests.refuse_on_cpu"

# Replaced on the CPU platform: each is CUDA, Triton or a compiled kernel in SGLang.
CPU_REPLACEMENTS: tuple[Internal, ...] = (
    Internal(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        ("model_runner",),
        "sglang_ext.adapter.cpu.attention.CpuAttentionBackend",
    ),
    Internal(
        f"{_SPEC}.spec_tree.build_tree_kernel_efficient_func",
        (
            "parent_list",
            "top_scores_index",
            "seq_lens",
            "tree_mask",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "topk",
            "spec_steps",
            "num_verify_tokens",
            "tree_mask_mode",
        ),
        f"{_OPS}.build_tree",
    ),
    Internal(
        f"{_SPEC}.spec_tree.verify_tree_greedy_func",
        (
            "predicts",
            "accept_index",
            "accept_token_num",
            "candidates",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "target_predict",
            "topk",
        ),
        f"{_OPS}.verify_tree_greedy",
    ),
    Internal(
        f"{_SPEC}.reject_sampling.chain_speculative_sampling_triton",
        (
            "predicts",
            "accept_index",
            "accept_token_num",
            "candidates",
            "retrive_index",
            "retrive_next_token",
            "retrive_next_sibling",
            "uniform_samples",
            "uniform_samples_for_final_sampling",
            "target_probs",
            "draft_probs",
            "threshold_single",
            "threshold_acc",
            "deterministic",
            "block_verification",
        ),
        f"{_OPS}.verify_chain_sampled",
    ),
    Internal(f"{_SPEC}.row_argmax.row_argmax", ("x",), f"{_OPS}.row_argmax"),
    Internal(
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        ("seed", "positions", "col_indices"),
        f"{_OPS}.murmur_hash32",
    ),
    Internal(
        f"{_SPEC}.cache_locs.assign_draft_cache_locs_contiguous_func",
        (
            "req_pool_indices",
            "req_to_token",
            "seq_lens",
            "out_cache_loc",
            "topk",
            "num_cols",
            "positions",
            "mrope",
        ),
        f"{_OPS}.draft_slots",
    ),
    Internal(
        f"{_SPEC}.cache_locs.fill_front_out_cache_loc_func",
        ("num_front", "out_cache_loc", "front_out_cache_loc"),
        f"{_OPS}.front_slots",
    ),
    Internal(
        f"{_SPEC}.eagle.fill_accept_out_cache_loc_func",
        ("accept_index", "out_cache_loc", "accept_out_cache_loc", "size"),
        f"{_OPS}.accepted_slots",
    ),
    Internal(
        f"{_SPEC}.eagle.fill_bonus_tokens_func",
        ("accept_tokens", "accept_lens", "bonus_tokens", "accept_stride", "batch_size"),
        f"{_OPS}.bonus_tokens",
    ),
    Internal(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
        f"{_OPS}.assign_slots",
    ),
    Internal(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        ("self",),
        f"{_OPS}.skip_kv_copy_warmup",
    ),
    Internal(
        "sglang.kernels.ops.activation.softcap.softcap_inplace_logits",
        ("full_logits", "final_logit_softcapping"),
        "sglang_ext.adapter.cpu.fused_ops.cap_logits",
    ),
    Internal(
        "sglang.srt.layers.moe.fused_moe_native.swiglu_gpt_oss_sigmoid_alpha",
        ("x", "gemm1_alpha", "gemm1_limit"),
        "sglang_ext.adapter.cpu.fused_ops.clamped_swiglu",
    ),
    Internal(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend",
        ("self",),
        f"{_OPS}.create_decode_backend",
    ),
    Internal(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend",
        ("self",),
        f"{_OPS}.create_draft_extend_backend",
    ),
)

# Wrapped on the CPU platform; those of _CONTROL in the process that takes requests.
CPU_WRAPPED: tuple[Internal, ...] = (
    Internal(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        (
            "server_args",
            "init_tokenizer_manager_func",
            "run_scheduler_process_func",
            "run_detokenizer_process_func",
            "port_args",
            "placement_group",
        ),
        "sglang_ext.adapter.cpu.fork_server.launch_by_forks",
    ),
    Internal(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        ("self", "hidden_states", "lm_head", "embedding_bias", "out"),
        "sglang_ext.adapter.cpu.packing.compute_lm_head",
    ),
    Internal(f"{_INFO}.from_schedule_batch", ("batch", "vocab_size"), "sglang_ext.adapter.cpu.seeds.make_with_seeds"),
    Internal(f"{_INFO}.merge_batch", ("self", "other"), "sglang_ext.adapter.cpu.seeds.merge_with_seeds"),
    Internal(
        f"{_INFO}.filter_batch",
        ("self", "keep_indices", "keep_indices_device"),
        "sglang_ext.adapter.cpu.seeds.filter_and_see_greedy",
    ),
    Internal(
        "sglang.srt.speculative.eagle_utils._seeded_verify_coins",
        ("sampling_seed", "seq_lens", "draft_token_num", "device"),
        "sglang_ext.adapter.cpu.seeds.coins_of_any_width",
    ),
    Internal(f"{_CONTROL}.release_memory_occupation", ("self", "obj", "request"), _REFUSED),
    Internal(f"{_CONTROL}.resume_memory_occupation", ("self", "obj", "request"), _REFUSED),
    Internal(f"{_CONTROL}.start_profile", ("self", "req"), _REFUSED),
    Internal(f"{_CONTROL}.stop_profile", ("self",), _REFUSED),
    Internal(f"{_CONTROL}.start_expert_distribution_record", ("self",), _REFUSED),
    Internal(f"{_CONTROL}.stop_expert_distribution_record", ("self",), _REFUSED),
    Internal(f"{_CONTROL}.dump_expert_distribution_record", ("self",), _REFUSED),
)

# None in SGLang where there is no CUDA, so they are set by name and not through the hook registry (which would take
# every other None in the process for a stale copy of them).
CPU_MISSING: tuple[Internal, ...] = (
    Internal(
        "sglang.srt.speculative.eagle_utils.tree_speculative_sampling_target_only", (), f"{_OPS}.verify_tree_sampled"
    ),
)

# A forward of ours on the CPU platform, through SGLang's own seam; others call this one of SGLang's.
CPU_FORWARDS: tuple[Internal, ...] = (
    Internal(
        "sglang.srt.layers.layernorm.RMSNorm.forward_native",
        ("self", "x", "residual", "post_residual_addition", "quant_linear"),
        "sglang_ext.adapter.cpu.fused_ops.rms_norm_forward",
    ),
    Internal(
        "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native",
        ("self", "positions", "query", "key", "offsets", "fused_set_kv_buffer_arg"),
        "sglang_ext.adapter.cpu.fused_ops.rotary_forward",
    ),
)

# SGLang's workers take their parts from these names; in a scheduler they are given ours, by what drafts there.
_DRAFT_WORKER = ("server_args", "gpu_id", "nccl_port", "target_worker")
HEAD_WORKERS: tuple[Internal, ...] = (
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker",  # read by EAGLEWorkerV2.__init__
        _DRAFT_WORKER,
        "sglang_ext.adapter.workers.eagle.HeadDraftWorker",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEDraftExtendCudaGraphRunner",  # by its _capture_cuda_graphs
        ("eagle_worker", "draft_extend_attn_backend", "speculative_num_steps"),
        "sglang_ext.adapter.workers.extend_graphs.HeadExtendGraphs",
    ),
    Internal(
        "sglang.srt.speculative.standalone_worker_v2.StandaloneDraftWorker",  # by StandaloneWorkerV2.__init__
        _DRAFT_WORKER,
        "sglang_ext.adapter.workers.eagle.StandaloneHeadDraftWorker",
    ),
)
LAST_HIDDEN_WORKERS: tuple[Internal, ...] = (
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker",
        _DRAFT_WORKER,
        "sglang_ext.adapter.workers.last_hidden.LastHiddenDraftWorker",
    ),
)
CONTEXT_WORKERS: tuple[Internal, ...] = (
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker",
        _DRAFT_WORKER,
        "sglang_ext.adapter.workers.context.ContextDraftWorker",
    ),
)

# New methods of the scheduler, which `engine.py` calls through `Engine.collective_rpc`.
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
SCHEDULER_CALLS: tuple[Internal, ...] = (
    Internal(f"{_SCHEDULER}.rayspec_swap_drafter", (), "sglang_ext.adapter.swap.swap_drafter"),
    Internal(f"{_SCHEDULER}.rayspec_start_step_clock", (), "sglang_ext.adapter.step_clock.start_step_clock"),
    Internal(f"{_SCHEDULER}.rayspec_write_step_clock", (), "sglang_ext.adapter.step_clock.write_step_clock"),
    Internal(f"{_SCHEDULER}.rayspec_write_policy", (), "sglang_ext.adapter.workers.policy.write_policy"),
)

# Lent another function for the time of a call; the first is None where there is no CUDA.
TOP_K_FILTER = Internal(
    "sglang.srt.speculative.eagle_utils.top_k_renorm_prob", (), "sglang_ext.adapter.workers.sampling._one_filter"
)
CHAIN_VERIFICATION = Internal(
    "sglang.srt.speculative.eagle_utils.chain_speculative_sampling_triton",
    (),
    "sglang_ext.adapter.workers.sampling.verify_siblings",
)

# Lent while ranks capture graphs.
BARRIER = Internal(
    "sglang.srt.distributed.parallel_state.GroupCoordinator.barrier", ("self",), "sglang_ext.adapter.ranks.in_step"
)

# Wrapped through the hook registry on every platform; the checks of requests so that none ends the scheduler or is
# answered with 500, the last two so that sampling follows one distribution.
WRAPPED: tuple[Internal, ...] = (
    Internal(
        "sglang.srt.observability.http_request_metrics.add_http_request_metrics_middleware",
        ("app",),
        "sglang_ext.adapter.http_app.prepare_app",
    ),
    Internal(
        "sglang.srt.observability.http_request_metrics._get_fastapi_request_path",
        ("request",),
        "sglang_ext.adapter.http_app.counted_path",
    ),
    Internal(  # of FastAPI, whose words SGLang's own handler sends
        "fastapi.exceptions.RequestValidationError._format_endpoint_context",
        ("self",),
        "sglang_ext.adapter.http_app.no_place",
    ),
    Internal(
        "sglang.srt.sampling.watermarking.core.redact_watermark_secrets",
        ("value", "in_watermark_config"),
        "sglang_ext.adapter.keys.without_keys",
    ),
    Internal(
        "sglang.srt.utils.auth.decide_request_auth",
        ("method", "path", "authorization_header", "api_key", "admin_api_key", "auth_level"),
        "sglang_ext.adapter.keys.decide_for_any_header",
    ),
    Internal(
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        ("self",),
        "sglang_ext.adapter.requests.check_request",
    ),
    Internal(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        ("self", "obj", "input_text", "input_ids", "input_embeds", "mm_inputs", "token_type_ids"),
        "sglang_ext.adapter.requests.check_tokenized",
    ),
    Internal(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        ("self", "obj", "request"),
        "sglang_ext.adapter.routes.check_route",
    ),
    Internal(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.abort_request",
        ("self", "rid", "abort_all"),
        "sglang_ext.adapter.routes.abort_alone",
    ),
    Internal(
        "sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request",
        ("self", "adapted_request", "request", "raw_request"),
        "sglang_ext.adapter.routes.check_detokenized",
    ),
    Internal(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._validate_request",
        ("self", "request"),
        "sglang_ext.adapter.routes.check_template_variables",
    ),
    Internal(
        f"{_OLLAMA}._stream_chat_response",
        ("self", "gen_request", "raw_request", "model_name"),
        "sglang_ext.adapter.routes.begin_answer",
    ),
    Internal(
        f"{_OLLAMA}._stream_generate_response",
        ("self", "gen_request", "raw_request", "model_name"),
        "sglang_ext.adapter.routes.begin_answer",
    ),
    Internal(
        "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3.load_weights",
        ("self", "weights"),
        "sglang_ext.adapter.models.stock_weights.check_numbers",
    ),
    Internal(
        "sglang.srt.models.gemma3_causal.Gemma3ForCausalLM.set_eagle3_layers_to_capture",
        ("self", "layer_ids"),
        "sglang_ext.adapter.models.gemma3_states.take_sums",
    ),
    Internal(
        "sglang.srt.models.gemma3_causal.Gemma3TextModel.forward",
        ("self", "input_ids", "positions", "forward_batch", "input_embeds", "kwargs"),
        "sglang_ext.adapter.models.gemma3_states.give_sums",
    ),
    Internal(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker",
        ("self", "server_args"),
        "sglang_ext.adapter.plugin.create_worker",
    ),
    Internal(
        "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        ("server_args",),
        "sglang_ext.adapter.toolkit.check_before_speculating",
    ),
    Internal(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.handle_server_args",
        ("self", "server_args"),
        "sglang_ext.adapter.workers.drawn_standalone.offer_drawn_drafts",
    ),
    Internal(
        "sglang.srt.mem_cache.kv_cache_builder.create_tree_cache",
        ("ctx",),
        "sglang_ext.adapter.workers.standalone_cache.match_pairs",
    ),
    Internal(
        "sglang.srt.speculative.eagle_utils.eagle_sample",
        (
            "verify_input",
            "batch",
            "logits_output",
            "grammar_mask",
            "uno_target_max_top_k",
            "watermark_state",
            "watermark_full_mask",
        ),
        "sglang_ext.adapter.workers.sampling.verify_plain_distribution",
    ),
    Internal(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        (
            "probs",
            "top_ks",
            "top_ps",
            "min_ps",
            "need_min_p_sampling",
            "sampling_seed",
            "positions",
            "return_filtered_probs",
            "max_top_k",
        ),
        "sglang_ext.adapter.workers.sampling.sample_min_p",
    ),
)

# Called, overridden or read on every platform.
RELIED_ON: tuple[Internal, ...] = (
    Internal(
        "sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks",
        (),
        "replaced by sglang_ext.adapter.patches.hooks_of, which keeps of HookRegistry._hooks those of the parser",
    ),
    Internal(
        "sglang.srt.plugins.hook_registry.HookRegistry.register",
        ("target", "hook", "hook_type", "source"),
        "called by sglang_ext.adapter.patches, which also reads `_patched`",
    ),
    Internal(
        "sglang.kernels.fused_op.BaseFusedOp.register_oot_forward",
        ("op_cls", "fn", "platform_key"),
        "called by sglang_ext.adapter.patches",
    ),
    Internal(
        "sglang.kernels.jit.utils.compile.toolchain.cuda_home", (), "called by sglang_ext.adapter.toolkit.check_toolkit"
    ),
    Internal("sglang.srt.runtime_context.get_spec", (), "called in schedulers and by sglang_ext.adapter.requests"),
    Internal("sglang.srt.runtime_context.get_parallel", (), "called in schedulers"),
    Internal(
        "sglang.srt.runtime_context.get_device",
        (),
        "called by sglang_ext.adapter.step_clock, workers.last_hidden and propose_graphs",
    ),
    Internal("sglang.srt.runtime_context.get_exec", (), "called by sglang_ext.adapter.workers.sampling"),
    Internal("sglang.srt.runtime_context.get_observability", (), "called by sglang_ext.adapter.metrics"),
    Internal("sglang.srt.runtime_context.attention_backends", (), "called by sglang_ext.adapter.served_target"),
    Internal(
        "sglang.srt.runtime_context.get_server_args", (), "called by sglang_ext.adapter.served_target and longest_draft"
    ),
    Internal(
        "sglang.srt.speculative.spec_utils.fast_sample",
        ("probs", "num_samples", "sampling_seed", "positions", "draft_step"),
        "called by sglang_ext.adapter.workers.sampling",
    ),
    Internal(
        "sglang.srt.model_executor.forward_context.forward_context",
        ("ctx", "forward_batch"),
        "entered by sglang_ext.adapter.workers.eagle",
    ),
    Internal(
        "sglang.srt.model_executor.forward_context.ForwardContext",
        ("attn_backend", "moe_num_token_non_padded"),
        "made by sglang_ext.adapter.workers.eagle",
    ),
    Internal(
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc",
        ("loc", "swa_loc", "full_loc", "physical"),
        "made by sglang_ext.adapter.cpu.attention",
    ),
    Internal(
        "sglang.srt.configs.draft_parallel.DraftParallelSpec", ("tp_execution",), "made by workers and models of ours"
    ),
    Internal(
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        ("self", "layer", "x", "bias"),
        "sglang_ext.adapter.cpu.packing.PackedLinearMethod.apply",
    ),
    Internal("sglang.srt.managers.io_struct.msgpack_encode", ("obj",), "called by sglang_ext.adapter.requests"),
    Internal("sglang.srt.managers.io_struct.msgpack_decode", ("data",), "called by sglang_ext.adapter.requests"),
    Internal(
        "sglang.srt.arg_groups.overrides.declare_resolution",
        ("server_args", "source", "fields"),
        "called by sglang_ext.adapter.workers.drawn_standalone",
    ),
    Internal(
        "sglang.srt.speculative.adaptive_spec_params.resolve_candidate_steps_from_config",
        ("cfg_path",),
        "called by sglang_ext.adapter.longest_draft",
    ),
    Internal(
        "sglang.srt.arg_groups.overrides.resolved_view",
        ("server_args",),
        "called by sglang_ext.adapter.longest_draft",
    ),
    Internal(
        "sglang.srt.arg_groups.overrides.resolving_view",
        ("server_args",),
        "called by sglang_ext.adapter.workers.drawn_standalone and sglang_ext.adapter.toolkit",
    ),
    Internal(
        "sglang.srt.layers.logits_processor.LogitsProcessor._get_logits",
        ("self", "hidden_states", "lm_head", "logits_metadata", "embedding_bias", "use_logits_buffer"),
        "sglang_ext.adapter.models.hosted_head.HeadLogits._get_logits",
    ),
    Internal(
        "sglang.srt.layers.logits_processor.LogitsProcessor.forward",
        (
            "self",
            "input_ids",
            "hidden_states",
            "lm_head",
            "logits_metadata",
            "aux_hidden_states",
            "hidden_states_before_norm",
        ),
        "sglang_ext.adapter.models.hosted_head.HeadLogits.forward",
    ),
    Internal(
        "sglang.srt.models.llama_eagle3.LlamaForCausalLMEagle3.load_weights",
        ("self", "weights"),
        "sglang_ext.adapter.models.hosted_head.HostsHead.load_weights",
    ),
    Internal(
        "sglang.srt.models.llama_eagle.LlamaForCausalLMEagle.load_weights",
        ("self", "weights"),
        "sglang_ext.adapter.models.hosted_head.HostsHead.load_weights",
    ),
    Internal(
        "sglang.srt.models.llama.LlamaForCausalLM.load_weights",
        ("self", "weights"),
        "sglang_ext.adapter.models.hosted_head.HostsHead.load_weights",
    ),
    Internal(
        "sglang.srt.models.llama.LlamaForCausalLM.set_embed_and_head",
        ("self", "embed", "head"),
        "sglang_ext.adapter.models.eagle.RaySpecEagle.set_embed_and_head and "
        "sglang_ext.adapter.models.context.ContextModel.set_embed_and_head, by EagleDraftWorker.init_lm_head",
    ),
    Internal(
        "sglang.srt.models.llama.LlamaForCausalLM.set_embed",
        ("self", "embed"),
        "called by sglang_ext.adapter.models.eagle.RaySpecEagle.set_embed_and_head",
    ),
    Internal(
        "sglang.srt.models.llama_eagle.LlamaModel.forward",
        ("self", "input_ids", "positions", "forward_batch", "input_embeds", "pp_proxy_tensors"),
        "called by sglang_ext.adapter.models.eagle.RaySpecEagle.draft_step, and read by its _before_model",
    ),
    Internal(
        "sglang.srt.models.llama.LlamaModel.forward",
        ("self", "input_ids", "positions", "forward_batch", "input_embeds", "pp_proxy_tensors"),
        "called by sglang_ext.adapter.models.independent.RaySpecIndependent.draft_step",
    ),
    Internal(
        "sglang.srt.models.llama.LlamaDecoderLayer.forward",
        ("self", "positions", "hidden_states", "forward_batch", "capture_output"),
        "read by sglang_ext.adapter.models.independent.RaySpecIndependent._before_layers",
    ),
    Internal(
        "sglang.srt.speculative.standalone_worker_v2.StandaloneWorkerV2",
        ("server_args", "gpu_id", "nccl_port", "target_worker"),
        "sglang_ext.adapter.workers.timed.TimedStandaloneWorker",
    ),
    Internal(
        "sglang.srt.managers.scheduler.Scheduler.flush_cache",
        ("self", "empty_cache"),
        "called by sglang_ext.adapter.swap.swap_drafter, which also reads `scheduler.draft_worker.draft_worker`",
    ),
    Internal(
        "sglang.srt.entrypoints.engine.Engine.flush_cache",
        ("self",),
        "runs in the `loop` that sglang_ext.adapter.engine.loop_of reads; called by take_signal there",
    ),
    Internal(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop",
        ("self",),
        "installs with the first request the handler that sglang_ext.adapter.engine.take_signal takes away",
    ),
    Internal(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.flush_cache",
        ("self", "timeout_s"),
        "called by sglang_ext.adapter.engine.flushed",
    ),
    Internal(
        "sglang.srt.server_args.ServerArgs.resolved_dict",
        ("self",),
        "called by sglang_ext.adapter.engine.backends",
    ),
    Internal(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_tokenizer_and_processor",
        ("self",),
        "sets `tokenizer`, which sglang_ext.adapter.engine.tokenizer reads",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
        ("self", "forward_batch"),
        "sglang_ext.adapter.workers.eagle.HeadDraftWorker.draft_forward",
    ),
    Internal(
        "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.capture_one_shape",
        ("self", "size", "forward", "stream_idx", "variant_label", "attention_variant"),
        "sglang_ext.adapter.workers.extend_graphs.HeadExtendGraphs.capture_one_shape",
    ),
    Internal(
        "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.execute",
        ("self", "forward_batch", "select_index"),
        "sglang_ext.adapter.workers.extend_graphs.HeadExtendGraphs.execute",
    ),
    Internal(
        "sglang.srt.distributed.tensor_model_parallel_all_gather",
        ("input_", "dim"),
        "called by sglang_ext.adapter.models.sharded_head.ShardedHead",
    ),
    Internal(
        "sglang.srt.model_executor.runner_backend.base_cuda_graph_backend.BaseCudaGraphBackend.cleanup",
        ("self",),
        "called by sglang_ext.adapter.workers.eagle.HeadDraftWorker._capture_again and "
        "sglang_ext.adapter.workers.propose_graphs",
    ),
    Internal(
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend",
        ("cuda_graph_runner", "enable_memory_saver", "reuse_output_buffer"),
        "made by sglang_ext.adapter.workers.propose_graphs, of which it reads `device_module`",
    ),
    Internal(
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.capture_session",
        ("self", "stream"),
        "entered there",
    ),
    Internal(
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.capture_one",
        ("self", "shape_key", "forward_fn", "capture_inputs", "post_warmup_hook"),
        "called there",
    ),
    Internal(
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.replay",
        ("self", "shape_key", "static_forward_batch", "kwargs"),
        "called there; reads the key alone",
    ),
    Internal(
        "sglang.srt.distributed.parallel_state.graph_capture", ("stream",), "entered there, as by SGLang's runners"
    ),
    Internal("sglang.srt.model_executor.runner.model_capture_mode", (), "entered there"),
    Internal(
        "sglang.srt.model_executor.runner.base_cuda_graph_runner.freeze_gc",
        ("enable_cudagraph_gc",),
        "entered there, too",
    ),
    Internal(
        "sglang.srt.model_executor.runner_utils.pool.get_or_create_global_graph_capture_stream", (), "called there"
    ),
    Internal(
        "sglang.srt.model_executor.runner.get_batch_sizes_to_capture",
        ("model_runner", "captured_req_width", "gathered_buffer_required"),
        "called there; the first of what it gives is ascending",
    ),
    Internal(
        "sglang.srt.model_executor.cuda_graph_config.check_cuda_graph_backend", ("phase", "backend"), "called there"
    ),
    Internal(
        "sglang.srt.utils.get_available_gpu_memory",
        ("device", "gpu_id", "distributed", "empty_cache", "cpu_group"),
        "called there; `EagleDraftWorkerBase._specialized_graph_memory_usage` is told what was taken",
    ),
    Internal(
        "sglang.srt.speculative.spec_utils.draft_tp_context",
        ("layout",),
        "entered by sglang_ext.adapter.workers.captured.Captured._capturing",
    ),
    Internal("sglang.srt.speculative.spec_utils.draft_pp_context", (), "entered there, too"),
    Internal("sglang.srt.layers.moe.utils.speculative_moe_backend_context", (), "entered there, too"),
    Internal("sglang.srt.layers.moe.utils.speculative_moe_a2a_backend_context", (), "entered there, too"),
    Internal(
        "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context.is_in_breakable_cuda_graph",
        (),
        "called by sglang_ext.adapter.models.hosted_head.HeadLogits.start_routing",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill",
        ("self", "batch", "target_hidden_states", "next_token_ids", "mm_input_embeds", "kv_loc_plan"),
        "sglang_ext.adapter.workers.eagle.HeadDraftWorker._draft_extend_for_prefill",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode",
        ("self", "batch", "batch_result", "kv_loc_plan"),
        "sglang_ext.adapter.workers.eagle.HeadDraftWorker._draft_extend_for_decode",
    ),
    Internal(
        "sglang.srt.speculative.spec_utils.select_top_k_tokens",
        ("i", "topk_p", "topk_index", "hidden_states", "scores", "topk"),
        "called by sglang_ext.adapter.workers.eagle",
    ),
    Internal(
        "sglang.srt.speculative.eagle_utils.organize_draft_results",
        ("score_list", "token_list", "parents_list", "num_draft_token"),
        "called by sglang_ext.adapter.workers.eagle",
    ),
    Internal(
        "sglang.srt.speculative.eagle_utils.per_step_draft_out_cache_loc",
        ("out_cache_loc", "batch_size", "topk", "num_steps"),
        "called by sglang_ext.adapter.workers.eagle",
    ),
    Internal(
        "sglang.srt.models.llama_eagle3.LlamaDecoderLayer.forward",
        ("self", "positions", "embeds", "hidden_states", "forward_batch", "residual"),
        "read by sglang_ext.adapter.models.eagle3.RaySpecEagle3._before_layer",
    ),
    Internal(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.register",
        ("name", "supports_overlap", "validate_server_args", "spec_class"),
        "called by sglang_ext.adapter.spec_algorithm.register_algorithms",
    ),
    Internal(
        "sglang.srt.speculative.spec_registry.CustomSpecAlgo.create_worker",
        ("self", "server_args"),
        "sglang_ext.adapter.spec_algorithm.LastHiddenAlgorithm.create_worker",
    ),
    Internal(
        "sglang.srt.speculative.spec_registry.CustomSpecAlgo.handle_server_args",
        ("self", "server_args"),
        "sglang_ext.adapter.spec_algorithm.LastHiddenAlgorithm.handle_server_args",
    ),
    Internal(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_future_map",
        ("self", "device", "req_to_token_pool", "needs_cpu_seq_lens", "needs_confidence_relay"),
        "taken over by sglang_ext.adapter.spec_algorithm.LastHiddenAlgorithm, whose base lacks it",
    ),
    Internal(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.build_disagg_draft_input",
        ("self", "batch", "last_tokens_tensor", "future_map"),
        "taken over by sglang_ext.adapter.spec_algorithm.LastHiddenAlgorithm",
    ),
    Internal(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.need_topk",
        ("self",),
        "taken over by sglang_ext.adapter.spec_algorithm.LastHiddenAlgorithm, whose base lacks it",
    ),
    Internal(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.carries_draft_hidden_states",
        ("self",),
        "taken over by sglang_ext.adapter.spec_algorithm.LastHiddenAlgorithm, whose base lacks it",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.on_verify_complete_cpu",
        ("self", "num_correct_drafts_per_req", "batch_size"),
        "sglang_ext.adapter.workers.timed.TimedEagleWorker.on_verify_complete_cpu",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify",
        ("self", "batch", "pp_proxy_tensors", "grammar_barrier"),
        "sglang_ext.adapter.workers.timed.TimedEagleWorker.verify",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation",
        ("self", "batch", "on_publish", "grammar_barrier", "pp_proxy_tensors"),
        "sglang_ext.adapter.workers.policy.FollowsPolicy.forward_batch_generation, which also reads `batch.reqs`",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.apply_runtime_state",
        ("self", "state"),
        "sglang_ext.adapter.workers.policy.FollowsPolicy.apply_runtime_state",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.build_adaptive_runtime_state",
        ("self", "speculative_num_steps", "speculative_num_draft_tokens", "cuda_graph_bs"),
        "called by SGLang's controller for each draft length of a policy; of a draft worker it takes the attributes "
        "that sglang_ext.adapter.workers.last_hidden.LastHiddenDraftWorker names",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2._build_trivial_verify_input",
        ("self", "batch"),
        "sglang_ext.adapter.workers.policy.FollowsPolicy._build_trivial_verify_input",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2._stub_skipped_draft_extend",
        ("self", "batch", "batch_output"),
        "sglang_ext.adapter.workers.policy.FollowsPolicy._stub_skipped_draft_extend",
    ),
    Internal(
        "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
        (
            "self",
            "batch",
            "forward_batch",
            "pp_proxy_tensors",
            "is_verify",
            "skip_attn_backend_init",
            "capture_hidden_mode",
            "return_kv_loc_plan",
        ),
        "called by sglang_ext.adapter.workers.plain_step.decode_plainly, which sets what a plain decode step has in "
        "the batch (`input_ids`, `out_cache_loc`, `seq_lens`, `seq_lens_cpu`, `seq_lens_sum`, `spec_info`) and in its "
        "result what a verification has (`accept_lens`, `new_seq_lens`, `next_draft_input`, "
        "`speculative_num_draft_tokens`); it also reads `req_to_token_pool.req_to_token`, `req_pool_indices`, "
        "`has_grammar`, `return_logprob`, `return_hidden_states` and `sampling_info`",
    ),
    Internal(
        "sglang.srt.managers.scheduler.Scheduler._forward_isolation",
        ("self", "batch", "overlap"),
        "puts back what sglang_ext.adapter.workers.plain_step has changed of a batch, as after a verification",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.activate_step_by_batch",
        ("self", "batch_size"),
        "called by sglang_ext.adapter.workers.policy.FollowsPolicy before a plain decode step",
    ),
    Internal(
        "sglang.srt.speculative.adaptive_runtime_state.AdaptiveController",
        ("worker", "policy"),
        "made by sglang_ext.adapter.workers.policy.FollowsPolicy",
    ),
    Internal("sglang.srt.runtime_context.get_context", (), "called by sglang_ext.adapter.workers.policy"),
    Internal(
        "sglang.srt.runtime_context._ConfigBag.override",
        ("self", "kwargs"),
        "called by sglang_ext.adapter.workers.context on get_spec()",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft",
        ("self", "batch", "with_topology"),
        "sglang_ext.adapter.workers.last_hidden.LastHiddenDraftWorker.draft, and "
        "sglang_ext.adapter.workers.eagle.HeadDraftWorker.draft for a drafter with a draft_tree",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_common.prepare_for_draft",
        (
            "draft_input",
            "req_to_token_pool",
            "batch",
            "cuda_graph_runner",
            "draft_model_runner",
            "topk",
            "num_steps",
            "target_translator",
            "num_draft_tokens",
        ),
        "called by sglang_ext.adapter.workers.eagle",
    ),
    Internal(
        "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.execute",
        ("self", "forward_batch"),
        "called by sglang_ext.adapter.workers.eagle",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs",
        ("self",),
        "sglang_ext.adapter.workers.last_hidden.CarriedDrafting._capture_cuda_graphs, and called by "
        "sglang_ext.adapter.workers.eagle.HeadDraftWorker._capture_again",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_attention_backend",
        ("self",),
        "called by sglang_ext.adapter.workers.eagle.HeadDraftWorker._is_captured_beside",
    ),
    Internal(
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.apply_runtime_state",
        ("self", "state"),
        "what it puts into the draft worker, sglang_ext.adapter.workers.resident.GraphSet does, too",
    ),
    Internal(
        "sglang.srt.models.llama.LlamaForCausalLM.forward",
        ("self", "input_ids", "positions", "forward_batch", "input_embeds", "get_embedding", "pp_proxy_tensors"),
        "calls `logits_processor`, which sglang_ext.adapter.workers.context.append_output_to_taps listens to",
    ),
    Internal(
        "sglang.srt.models.llama.LlamaAttention.forward",
        ("self", "positions", "hidden_states", "forward_batch"),
        "called by sglang_ext.adapter.models.context",
    ),
    Internal(
        "sglang.srt.speculative.frozen_kv_mtp_utils.select_last_extend_hidden",
        ("batch", "hidden_states"),
        "called by sglang_ext.adapter.workers.last_hidden",
    ),
    Internal(
        "sglang.srt.speculative.draft_parallel.resolve_draft_parallel_layout",
        ("model_spec", "collapse_cp"),
        "called by sglang_ext.adapter.workers.last_hidden",
    ),
)

# The folder of SGLang's package whose source says what fields ServerArgs has; read by sglang_ext.adapter.server_fields.
FIELDS = ("srt", "arg_groups", "fields")

# Python's multiprocessing, by which an engine starts its processes; sglang_ext.adapter.cpu.fork_server takes its place
# meanwhile.
ENGINE_PROCESSES = "sglang.srt.entrypoints.engine.mp"

# SGLang gives these loggers a handler of their own unless they have one; rayspec.serving.logs gives them ours.
LOGGERS = ("sglang.srt.utils.request_logger.stdout", "sglang.srt.utils.scheduler_status_logger.stdout")

# Imported by the process that the engine's processes fork from on the CPU platform, because these import them: what
# they run, where models are looked up, and what our draft workers need.
PRELOADED: tuple[str, ...] = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.function_call.function_call_parser",
    "sglang_ext.adapter.workers.policy",
    "sglang_ext.adapter.workers.context",
    "sglang_ext.adapter.workers.drawn_standalone",
)

# What classes of ours override of SGLang's beside the above, by SGLang's class; a test reads it from the classes
OVERRIDDEN: dict[str, tuple[str, ...]] = {
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend": (
        "forward_decode",
        "forward_extend",
        "init_forward_metadata",
        "support_triton",
        "verify_mask",
    ),
    "sglang.srt.platforms.device_mixin.DeviceMixin": (
        "_enum",
        "device_name",
        "device_type",
        "get_available_memory",
        "get_current_memory_usage",
        "get_device",
        "get_device_name",
        "get_device_total_memory",
    ),
    "sglang.srt.platforms.interface.SRTPlatform": (
        "apply_server_args_defaults",
        "get_default_attention_backend",
        "get_speculative_cache_locs_fn",
        "init_backend",
        "post_load_model",
        "supports_speculative_algorithm",
    ),
    "sglang.srt.speculative.base_spec_worker.EagleDraftWorkerBase": (
        "_rebuild_topk1_chain_buffers",
        "alloc_memory_pool",
        "draft_extend",
        "draft_runners",
        "init_attention_backends",
        "init_cuda_graphs",
    ),
    "sglang.srt.speculative.eagle_info.EagleVerifyInput": ("max_tree_depth", "tree_topk"),
    "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2": ("last_shared_read_runner", "spec_v2_attn_backends"),
    "sglang.srt.speculative.spec_registry.CustomSpecAlgo": (
        "build_disagg_draft_input",
        "has_draft_kv",
        "is_eagle",
        "is_eagle3",
        "supports_grammar_overlap",
    ),
}

# Imported for what they are: classes that ours extend or take as types, their values, and constants.
IMPORTED: tuple[str, ...] = (
    "sglang.srt.entrypoints.engine.Engine",  # started by engine.py
    "sglang.srt.constants.HEALTH_CHECK_RID_PREFIX",  # routes.py
    "sglang.srt.environ.envs",  # workers/policy.py: SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND
    "sglang.srt.configs.draft_parallel.DraftTPExecution",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",  # the CPU platform's attention
    "sglang.srt.layers.attention.verify_mask.VerifyMask",
    "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
    "sglang.srt.layers.radix_attention.AttentionType",
    "sglang.srt.layers.radix_attention.RadixAttention",
    "sglang.srt.managers.embed_types.PositionalEmbeds",
    "sglang.srt.managers.io_struct.EmbeddingReqInput",
    "sglang.srt.managers.io_struct.TokenizedGenerateReqInput",
    "sglang.srt.managers.utils.GenerationBatchResult",  # workers/plain_step.py completes it as verification does
    "sglang.srt.model_executor.cuda_graph_config.Backend",
    "sglang.srt.model_executor.cuda_graph_config.Phase",
    "sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
    "sglang.srt.model_executor.model_runner.ModelRunner",
    "sglang.srt.model_executor.runner.ShapeKey",  # workers/propose_graphs.py
    "sglang.srt.model_executor.runner_backend_utils.CUDA_GRAPH_CAPTURE_FAILED_MSG",
    "sglang.srt.models.registry.ModelRegistry",  # cpu/fork_server.py
    "sglang.srt.platforms.current_platform",
    "sglang.srt.plugins.load_plugins",  # cpu/fork_server.py, server_words.py
    "sglang.srt.platforms.interface.PlatformEnum",
    "sglang.srt.platforms.interface.SRTPlatform",  # the CPU platform
    "sglang.srt.plugins.hook_registry.HookType",
    "sglang.srt.sampling.sampling_params.SamplingParams",
    "sglang.srt.server_args.ServerArgs",  # whose parser server_words.py asks
    "sglang.srt.sampling.sampling_params.TOP_K_ALL",
    "sglang.srt.speculative.base_spec_worker.EagleDraftWorkerBase",  # workers/last_hidden.py
    "sglang.srt.speculative.eagle_info.EagleDraftInput",  # workers/last_hidden.py makes it
    "sglang.srt.speculative.eagle_info.EagleVerifyInput",  # tree_verify
    "sglang.srt.speculative.eagle_utils.TreeMaskMode",
)
