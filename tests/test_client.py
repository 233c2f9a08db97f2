"""A client asks any number of prompts at once, and takes no completion that was cut short."""

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from answering import Address
from distributed import run_ranks
from fleets import make_server
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.machine.processes import raise_open_file_limit
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet, RequestRefused

PROMPT = Prompt("0", "question", "answer", [1, 2])
ONE: Any = {"completions_per_prompt": 1, "temperature": 1.0}
META = {
    "finish_reason": {"type": "length"},
    "token_versions": [1, 1],
    "output_token_logprobs": [[-1.0, 1, None], [-1.0, 1, None]],
}


@pytest.fixture
def client(tmp_path: Path, address: Address) -> RolloutClient:
    address.delay_s = 0.5  # all other prompts arrive meanwhile
    address.text = json.dumps({"output_ids": [1, 1], "meta_info": META})
    return client_of(address.url, tmp_path)


def client_of(url: str, directory: Path) -> RolloutClient:
    fleet = Fleet("rollout", {0: make_server(0, directory, url=url)}, loaded=True)
    return RolloutClient(fleet, SimpleNamespace(decode=lambda *_, **__: ""), [])


def ask_with_few_files(url: str, directory: Path, num_prompts: int) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 256))
    client = client_of(url, directory)
    return len(client.generate([PROMPT] * num_prompts, max_completion_length=2, **ONE))


@pytest.mark.usefixtures("client")
def test_more_prompts_than_a_process_may_have_open_files_are_answered(
    address: Address, tmp_path: Path
) -> None:
    assert run_ranks(ask_with_few_files, 1, address.url, tmp_path, 400) == [400]


def test_a_completion_that_ends_before_its_limit_without_a_stop_token_is_refused(
    client: RolloutClient,
) -> None:
    (whole,) = client.generate([PROMPT], max_completion_length=2, **ONE)
    assert len(whole) == 1
    with pytest.raises(RequestRefused, match="ended a completion after 2 of 3 tokens: its KV"):
        client.generate([PROMPT], max_completion_length=3, **ONE)


def test_a_process_gets_the_open_files_that_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    number = raise_open_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (number, hard)
    assert number == min(hard, 65_536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
