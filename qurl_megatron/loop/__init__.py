"""The training loop and what it calls once a step or once a run."""
