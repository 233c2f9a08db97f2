"""NVIDIA's driver, asked without torch."""

import shutil
import subprocess

DRIVER_TIMEOUT_S = 120.0  # a driver without persistence first starts every GPU


def installed_gpus() -> int | None:
    """Return how many GPUs NVIDIA's driver lists; None without nvidia-smi.

    Raises:
        TimeoutError: the driver does not answer; the text says what to do.
    """
    if not shutil.which("nvidia-smi"):
        return None
    asking = subprocess.Popen(
        ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        listed, _ = asking.communicate(timeout=DRIVER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        asking.kill()  # not waited for: what waits for a broken driver may never end
        raise TimeoutError(
            f"nvidia-smi -L has not answered in {DRIVER_TIMEOUT_S:g} s: the driver or a GPU is "
            "broken; restart this machine, or take another"
        ) from None
    return sum(line.startswith("GPU ") for line in listed.splitlines())
