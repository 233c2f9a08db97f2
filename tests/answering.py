"""An address of this machine that answers HTTP requests as a test says."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread


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
