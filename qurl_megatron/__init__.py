"""QuRL: reinforcement learning with quantised rollouts on Megatron-core and SGLang."""
