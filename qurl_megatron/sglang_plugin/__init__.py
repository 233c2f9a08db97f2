"""The SGLang plugin: every process of a server loads it, through two entry points.

`activate_cpu_platform` (group `sglang.srt.platforms`, selected with SGLANG_PLATFORM=qurl_cpu) lets
SGLang run on a machine without a GPU. `register` (group `sglang.srt.plugins`) adds eight things:
the reloadable quantized linear layers and experts `qurl_int8`, `qurl_int4`, `qurl_int4_g32`,
`qurl_fp8` and `qurl_fp8_block`;
checksums of the weights a server holds; receiving weights with a time limit, also from the
learner's memory; a weight version for every sampled token; sampling masks of several answers to a
prompt; memory that a sleeping server gives back, and a KV cache that takes memory only when it is
written; weights over HTTP, and access control before all routes (`access.py`). Without a GPU it
also replaces the kernels of linear attention, which only hybrids call and import (`delta_net.py`).
Importing this package does nothing.
"""


def activate_cpu_platform() -> str | None:
    """Return the name of the platform's class, or None if this machine has a GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    return "qurl_megatron.sglang_plugin.platform.CpuPlatform"


def register() -> None:
    """Make SGLang add this package's layers and hooks, once per process, before a model is built.

    SGLang only logs an error of a plugin, or a hook that it cannot apply, and serves on: the server
    would fail at the first publish. An error of `HookRegistry.apply_hooks`, however, ends the
    process. So everything happens there.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply_registered = HookRegistry.apply_hooks

    def apply_hooks() -> None:
        bind_stores()
        add_layers()
        hooks = add_hooks()
        apply_registered()
        check_applied(hooks)

    HookRegistry.apply_hooks = apply_hooks


def bind_stores() -> None:
    """Make the stores at which SGLang's ranks meet listen only where they are reached."""
    import importlib

    import torch.distributed as dist

    from qurl_megatron.machine.stores import Store

    # An import statement would find the function of this name, which hides the module.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    dist.TCPStore = rendezvous.TCPStore = Store  # type: ignore


def add_layers() -> None:
    """Let SGLang choose this package's quantized layers by name."""
    from sglang.srt.layers.quantization import BASE_QUANTIZATION_METHODS, QUANTIZATION_METHODS
    from sglang.srt.server_args import add_quantization_method_choices

    from qurl_megatron.sglang_plugin import formats

    BASE_QUANTIZATION_METHODS.update(formats.CONFIGS)
    QUANTIZATION_METHODS.update(formats.CONFIGS)
    add_quantization_method_choices(list(formats.CONFIGS))


def add_hooks() -> list[str]:
    """Register this package's hooks; return the names of the functions they replace or wrap."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from qurl_megatron.sglang_plugin import memory, platform, routes, sampling, weights

    replacements = {
        "utils.weight_checker.WeightChecker._compute_checksum": weights.compute_checksum,
        "configs.update_config.adjust_config_with_unaligned_cpu_tp": platform.keep_model_config,
    }
    scheduler = "managers.scheduler.Scheduler"
    updater = "model_executor.model_runner_components.weight_updater"
    manager = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    wrappers = {
        f"{updater}.init_custom_process_group": weights.join_group,
        f"{updater}.WeightUpdater.receive_weights_from_distributed": weights.receive,
        f"{manager}.update_weights_from_distributed": weights.update_weights,
        f"{manager}.release_memory_occupation": memory.release,
        "utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal.region": memory.region,
        "utils.weight_checker.WeightChecker.handle": weights.handle,
        "managers.tokenizer_manager.TokenizerManager._send_one_request": sampling.send,
        "utils.auth.add_api_key_middleware": routes.add_routes,
        "entrypoints.engine._server_args_for_logging": routes.without_key,
        "mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal": memory.create_cache,
        "mem_cache.memory_pool.MambaPool.__init__": memory.create_states,
        f"{scheduler}.continue_generation": platform.resume,
        f"{scheduler}._record_scheduler_state_for_paused_engine": platform.rest,
        f"{scheduler}.run_batch": weights.run_batch,
        f"{scheduler}._add_request_to_queue": weights.enqueue,
        "runtime_context.RuntimeContext.override": weights.keep_newest,
    }
    kinds = {HookType.REPLACE: replacements, HookType.AROUND: wrappers}
    hooks = [
        (f"sglang.srt.{name}", function, kind)
        for kind, functions in kinds.items()
        for name, function in functions.items()
    ]
    if activate_cpu_platform():
        hooks += [
            (f"sglang.kernels.ops.{name}", function, HookType.REPLACE)
            for name, function in platform.kernels().items()
        ]
    for hook in hooks:
        HookRegistry.register(*hook)
    return [name for name, _, _ in hooks]


def check_applied(names: list[str]) -> None:
    """Check that SGLang applied the hooks with these names.

    Raises:
        RuntimeError: SGLang did not apply one of them.
    """
    from importlib.metadata import version

    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [name for name in names if name not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            f"SGLang {version('sglang')} has no {', '.join(missing)}, which qurl-megatron changes; "
            "install the version in requirements.txt"
        )
