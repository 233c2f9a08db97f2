"""The SGLang plugin: every process of a server loads it, through two entry points.

`activate_cpu_platform` (group `sglang.srt.platforms`, selected with SGLANG_PLATFORM=qurl_cpu) lets
SGLang run on a machine without a GPU. `register` (group `sglang.srt.plugins`) adds five things:
the reloadable quantized linear layers and experts `qurl_int8`, `qurl_fp8` and `qurl_fp8_block`;
checksums of the weights a server holds; receiving weights with a time limit, also from the
learner's memory; a weight version for every sampled token; weights over HTTP, for a server with a
key. Importing this package does nothing.
"""


def activate_cpu_platform() -> str | None:
    """Return the name of the platform's class, or None if this machine has a GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    return "qurl_megatron.sglang_plugin.platform.CpuPlatform"


def register() -> None:
    """Add this package's layers and hooks to SGLang, once per process, before a model is built."""
    from sglang.srt.layers.quantization import BASE_QUANTIZATION_METHODS, QUANTIZATION_METHODS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_quantization_method_choices

    from qurl_megatron.process import bind_stores
    from qurl_megatron.sglang_plugin import formats, platform, weight_routes, weights

    bind_stores()
    BASE_QUANTIZATION_METHODS.update(formats.CONFIGS)
    QUANTIZATION_METHODS.update(formats.CONFIGS)
    add_quantization_method_choices(list(formats.CONFIGS))
    replacements = {
        "utils.weight_checker.WeightChecker._compute_checksum": weights.compute_checksum,
        "configs.update_config.adjust_config_with_unaligned_cpu_tp": platform.keep_model_config,
    }
    for name, function in replacements.items():
        HookRegistry.register(f"sglang.srt.{name}", function, HookType.REPLACE)
    scheduler = "managers.scheduler.Scheduler"
    updater = "model_executor.model_runner_components.weight_updater"
    wrappers = {
        f"{updater}.init_custom_process_group": weights.join_group,
        "utils.weight_checker.WeightChecker.handle": weights.handle,
        f"{updater}.WeightUpdater._update_bucketed_weights_from_distributed": weights.update_bucket,
        "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".update_weights_from_distributed": weights.update_weights,
        f"{updater}.WeightUpdater.update_weights_from_distributed": weight_routes.load_file,
        "utils.auth.add_api_key_middleware": weight_routes.add_routes,
        "server_args.ServerArgs.__repr__": weight_routes.without_key,
        f"{scheduler}.continue_generation": platform.resume,
        f"{scheduler}.run_batch": weights.run_batch,
        f"{scheduler}._add_request_to_queue": weights.enqueue,
        f"{scheduler}.flush_cache": weights.flush_cache,
        "managers.tokenizer_manager.TokenizerManager.record_config_updates": weights.keep_newest,
    }
    for name, function in wrappers.items():
        HookRegistry.register(f"sglang.srt.{name}", function, HookType.AROUND)
