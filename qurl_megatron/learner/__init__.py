"""The full-precision policy in Megatron-core: its model, optimizer steps and checkpoints."""
