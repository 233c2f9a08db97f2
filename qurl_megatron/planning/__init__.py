"""Memory and time estimates for a run, before it starts."""
