"""What a model is worth: its accuracy, and how far its quantized copy is from it."""
