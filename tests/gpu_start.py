"""Start as a server does on an H100, up to its first kernel: `python -m gpu_start JSON`.

The JSON lists the words of `sglang.launch_server` for each server. Torch says that there is an
H100. nvcc, the linker and SGLang's cache are the real ones; no kernel is run. A line for each part
says what came of it.
"""

import json
import sys

from sglang_hooks import load_hooks, pretend_a_gpu

FIELDS = (
    "attention_backend",
    "sampling_backend",
    "enable_fp32_lm_head",
    "mem_fraction_static",
    "chunked_prefill_size",
    "cuda_graph_config",
    "disable_overlap_schedule",
    "disable_custom_all_reduce",
    "moe_runner_backend",
)


def say(**found: object) -> None:
    print(json.dumps(found, default=repr), flush=True)


if __name__ == "__main__":
    pretend_a_gpu()
    hooks = load_hooks()
    from sglang.srt.platforms import current_platform

    say(platform=type(current_platform).__name__, hooks=hooks)
    from sglang.srt.server_args import prepare_server_args

    resolved = []
    for words in json.loads(sys.argv[1]):
        arguments = prepare_server_args(words)
        arguments.resolve_once()
        arguments.check_server_args()
        resolved.append({name: arguments.resolved_dict()[name] for name in FIELDS})
    say(arguments=resolved)
    from sglang.srt.plugins.hook_registry import HookRegistry

    from benchmarks.gpu.attention import use_triton

    use_triton()
    HookRegistry.apply_hooks()
    arguments = prepare_server_args(words)
    arguments.resolve_once()
    say(attention_of_kit=arguments.resolved_dict()["attention_backend"])
    import torch
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module

    _jit_clamp_position_module(torch.int64)  # of every server
    say(compiled="clamp_position")
