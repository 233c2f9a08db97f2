"""What the kernel says of this process's memory, and what it gets back."""

import ctypes
from pathlib import Path

from qurl_megatron.machine.disk import SHARED_MEMORY, free_bytes

LEAST_SHARED_BYTES = 4_000_000  # for semaphores: each has a page, and a checkpoint makes several
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
KERNEL_EVENTS = Path("/proc/vmstat")


def trim_heap() -> None:
    """Give the memory that this process has freed back to the kernel.

    glibc keeps freed memory that lies between pieces in use. Where large temporary tensors of
    changing sizes come and go, as in a server that computes on a CPU, that grows and grows.
    """
    ctypes.CDLL(None).malloc_trim(0)


def keep_heap() -> None:
    """Let this process keep the memory that it frees, for its next tensors, until `trim_heap`.

    Without this, glibc gives every large tensor back to the kernel, which then clears each page of
    the next one. That takes a fifth of the time of a learner on a CPU.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)  # M_MMAP_MAX: no tensor gets a mapping of its own
    libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def memory_limits() -> list[tuple[int, int]]:
    """Return the limit of each cgroup around this process, and what is free of it, in bytes.

    In a container the process's own cgroup is the root of the mounted tree. The kernel's cache of
    files counts as free, because the kernel gives it up.
    """
    limits = []
    for line in OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else []:
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        root = CGROUPS / "memory" if version == 1 else CGROUPS
        names = {1: ("limit_in_bytes", "usage_in_bytes", "total_"), 2: ("max", "current", "")}
        of_limit, of_usage, prefix = names[version]
        for parent in (Path(own), *Path(own).parents):
            group = root / parent.relative_to("/")
            limit = group / f"memory.{of_limit}"  # a number, or `max`
            if not limit.exists() or not (text := limit.read_text().strip()).isdecimal():
                continue
            usage = int((group / f"memory.{of_usage}").read_text())
            counts = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
            files = int(counts[f"{prefix}active_file"]) + int(counts[f"{prefix}inactive_file"])
            limits.append((int(text), max(0, int(text) - usage + files)))
    return limits


def oom_kills() -> int | None:
    """Return how many processes the kernel has killed so far because memory ran out.

    They are those of this process's cgroup and of the ones below it, or of the nearest around it
    that counts them; without cgroups of version 2, those of the whole machine. Return None if the
    kernel does not count them.
    """
    groups = OWN_CGROUPS.read_text().splitlines() if OWN_CGROUPS.exists() else []
    own = Path(next((line.removeprefix("0::") for line in groups if line.startswith("0::")), "/"))
    counters = [CGROUPS / each.relative_to("/") / "memory.events" for each in (own, *own.parents)]
    counter = next((file for file in (*counters, KERNEL_EVENTS) if file.exists()), None)
    lines = counter.read_text().splitlines() if counter else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def lack_of_shared_memory(needed_bytes: int = LEAST_SHARED_BYTES) -> str:
    """Return what to do if /dev/shm has too little room; an empty text if it has enough."""
    free = free_bytes(SHARED_MEMORY)
    if free >= needed_bytes:
        return ""
    return (
        f"{SHARED_MEMORY} has {free / 1e6:,.1f} MB free, and {needed_bytes / 1e6:,.1f} are needed; "
        "make room, or give the container more (docker run --shm-size=8g)"
    )
