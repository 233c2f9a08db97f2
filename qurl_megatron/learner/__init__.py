"""The full-precision policy in Megatron-core."""
