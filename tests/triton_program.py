"""Run programs that call Triton kernels in a new process: Triton reads its settings once."""

from __future__ import annotations

import os
import subprocess
import sys

import torch


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run Python source on the GPU, or without one in Triton's interpreter."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
