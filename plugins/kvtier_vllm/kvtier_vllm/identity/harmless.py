"""Settings of vLLM that cannot change the KV of a prompt. All others are part of an engine's identity.

A setting that is in neither table counts, such as one that another version of vLLM has added: a setting that counts
without need costs a cold start; one that should count and does not would cause a wrong answer. KV that differs only by
the order in which floating-point numbers were summed is taken to be the same.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The fields of each part of `VllmConfig` that may differ, by the reason. "" is `VllmConfig` itself.
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "where things lie; what is read there is identified by its bytes, or counts under another name": {
        "model_config": "model model_weights revision hf_config_path hf_token trust_remote_code",
        # load_format is part of the weights' fact, unless each of several formats would read the same files.
        "load_config": "download_dir load_format",
        "compilation_config": "cache_dir local_cache_dir debug_dump_path",
        "speculative_config": "model revision",
        "model_config.multimodal_config": "mm_encoder_fp8_scale_save_path",
    },
    "applied to or read from other fields, which count": {
        # hf_overrides are in hf_config; quant_config is made of quantization, quantization_config and files beside the
        # weights. disable_hybrid_kv_cache_manager shows in the specs of the layers' caches. The target_* fields are
        # model_config and parallel_config themselves. max_model_len counts as "longest sequence".
        "model_config": "hf_overrides max_model_len",
        "": "quant_config",
        "scheduler_config": "disable_hybrid_kv_cache_manager",
        "speculative_config": "target_model_config target_parallel_config",
        "cache_config": "user_specified_block_size _block_size_resolved",
        "parallel_config": "_allow_auto_resolve_cp_interleave_size",
    },
    "before the tokens of a prompt are known, which are the key": {
        # Requests that come with embeddings are bypassed, and items are identified by their processed bytes.
        "model_config": (
            "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init allowed_local_media_path "
            "allowed_media_domains io_processor_plugin renderer_num_workers enable_prompt_embeds"
        ),
        "model_config.multimodal_config": (
            "limit_per_prompt media_io_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
            "mm_shm_cache_max_object_size_mb mm_ipc_gpu_memory_gb mm_tensor_ipc skip_mm_profiling "
            "allow_missing_mm_embeddings enable_mm_embeds"
        ),
    },
    "after the KV is computed: sampling and output": {
        # Dummy weights are drawn from the seed, and their fact contains it.
        "model_config": (
            "seed generation_config override_generation_config logits_processors max_logprobs logprobs_mode "
            "return_sampling_mask use_fp64_gumbel served_model_name"
        ),
        "": "structured_outputs_config watermark_config reasoning_config aux_output_config",
    },
    "how much at once, and in which order": {
        # The fields of compilation_config follow from the budgets.
        "scheduler_config": (
            "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs max_num_queued_reqs "
            "max_num_queued_tokens max_num_encoder_input_tokens encoder_cache_size long_prefill_token_threshold "
            "long_prefill_token_threshold_adaptive enable_chunked_prefill disable_chunked_mm_input policy "
            "scheduler_cls scheduler_reserve_full_isl watermark prefill_schedule_interval async_scheduling "
            "stream_interval"
        ),
        "compilation_config": (
            "compile_ranges_endpoints compile_sizes cudagraph_capture_sizes max_cudagraph_capture_size"
        ),
        "lora_config": "max_loras max_cpu_loras",
    },
    "how much memory, for how many blocks": {
        "cache_config": (
            "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks num_gpu_blocks_override num_cpu_blocks "
            "kv_cache_size_tokens kv_cache_max_concurrency"
        ),
        "model_config": (
            "enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names "
            "enable_cumem_allocator enable_nccl_comm_suspend"
        ),
    },
    "caches and transfers of KV beside this one": {
        "cache_config": (
            "enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit "
            "hash_block_size cache_hit_alignment_tokens kv_offloading_size kv_offloading_backend"
        ),
        "": "kv_transfer_config kv_events_config",
    },
    "which process of several, on which machine and port, and how long it is waited for": {
        # elastic_ep_max_dp_size is the size that vLLM leaves to a rank of a dense model.
        "": "instance_id shutdown_timeout",
        "parallel_config": (
            "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
            "data_parallel_index data_parallel_master_ip data_parallel_master_port data_parallel_rpc_port "
            "data_parallel_backend elastic_ep_max_dp_size data_parallel_external_lb data_parallel_hybrid_lb "
            "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank dp_sync_interval "
            "disable_nccl_for_dp_synchronization distributed_executor_backend distributed_timeout_seconds "
            "cpu_distributed_timeout_seconds assigned_physical_gpu_ids numa_bind numa_bind_nodes numa_bind_cpus "
            "master_addr master_port nnodes node_rank rank placement_group ray_runtime_env ray_workers_use_nsight "
            "max_parallel_loading_workers enable_fault_tolerance fault_tolerance_config"
        ),
        "ec_transfer_config": "engine_id ec_ip ec_port",
    },
    "how files are read, not what they hold": {
        "load_config": (
            "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
            "use_tqdm_on_load"
        ),
    },
    "what is observed and logged": {
        "": "observability_config profiler_config logging_config",
        "parallel_config.eplb_config": "log_balancedness log_balancedness_interval",
    },
    "filled in by a process while it runs": {
        # The layers that have KV, static_forward_context, are facts of their own.
        "compilation_config": (
            "static_forward_context static_all_moe_layers enabled_custom_ops disabled_custom_ops traced_files "
            "compilation_time encoder_compilation_time"
        ),
    },
}


_WHOLE = [
    f"{of}.{name}".lstrip(".") for fields in _FIELDS.values() for of, names in fields.items() for name in names.split()
]
#: The same for a draft model.
_DRAFTS = [
    f"speculative_config.draft_{name}"
    for name in _WHOLE
    if name.startswith(("model_config.", "parallel_config.", "load_config."))
]
#: Fields by their names relative to `VllmConfig`. A name includes everything below it.
FIELDS = frozenset([*_WHOLE, *_DRAFTS])

#: Fields that count unless engines with a different number of ranks can use the frames (`identity: {ranks: any}`): the
#: number, in whose place the heads of all ranks and their order in pages are facts, and what follows from it.
OF_RANKS = frozenset({"parallel_config.tensor_parallel_size", "parallel_config.world_size"})

#: Environment variables that vLLM or libraries read, by the reason why they may differ.
_VARIABLES: Mapping[str, str] = {
    "how vLLM was built; its version counts": (
        "CMAKE_BUILD_TYPE CUDA_HOME MAX_JOBS NVCC_THREADS VERBOSE VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL "
        "VLLM_DOCKER_BUILD_CONTEXT VLLM_IMAGE_TAG VLLM_MAIN_CUDA_VERSION VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX "
        "VLLM_SKIP_VERSION_SUFFIX VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST"
    ),
    "where things lie": (
        "LD_LIBRARY_PATH S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VLLM_ASSETS_CACHE "
        "VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_CUDART_SO_PATH "
        "VLLM_CUDA_COMPATIBILITY_PATH VLLM_DEBUG_DUMP_PATH VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR "
        "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MEDIA_CACHE VLLM_MODEL_REDIRECT_PATH "
        "VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_RPC_BASE_PATH VLLM_RUST_FRONTEND_PATH VLLM_USE_MODELSCOPE "
        "VLLM_XLA_CACHE_PATH"
    ),
    "before the tokens of a prompt are known, which are the key": (
        "VLLM_AUDIO_FETCH_TIMEOUT VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS "
        "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_IMAGE_FETCH_TIMEOUT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB "
        "VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_PREPROCESS_WORKERS "
        "VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_IMAGE_PIXELS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB "
        "VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_CONNECTOR VLLM_MEDIA_FETCH_MAX_RETRIES "
        "VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_SYSTEM_START_DATE VLLM_USE_FASTOKENS "
        "VLLM_VIDEO_FETCH_TIMEOUT VLLM_VIDEO_LOADER_BACKEND"
    ),
    "after the KV is computed: sampling, parsing and output": (
        "VLLM_COMPUTE_NANS_IN_LOGITS VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_MAX_BAD_WORDS_TOTAL_TOKENS "
        "VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS "
        "VLLM_RAISE_ON_LOGIT_NANS VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY "
        "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FLASHINFER_SAMPLER "
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB VLLM_XPU_USE_SAMPLER_KERNEL"
    ),
    "the HTTP server": (
        "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_API_KEY "
        "VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_ENABLE_COHERE_API "
        "VLLM_ENABLE_RESPONSES_API_STORE VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
        "VLLM_SERVER_DEV_MODE VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND"
    ),
    "which process of several, on which machine and port, and how long it is waited for": (
        "CUDA_VISIBLE_DEVICES LOCAL_RANK VLLM_DIST_IDENT VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK "
        "VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH "
        "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HOST_IP "
        "VLLM_LOOPBACK_IP VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD "
        "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_PLUGINS VLLM_PORT VLLM_PROCESS_NAME_PREFIX "
        "VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY "
        "VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY "
        "VLLM_RAY_PER_WORKER_GPUS VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_USE_RAY_V2_EXECUTOR_BACKEND "
        "VLLM_USE_SPINLOOP_EXT VLLM_WORKER_MULTIPROC_METHOD VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
    ),
    "how much memory, and which cores": (
        "VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_ENABLE_STARTUP_PLAN "
        "VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE "
        "VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY "
        "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WSL2_ENABLE_PIN_MEMORY"
    ),
    "caches and transfers of KV beside this one": (
        "MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_EC_SIDE_CHANNEL_HOST "
        "VLLM_EC_SIDE_CHANNEL_PORT VLLM_GPU_NIC_PCIE_MAPPING VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES "
        "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT "
        "VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS "
        "VLLM_MOONCAKE_STORE_TIER_LOG VLLM_NIC_SELECTION_VARS VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT "
        "VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS VLLM_P2P_SIDE_CHANNEL_HOST "
        "VLLM_P2P_SIDE_CHANNEL_PORT VLLM_USE_SIMPLE_KV_OFFLOAD"
    ),
    "what is observed and logged": (
        "FORCE_COLOR NO_COLOR VLLM_CONFIGURE_LOGGING VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_MFU_METRICS "
        "VLLM_DEBUG_WORKSPACE VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK "
        "VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM "
        "VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_NO_USAGE_STATS "
        "VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_PATTERN_MATCH_DEBUG VLLM_TRACE_FUNCTION VLLM_USAGE_SOURCE "
        "VLLM_USAGE_STATS_SERVER"
    ),
    "which devices, memory, threads, caches, builds and logs libraries have": (
        "CUBLAS_LOGDEST_DBG CUDNN_LOGDEST_DBG CUDNN_LOGINFO_DBG FLASHINFER_WORKSPACE_BASE MKL_DYNAMIC MKL_NUM_THREADS "
        "MKL_VERBOSE NVIDIA_BUILD_ID NVIDIA_CUDA_END_OF_LIFE NVIDIA_DRIVER_CAPABILITIES NVIDIA_PRODUCT_NAME "
        "NVIDIA_REQUIRE_CUDA NVIDIA_VISIBLE_DEVICES ONEDNN_VERBOSE PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF "
        "PYTORCH_KERNEL_CACHE_PATH PYTORCH_NVML_BASED_CUDA_CHECK TORCHINDUCTOR_CACHE_DIR "
        "TORCHINDUCTOR_COMPILE_THREADS TORCHINDUCTOR_CPP_DYNAMIC_THREADS TORCH_CUDA_ARCH_LIST TORCH_EXTENSIONS_DIR "
        "TORCH_HOME TORCH_LOGS TORCH_LOGS_OUT TORCH_SHOW_CPP_STACKTRACES TRITON_CACHE_AUTOTUNING TRITON_CACHE_DIR "
        "TRITON_DUMP_DIR TRITON_HOME TRITON_PRINT_AUTOTUNING TRITON_PTXAS_PATH"
    ),
}

VARIABLES = frozenset(" ".join(_VARIABLES.values()).split())
