"""Prompts and the verifiers that score completions."""
