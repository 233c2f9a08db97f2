"""Print what SGLang makes of servers' arguments on an H100: `python -m server_arguments JSON`.

The JSON lists the words of `sglang.launch_server` for each server. Torch says that there is an
H100; no kernel is run.
"""

import json
import sys

from sglang_hooks import pretend_a_gpu

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

if __name__ == "__main__":
    pretend_a_gpu()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    for words in json.loads(sys.argv[1]):
        arguments = prepare_server_args(words)
        arguments.resolve_once()
        arguments.check_server_args()
        resolved = arguments.resolved_dict()
        print(json.dumps({name: resolved[name] for name in FIELDS}, default=repr))
