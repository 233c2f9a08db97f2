"""Weight formats, UAQ (update-aware quantization) and checksums of tensors."""
