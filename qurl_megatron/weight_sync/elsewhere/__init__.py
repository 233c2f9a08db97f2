"""Servers that somebody started elsewhere, which the run reaches by a URL and a key only."""
