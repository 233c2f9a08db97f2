"""The training loop and its parts: assembly, sampling, warm-up, evaluation, metrics."""
