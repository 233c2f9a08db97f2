"""Run programs that call Triton kernels in a new process: Triton reads its settings once."""

import os
import subprocess
import sys
from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[1]
PROLOGUE = "from benchmarks.gpu import exact_interpreter; exact_interpreter.install()\n"


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run Python source on the GPU, or without one in Triton's interpreter."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, "-c", PROLOGUE + program], env=environment, capture_output=True, text=True
    )
