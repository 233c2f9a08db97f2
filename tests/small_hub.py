"""A small Hugging Face Hub on loopback, for the real `huggingface_hub` and `datasets`.

    python tests/small_hub.py DIRECTORY PORT

serves DIRECTORY/models/ORG/NAME/REVISION/... and DIRECTORY/datasets/... The commit of a revision is
made of the content of its files, so a branch moves on when they change.
"""

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class SmallHub(ThreadingHTTPServer):
    """Serves the repositories of a directory, counts what it is asked for, and can fail."""

    daemon_threads = True

    def __init__(self, root: Path, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.root = root
        self.asked: list[str] = []  # the paths of all requests
        self.sent: list[str] = []  # the files whose bytes were asked for
        self.gated: set[str] = set()  # ORG/NAME
        self.breaks_off: str = ""  # the name of a file of which half is sent
        self.commits: dict[tuple[str, str, str], Path] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, kind: str, name: str, files: dict[str, bytes], revision: str = "main") -> str:
        """Write the files of a branch and return its commit."""
        place = self.root / kind / name / revision
        for file, content in files.items():
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_bytes(content)
        return self.commit(kind, name, revision)

    def commit(self, kind: str, name: str, revision: str) -> str:
        """Keep a branch's files as they are under the hash of their content, and return it."""
        if (kind, name, revision) in self.commits:
            return revision
        place = self.root / kind / name / revision
        if not place.is_dir():
            return ""
        content = hashlib.sha1()
        files = {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
        for path, data in files.items():
            content.update(str(path.relative_to(place)).encode() + data)
        commit = content.hexdigest()
        kept = self.root / kind / name / ".commits" / commit
        for path, data in files.items():
            (kept / path.relative_to(place)).parent.mkdir(parents=True, exist_ok=True)
            (kept / path.relative_to(place)).write_bytes(data)
        self.commits[kind, name, commit] = kept
        return commit


class _Handler(BaseHTTPRequestHandler):
    server: SmallHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        api = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if api:
            kind, name, what, revision = api.groups()
        elif file:
            kind, name = (file[1] or "models/")[:-1], file[2]
            what, revision = file[4], file[3]
        else:
            return self._fail(404, "", "no such route")
        if not (self.server.root / kind / name).is_dir():
            return self._fail(404, "RepoNotFound", "Repository not found")
        if name in self.server.gated:
            return self._fail(403, "GatedRepo", "Access to it is restricted")
        commit = self.server.commit(kind, name, (revision or "main").removesuffix("/"))
        if not commit:
            return self._fail(404, "RevisionNotFound", "Invalid rev id")
        place = self.server.commits[kind, name, commit]
        if api:
            self._send_json(place, name, commit, is_tree=what == "tree")
        elif (place / what).is_file():
            self._send_file(place / what, commit)
        else:
            self._fail(404, "EntryNotFound", "Entry not found")

    def _send_json(self, place: Path, name: str, commit: str, *, is_tree: bool) -> None:
        files = [path for path in sorted(place.rglob("*")) if path.is_file()]
        names = {str(path.relative_to(place)): path.read_bytes() for path in files}
        tree = [
            {"type": "file", "path": each, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for each, data in names.items()
        ]
        info = {"id": name, "sha": commit, "siblings": [{"rfilename": each} for each in names]}
        body = json.dumps(tree if is_tree else info).encode()
        self._head(200, len(body), {"Content-Type": "application/json"})
        if self.command == "GET":
            self.wfile.write(body)

    def _send_file(self, file: Path, commit: str) -> None:
        data = file.read_bytes()
        headers = {
            "X-Repo-Commit": commit,
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        start = re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("Range", ""))
        rest = data[int(start[1]) :] if start else data
        if start:
            end = len(data) - 1
            headers["Content-Range"] = f"bytes {start[1]}-{end}/{len(data)}"
        self._head(206 if start else 200, len(rest), headers)
        if self.command == "GET":
            self.server.sent.append(file.name)
            if file.name == self.server.breaks_off:
                self.wfile.write(rest[: len(rest) // 2])
                self.close_connection = True
                return
            self.wfile.write(rest)

    def _fail(self, code: int, error: str, message: str) -> None:
        self._head(code, 0, {"X-Error-Code": error, "X-Error-Message": message})

    def _head(self, code: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def serving(root: Path) -> Iterator[SmallHub]:
    """Serve a directory until the block ends."""
    with SmallHub(root) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()


if __name__ == "__main__":
    SmallHub(Path(sys.argv[1]), int(sys.argv[2])).serve_forever()
