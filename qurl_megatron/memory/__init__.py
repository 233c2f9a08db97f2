"""Estimates of the memory and disk that a run needs, before it starts."""
