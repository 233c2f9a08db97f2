"""Model architectures, and where each tensor lives in Megatron and Hugging Face layouts."""
