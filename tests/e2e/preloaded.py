"""Importing this imports what commands, servers and ranks need; the tests' programs share it."""

import gc
from importlib import import_module

import setproctitle

from qurl_megatron.rollout import preload

setproctitle.getproctitle()  # finds its place by the environment, so before that changes
preload.import_sglang()
for module in (
    "math_verify",
    "reasoning_gym",
    "qurl_megatron.cli",
    "qurl_megatron.launch.local",
    "qurl_megatron.launch.resume",  # and what prepares a new run
    "qurl_megatron.loop.train",
):
    import_module(module)
gc.freeze()
