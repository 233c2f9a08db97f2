"""Weight formats, UAQ and checksums. Pure PyTorch, with Triton kernels for a GPU."""
