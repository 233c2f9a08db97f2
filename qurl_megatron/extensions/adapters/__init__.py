"""`adapters.rank`: adapters (LoRA) are trained over a frozen, quantized base."""
