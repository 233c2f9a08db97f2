"""Evaluation of a model: its accuracy, and how far its quantized copy differs from it."""
