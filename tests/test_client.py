"""A client asks any number of prompts at once, and takes no response that was cut short."""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from fleets import make_server
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.process import raise_open_file_limit
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet, RequestRefused

PROMPT = Prompt("0", "question", "answer", [1, 2])
ONE: Any = {"completions_per_prompt": 1, "temperature": 1.0}
META = {
    "finish_reason": {"type": "length"},
    "token_versions": [1, 1],
    "output_token_logprobs": [[-1.0, 1], [-1.0, 1]],
}


class TwoTokens(BaseHTTPRequestHandler):
    """Answers with two tokens, after a while in which all other prompts arrive."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.5)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"output_ids": [1, 1], "meta_info": META}).encode())

    def log_message(self, *_: object) -> None:
        pass


class HttpServer(ThreadingHTTPServer):
    request_queue_size = 1024


@pytest.fixture
def client(tmp_path: Path) -> Iterator[RolloutClient]:
    server = HttpServer(("127.0.0.1", 0), TwoTokens)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    fleet = Fleet("rollout", {0: make_server(0, tmp_path, url=url)}, loaded=True)
    yield RolloutClient(fleet, SimpleNamespace(decode=lambda *_, **__: ""), [])
    server.shutdown()
    thread.join()
    server.server_close()


def ask_with_few_files(client: RolloutClient, num_prompts: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))
    assert len(client.generate([PROMPT] * num_prompts, max_response_length=2, **ONE)) == num_prompts


def test_more_prompts_than_a_process_may_have_open_files_are_answered(
    client: RolloutClient,
) -> None:
    asking = multiprocessing.get_context("fork").Process(
        target=ask_with_few_files, args=(client, 400)
    )
    asking.start()
    asking.join(60)
    assert asking.exitcode == 0


def test_a_response_that_ends_before_its_limit_without_a_stop_token_is_refused(
    client: RolloutClient,
) -> None:
    (whole,) = client.generate([PROMPT], max_response_length=2, **ONE)
    assert len(whole) == 1
    with pytest.raises(RequestRefused, match="ended a response after 2 of 3 tokens: its KV"):
        client.generate([PROMPT], max_response_length=3, **ONE)


def test_a_process_gets_the_open_files_that_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    number = raise_open_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (number, hard)
    assert number == min(hard, 65_536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
