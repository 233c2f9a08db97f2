"""Run sglang-router in front of several servers that hold the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from qurl_megatron.process import end_only_with_parent, free_port, tail
from qurl_megatron.rollout.server import LOOPBACK, POLL_S, Server, ServerFailed

ROUTER_START_TIMEOUT_S = 120.0
ROUTER_REQUEST_TIMEOUT_S = 7 * 24 * 3600  # in effect none; the router requires a number
# `python -m sglang_router.launch_router` would import SGLang first: ten seconds.
START_ROUTER = """
import json, sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
Router.from_args(RouterArgs(**json.load(sys.stdin))).start()
"""


class Router:
    """A router that distributes sampling requests over servers; a child process on loopback.

    It assigns requests round-robin: every prompt is new and a publish empties the prefix caches,
    so cache-aware routing has nothing to gain. It neither retries nor leaves a server out: a lost
    server must end the run.
    """

    def __init__(self, servers: Sequence[Server], log_file: Path) -> None:
        port = free_port()
        self.url = f"http://{LOOPBACK}:{port}"
        self.headers = servers[0].headers
        self._num_servers = len(servers)
        self._log_file = log_file
        arguments = {
            "worker_urls": [server.url for server in servers],
            "host": LOOPBACK,
            "port": port,
            "policy": "round_robin",
            "api_key": servers[0].api_key,
            "prometheus_host": LOOPBACK,
            "prometheus_port": free_port(),
            "log_level": "warn",
            "request_timeout_secs": ROUTER_REQUEST_TIMEOUT_S,
            "worker_startup_check_interval": 1,
            "disable_retries": True,
            "disable_circuit_breaker": True,
            "disable_health_check": True,
        }
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START_ROUTER],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_only_with_parent,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments).encode())
        self._process.stdin.close()

    def wait_ready(self, timeout_s: float = ROUTER_START_TIMEOUT_S) -> None:
        """Wait until the router has connected to all its servers.

        Raises:
            ServerFailed: it died, or did not connect within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            if self._process.poll() is not None:
                raise self.failed("died while starting")
            if time.monotonic() > deadline:
                raise self.failed(f"did not come up in {timeout_s:.0f} s")
            time.sleep(POLL_S)

    def _ready(self) -> bool:
        try:
            answer = httpx.get(f"{self.url}/readiness", headers=self.headers, timeout=5.0)
        except httpx.TransportError:
            return False
        return answer.is_success and answer.json()["healthy_workers"] == self._num_servers

    def failed(self, what: str) -> ServerFailed:
        """Return the exception for a failure, with the end of the log."""
        log = self._log_file
        return ServerFailed(f"router {self.url} {what}; {log} ends:\n{tail(log)}")

    def close(self) -> None:
        """Kill the router; it has nothing to save."""
        self._process.kill()
        self._process.wait()
