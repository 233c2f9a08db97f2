"""The training loop and its parts: assembly, sampling, evaluation, metrics."""
