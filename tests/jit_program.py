"""Compile kernels of SGLang's for an H100, as a server does: `python -m jit_program`.

Torch says that there is an H100. nvcc, the linker and SGLang's cache are the real ones.
"""

from sglang_hooks import pretend_a_gpu

if __name__ == "__main__":
    pretend_a_gpu()
    import torch
    from sglang.kernels.ops.attention.clamp_position import _jit_clamp_position_module
    from sglang.kernels.ops.moe.moe_topk_softmax import _jit_moe_topk_softmax_module

    _jit_clamp_position_module(torch.int64)  # of every server
    _jit_moe_topk_softmax_module(torch.bfloat16)  # of one with experts, which includes CUB
    print("compiled")
