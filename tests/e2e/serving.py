"""One server, a sender of weights like rank 0 of a learner, and what both must fulfil."""

import asyncio
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from e2e.reference import Weights
from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.config.schema import PauseMode, ServerConfig, WeightFormat
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.config.values import OptionValue
from qurl_megatron.machine.network import free_port
from qurl_megatron.quantization.checksum import checksum, combine
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.server import Server, wait_ready
from qurl_megatron.rollout.start import start
from qurl_megatron.weight_sync.bucket import announce
from qurl_megatron.weight_sync.transport import PublishError, verify
from sent import packed
from tiny import EOS_TOKEN_ID, build_tiny_model, quantized

START_TIMEOUT_S = 300.0
CONTEXT_LENGTH = 256
PROMPTS = [
    Prompt(
        id=str(row), question="", answer="", token_ids=[5 + 7 * row + 3 * i for i in range(9 + row)]
    )
    for row in range(4)
]


class Sender:
    """A sender of weights to one server, like rank 0 of a learner."""

    def __init__(self, server: Server, *, pause_mode: PauseMode = "retract") -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        from sglang.srt.utils import init_custom_process_group

        self.server, self.pause_mode = server, pause_mode
        self._thread = ThreadPoolExecutor(max_workers=1)
        port = free_port()
        self._group_name = f"weights-{port}"  # unique among the groups of this process
        world_size = 1 + server.tensor_parallel_size
        joining = self._thread.submit(
            asyncio.run,
            self.server.init_weights_group(
                master_address="127.0.0.1",
                master_port=port,
                world_size=world_size,
                group_name=self._group_name,
                backend="gloo",
            ),
        )
        self._group = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=world_size,
            rank=0,
            group_name=self._group_name,
        )
        joining.result()

    def send(self, weights: Weights, version: int = 1) -> None:
        """Pause the server, replace these tensors, and resume under `version`."""
        bucket = packed(weights)
        request = announce([[[bucket]]])
        asyncio.run(self.server.pause(self.pause_mode))
        receiving = self._thread.submit(
            asyncio.run,
            self.server.update_weights(
                request.names,
                request.dtypes,
                request.shapes,
                group_name=self._group_name,
                weight_version=version,
                flush_cache=self.pause_mode == "retract",
            ),
        )
        torch.distributed.broadcast(bucket.flat, src=0, group=self._group)
        receiving.result()
        asyncio.run(self.server.resume())

    def close(self) -> None:
        """Leave the process group."""
        torch.distributed.destroy_process_group(self._group)
        self._thread.shutdown()


@dataclass(frozen=True)
class Deployment:
    """A running server, its model and two sets of weights for it."""

    weight_format: WeightFormat
    server: Server
    sender: Sender
    client: RolloutClient
    model_dirs: list[Path]
    weights: list[Weights]

    def generate(self, prompts: list[Prompt], temperature: float = 1.0) -> list[list[Completion]]:
        return self.client.generate(
            prompts, completions_per_prompt=2, temperature=temperature, max_completion_length=24
        )

    def ask(self, token_ids: list[int], **sampling: Any) -> tuple[list[int], list[float], int]:
        """Return tokens, log-probs and the number of cached prompt tokens of one request."""
        body = {"input_ids": token_ids, "return_logprob": True, "sampling_params": sampling}
        response = httpx.post(
            f"{self.server.url}/generate", json=body, headers=self.server.headers, timeout=60
        ).raise_for_status()
        answer = response.json()
        meta = answer["meta_info"]
        logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        return answer["output_ids"], logprobs, meta["cached_tokens"]

    def greedy(self) -> tuple[list[int], list[float], int]:
        return self.ask(PROMPTS[3].token_ids, temperature=0, max_new_tokens=16, ignore_eos=True)


@contextmanager
def launched(
    directory: Path,
    weight_format: WeightFormat,
    tensor_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    records_routing: bool = False,
    context_length: int = CONTEXT_LENGTH,
    options: Mapping[str, OptionValue] = {},
    **model: Any,
) -> Iterator[tuple[Server, list[Path]]]:
    """Start a server; yield it before it is ready, with two models of its shape."""
    model_dirs = [
        build_tiny_model(directory / name, seed=seed, **model) for seed, name in enumerate("ab")
    ]
    config = ServerConfig(
        tensor_parallel_size=tensor_parallel_size,
        expert_parallel_size=expert_parallel_size,
        threads=1,
        mem_fraction_static=0.3,
        max_total_tokens=8192,
        options=dict(options),
    )
    held = weight_format, context_length
    spec = ServerSpec(model_dirs[0], config, *held, records_routing=records_routing)
    server = start(spec, directory / "server.log", seed=0)
    try:
        yield server, model_dirs
    finally:
        server.stop()


@contextmanager
def joined(
    server: Server,
    model_dirs: list[Path],
    weight_format: WeightFormat,
    routing_shape: tuple[int, int] | None = None,
) -> Iterator[Deployment]:
    """Wait until a server is ready; yield it with a sender of weights."""
    wait_ready([server], START_TIMEOUT_S)
    sender = Sender(server)
    fleet = Fleet("rollout", {0: server}, loaded=True)
    yield Deployment(
        weight_format,
        server,
        sender,
        RolloutClient(
            fleet,
            AutoTokenizer.from_pretrained(model_dirs[0]),
            [EOS_TOKEN_ID],
            routing_shape=routing_shape,
        ),
        model_dirs,
        [quantized(path, weight_format) for path in model_dirs],
    )
    sender.close()


def wait_for_tokens(server: Server) -> None:
    """Wait until the server has logged decoding twice more: every `decode_log_interval` batches."""
    log = Path(server.log_file)

    def batches() -> int:
        return len(re.findall(r"Decode batch", log.read_text()))

    before = batches()
    for _ in range(2400):
        if batches() > before + 1:
            return
        time.sleep(0.05)
    pytest.fail("the server decodes nothing")


def assert_reloads_bit_for_bit(deployment: Deployment, reloads: int) -> None:
    seen = []
    for reload in range(reloads):
        deployment.sender.send(deployment.weights[reload % 2])
        seen.append(deployment.greedy()[:2])
    assert seen[0] != seen[1]
    assert seen == seen[:2] * (reloads // 2)


def held_checksums(deployment: Deployment) -> dict[str, int]:
    return combine(asyncio.run(deployment.server.checksums()))


def corrupt(weights: Weights, name: str) -> Weights:
    """Return the weights with the lowest bit of the last element of `name` flipped."""
    memory = weights[name].clone().contiguous()
    memory.view(-1).view(torch.uint8)[-memory.element_size()] ^= 1
    return {**weights, name: memory}


def assert_checksums_match_the_held_tensors(
    deployment: Deployment, corrupted: Sequence[str]
) -> None:
    """Send weights as they are, and with one bit flipped in each of these tensors."""
    for weights in deployment.weights:
        deployment.sender.send(weights)
        sent = {name: checksum(tensor) for name, tensor in weights.items()}
        assert held_checksums(deployment) == sent
        asyncio.run(verify(deployment.server, sent))
    for name in corrupted:
        deployment.sender.send(corrupt(weights, name))
        held = held_checksums(deployment)
        assert {key for key in sent if held[key] != sent[key]} == {name}
        with pytest.raises(PublishError, match=f"1 of {len(sent)} checksums differ, first {name}"):
            asyncio.run(verify(deployment.server, sent))
