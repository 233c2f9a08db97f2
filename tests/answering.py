"""An address of this machine that answers HTTP requests as a test says."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

from qurl_megatron.rollout.server import Server


class HttpServer(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True


@dataclass
class Address:
    """What is answered to every request, whatever it asks for."""

    url: str = ""
    status: int = 200
    text: str = ""  # HTML if it begins with a tag, else JSON
    delay_s: float = 0.0  # it waits this long with an answer
    asked: list[float] = field(default_factory=list)  # the wait of each request

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Answer within this context."""
        ended = Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805, the address is `self`
                handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
                self.asked.append(self.delay_s)
                ended.wait(self.asked[-1])
                is_page = self.text.startswith("<")
                with contextlib.suppress(BrokenPipeError):
                    handler.send_response(self.status)
                    handler.send_header(
                        "Content-Type", "text/html" if is_page else "application/json"
                    )
                    handler.end_headers()
                    handler.wfile.write(self.text.encode())

            do_POST = do_GET

            def log_message(self, *args: object) -> None:
                pass

        with HttpServer(("127.0.0.1", 0), Handler) as server:
            thread = Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            yield
            ended.set()
            server.shutdown()
            thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
Answering = Callable[[socket.socket], None]


@contextlib.contextmanager
def server_that(answer: Answering) -> Iterator[Server]:
    """Listen, and answer each connection by hand once a request has come."""
    ended = Event()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(2**16)
            answer(connection)
            ended.wait(20)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listening.accept()[0]
                Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        Thread(target=accept, daemon=True).start()
        port = listening.getsockname()[1]
        try:
            yield Server(f"http://127.0.0.1:{port}", "a key", is_remote=True, run="first")
        finally:
            ended.set()
            listening.shutdown(socket.SHUT_RDWR)  # wakes `accept`


def saying(text: str, status: str = "200 OK") -> Answering:
    content = text.encode("utf-8", "surrogatepass")
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return lambda connection: connection.sendall(f"{head}\r\n\r\n".encode() + content)


def trickle(first: bytes) -> Answering:
    """Send these bytes, and then one more now and then, without an end."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(b" ")
            time.sleep(0.05)

    return answer


def flood(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"\r\n[")
    while True:
        connection.sendall(b"0," * 2**15)


def nothing(connection: socket.socket) -> None:
    """Keep the connection open."""
