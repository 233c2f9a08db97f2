"""Importing this imports what commands, servers and ranks need; the tests' programs share it."""

import gc

import math_verify  # noqa: F401
import reasoning_gym  # noqa: F401
import setproctitle

import qurl_megatron.cli
import qurl_megatron.launch.local
import qurl_megatron.launch.prepare
import qurl_megatron.loop.train  # noqa: F401
from qurl_megatron.rollout import cpu_server

setproctitle.getproctitle()  # finds its place by the environment, so before that changes
cpu_server.import_sglang()
gc.freeze()
