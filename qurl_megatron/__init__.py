"""QuRL: reinforcement learning with quantized rollouts on Megatron-core and SGLang."""
