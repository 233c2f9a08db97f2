"""Servers that somebody started elsewhere; the run has only their URLs and a key."""
