"""Ports, addresses and keys: how this machine is reached."""

import contextlib
import errno
import importlib
import secrets
import socket
from pathlib import Path
from typing import Any

PORTS = range(20000, 32768)  # below Linux's ephemeral ports
INTERFACES = Path("/sys/class/net")
_drawn: set[int] = set()  # the ports that `free_port` has returned


def free_port() -> int:
    """Return a free port below the ephemeral range, drawn at random; no port is returned twice.

    A server binds its ports many seconds after they are chosen. In between, the kernel could give
    an ephemeral port to any outgoing connection, and another server of this process could draw it.
    """
    while True:
        port = secrets.choice(PORTS)
        if port in _drawn:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))  # on all addresses
            _drawn.add(port)
            return port


def make_key() -> str:
    """Return a key of 256 bits for servers; it does not begin with a dash, as an option would."""
    return secrets.token_hex(32)


def address_towards(host: str) -> str:
    """Return the address at which the machine `host` can reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # chooses a route, sends nothing; any port will do
        return str(probe.getsockname()[0])


def bind_stores() -> None:
    """Make torch's stores in this process listen only on the address at which they are reached.

    By default a `torch.distributed.TCPStore` listens on all addresses of a machine, and answers
    everybody. With this, the stores of a run on one machine listen on loopback.
    """
    import torch.distributed as dist

    # An import statement would find the function of this name, which hides the module.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")

    class Store(dist.TCPStore):
        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            **options: Any,
        ) -> None:
            listening = _listen(host_name, port) if is_master else None
            if listening is not None:
                port = listening.getsockname()[1]  # port 0 asks for any
                options["master_listen_fd"] = listening.detach()
            super().__init__(host_name, port, world_size, is_master, **options)

    if dist.TCPStore.__name__ != Store.__name__:
        dist.TCPStore = rendezvous.TCPStore = Store  # type: ignore


def _listen(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens on one address of this machine.

    Return None, so that torch listens on all addresses, if the host is not on this machine, or if
    only this machine takes its name for loopback, as Debian's /etc/hosts says.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    is_name = not host.startswith("127.") and host != "localhost"
    if is_name and str(address[0]).startswith("127."):
        return None
    try:
        return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise


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
