"""A client asks any number of prompts at once, and takes no response that was cut short."""

import json
import multiprocessing
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from answering import Address
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


@pytest.fixture
def client(tmp_path: Path, address: Address) -> RolloutClient:
    address.delay_s = 0.5  # all other prompts arrive meanwhile
    address.text = json.dumps({"output_ids": [1, 1], "meta_info": META})
    fleet = Fleet("rollout", {0: make_server(0, tmp_path, url=address.url)}, loaded=True)
    return RolloutClient(fleet, SimpleNamespace(decode=lambda *_, **__: ""), [])


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
