"""Learner and servers that share GPUs in turn."""
