"""The disks of this machine: what is free, what belongs to the system."""

import shutil
from pathlib import Path

# Everything below them belongs to the system, except /dev/shm, which is ordinary space.
SYSTEM = "bin boot dev etc lib lib32 lib64 proc sbin sys usr/bin usr/include usr/lib usr/lib32 \
usr/lib64 usr/libexec usr/sbin usr/share".split()
SHARED_MEMORY = Path("/dev/shm")


def is_of_system(path: Path) -> bool:
    """Return whether a path is the root directory, or in a directory of the operating system."""
    path = path.resolve()
    is_below = any(path.is_relative_to(f"/{directory}") for directory in SYSTEM)
    return path == Path("/") or (is_below and not path.is_relative_to(SHARED_MEMORY))


def free_bytes(path: Path) -> int:
    """Return the free space, in bytes, of the file system of a path that may not exist yet.

    A quota may leave less to this user.
    """
    path = path.absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    return shutil.disk_usage(existing).free
