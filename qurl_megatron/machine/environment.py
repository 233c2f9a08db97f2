"""The variables and scratch directories that processes of this machine get."""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import MutableMapping
from pathlib import Path

LOCK = "lock"  # in a directory of `scratch_directory`; it names the machine
MACHINE = os.fsencode(socket.gethostname())
NEW_S = 60.0  # a scratch directory younger than this may not be locked yet
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
LONGEST_TMPDIR = 74  # a socket's path has at most 107 bytes, and those of a server add 33
SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")
# What a scratch HOME shows of the user's: passwords, and models that are there already.
OF_HOME = (".netrc", ".cache/huggingface/token", ".cache/huggingface/hub")
# numpy and pyarrow start threads when they are imported, unless these variables forbid it. A fork
# would lose the threads.
NO_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
# Where these are set, importing torch binds a process to the first CPU. It hands that on to all
# that it starts: a node's ranks and servers would share one CPU.
THREAD_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
mended: list[str] = []  # what `settle_environment` has changed, for `qurl doctor`


def settle_environment(environment: MutableMapping[str, str]) -> None:
    """Mend the variables of a machine under which processes would fail; children inherit them.

    - Requests to this machine go through no proxy.
    - `THREAD_PLACES` are removed; a process that has imported torch must not have had them.
    - Where HOME cannot be written, libraries get a scratch one for their caches.
    - Where TMPDIR is too long for the paths of sockets, a link to it takes its place.
    """
    given = [environment.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    names = [name.strip() for name in ",".join(given).split(",") if name.strip()]
    if "*" not in names:
        value = ",".join(dict.fromkeys([*names, *THIS_MACHINE]))
        environment.update(dict.fromkeys(("no_proxy", "NO_PROXY"), value))
    if bound := [name for name in THREAD_PLACES if environment.pop(name, "")]:
        mended.append(f"{', '.join(bound)} would bind all processes to one CPU; left out")
    # Path.expanduser would raise for a user whom the machine does not know, as in some containers.
    home, temporary = Path(os.path.expanduser("~")), tempfile.gettempdir()
    short = next((each for each in SHORT_DIRECTORIES if os.access(each, os.W_OK)), temporary)
    if len(os.fsencode(temporary)) > LONGEST_TMPDIR:
        link = f"{_inherited_directory('qurl-tmp-', short)}/t"
        os.symlink(temporary, link)
        environment["TMPDIR"] = tempfile.tempdir = link
        mended.append(f"TMPDIR={temporary} is too long for sockets; {link} leads there")
    if not can_hold_caches(home):
        scratch = Path(_inherited_directory("qurl-home-"))
        for name in filter(lambda name: os.access(home / name, os.R_OK), OF_HOME):
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).symlink_to(home / name)
        environment["HOME"] = str(scratch)
        mended.append(f"HOME={home} cannot be written; each command has caches of its own")


def can_hold_caches(home: Path) -> bool:
    """Return whether libraries can write their caches into a home."""
    return home.is_dir() and all(
        os.access(each, os.W_OK) for each in (home, home / ".cache") if each.exists()
    )


def _inherited_directory(prefix: str, place: str | None = None) -> str:
    """Make a scratch directory for this process, and for the program that it may become."""
    directory, lock = scratch_directory(prefix, place)
    os.set_inheritable(lock, True)
    return directory


def scratch_directory(prefix: str, place: str | None = None) -> tuple[str, int]:
    """Make a directory for temporary files of this process, and remove what others left behind.

    Return its path, and a file descriptor that marks it as in use until it is closed. Whoever
    removes the directory closes it, or the kernel does if the process is killed. What another
    machine left is not touched: its locks need not be seen on this one.

    `place` is the directory in which it is made; None: that of temporary files.
    """
    for leftover in Path(place or tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or just removed
            _remove_unused(leftover)
    directory = tempfile.mkdtemp(prefix=prefix, dir=place)
    lock = os.open(f"{directory}/{LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # without locks on its file system it is never removed
        fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, MACHINE)
    return directory, lock


def _remove_unused(directory: Path) -> None:
    """Remove a directory of `scratch_directory` that no process uses.

    Raises:
        OSError: it is another kind of directory, or a process uses it.
    """
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        status = os.fstat(lock)
        is_own = status.st_uid == os.getuid() and os.read(lock, 256) == MACHINE
        # A directory that is just being made is not locked yet.
        if is_own and time.time() - status.st_mtime > NEW_S:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
    finally:
        os.close(lock)
