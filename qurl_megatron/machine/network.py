"""Ports, addresses and keys: how this machine is reached."""

import contextlib
import secrets
import socket

PORTS = range(20000, 32768)  # below Linux's ephemeral ports
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
