"""A plugin of SGLang's for an unpacked kit: servers use Triton's attention.

The kit leaves out SGLang's compiled attention, which is its choice on a Hopper GPU. `unpack.py`
enters this plugin, and every process of a server loads it.
"""

import os

CHOOSES = "sglang.srt.arg_groups.model_override_base.get_default_attn_backend"


def use_triton() -> None:
    """Make Triton's attention the one that servers use unless they are told otherwise."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    HookRegistry.register(CHOOSES, lambda *_, **__: "triton", HookType.REPLACE)
