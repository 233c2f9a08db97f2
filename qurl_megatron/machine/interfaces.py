"""The network interfaces of this machine, between nodes."""

import socket
from pathlib import Path

INTERFACES = Path("/sys/class/net")


def missing_interface(variable: str, value: str) -> str:
    """Return what is wrong with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; "" if nothing.

    gloo takes every interface of its list. NCCL takes what it finds of it: by beginnings of
    names, after `=` by whole names, after `^` all others.
    """
    present = sorted(path.name for path in INTERFACES.glob("*"))
    is_gloo, is_whole = variable.startswith("GLOO"), value.startswith("=")

    def exists(name: str) -> bool:
        return name in present if is_gloo or is_whole else any(p.startswith(name) for p in present)

    names = [name.strip() for name in value.removeprefix("=").split(",") if name.strip()]
    lacking = [name for name in names if not exists(name)]
    is_right = len(lacking) < len(names) if names and not is_gloo else not lacking
    if is_right or value.startswith("^") or not present:
        return ""
    return (
        f"{variable}={value}: {socket.gethostname()} has no interface {', '.join(lacking)}, but "
        f"{', '.join(present)}; name one of these, or unset it"
    )
