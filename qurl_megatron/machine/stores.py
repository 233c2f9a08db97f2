"""The store at which ranks meet, for the learner, its senders, a preflight and SGLang's servers."""

import errno
import socket
from typing import Any

import torch.distributed as dist


class Store(dist.TCPStore):
    """A `torch.distributed.TCPStore` that listens only on the address at which it is reached.

    torch's listens on all addresses of a machine, and answers everybody. The stores of a run on
    one machine listen on loopback.
    """

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
