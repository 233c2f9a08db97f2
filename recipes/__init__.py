"""Recipes: each module has `recipe() -> Config`.

Recipes with the paper's numbers sample from an INT8 copy of the policy. The paper's other rollouts
are `quantization.format=fp8` and `quantization.format=bf16`; BF16 runs without UAQ.
"""
