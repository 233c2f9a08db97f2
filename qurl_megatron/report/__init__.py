"""The metrics and the log of a run, and the HTML report on it."""
