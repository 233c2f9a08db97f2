"""Weights over slow links: `python -m benchmarks.remote`.

A server elsewhere gets weights over HTTP. Here it is behind a link of 100 Mb/s and of 1 Gb/s, which
a proxy on loopback shapes (`benchmarks/shaped_link.py`; no delay, no loss). Its HTTP process is the
plugin's: uvicorn, the key, the file. In place of schedulers it has the tensors themselves: it
copies what is whole, and writes deltas into them. After each sending they must be those that were
sent.

The weights are q_proj and down_proj of a layer of Qwen2.5-32B, 168 million parameters. Deltas are
of one optimizer step: so many codes move as `benchmarks/delta.py` measures, each by one.

Printed are, for each link and way to send, the bytes that crossed the link, and the seconds from
the bucket to the server's answer: medians, least and most of the rounds. They include
compression and loading. In each round all ways are taken once, one after another.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import threading
import time
from importlib.metadata import version
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import uvicorn
from fastapi import FastAPI
from torch import Tensor

from benchmarks.shaped_link import ShapedLink
from qurl_megatron.process import free_port
from qurl_megatron.rollout.elsewhere import remote_server
from qurl_megatron.sglang_plugin import weight_routes as plugin
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.channel import HttpChannel, HttpEndpoint
from qurl_megatron.weight_sync.gather import delta_bucket

MEGABITS = (100, 1000)
SHAPES = {"q_proj": (5120, 5120), "down_proj": (5120, 27648)}
CHANGED = 0.00022  # part of the codes that one step moves: see benchmarks/delta.py
KEY = "a-key-of-the-benchmark"
CPU = torch.device("cpu")


class Receiver:
    """The routes of a server, before tensors instead of schedulers."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.port = free_port()
        plugin._tokenizer_manager = lambda: SimpleNamespace(  # type: ignore[assignment]
            update_weights_from_distributed=self._update
        )
        from sglang.srt.utils.auth import add_api_key_middleware

        app = FastAPI()
        plugin.add_routes(add_api_key_middleware, app, api_key=KEY, admin_api_key=None)
        settings = uvicorn.Config(app, port=self.port, log_level="warning", loop="uvloop")
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def close(self) -> None:
        """Stop listening."""
        self._server.should_exit = True
        self._thread.join()

    async def _update(self, request: Any) -> tuple[bool, str]:
        updater = SimpleNamespace(get_model=lambda: None, device="cpu")
        return plugin.load_file(
            _refuse,
            updater,
            request.names,
            request.dtypes,
            request.shapes,
            request.group_name,
            request.load_format,
        )

    def write_bucket(self, model: Any, bucket: Bucket) -> None:
        """Write a bucket into the tensors, as `receive.write_bucket` does into a model's."""
        if delta.base_version(bucket.names) is None:
            self.held = {name: tensor.clone() for name, tensor in bucket.tensors()}
            return
        for change in delta.unpack(bucket.flat):
            change.write_to(self.held[change.name], 0, 0)


def _refuse(*arguments: object) -> tuple[bool, str]:
    return False, "a process group"


def moved(codes: Tensor, generator: torch.Generator) -> Tensor:
    """Return codes of which a few have moved by one."""
    new = codes.clone()
    number = int(CHANGED * codes.numel())
    at = torch.randint(0, codes.numel(), (number,), generator=generator)
    steps = torch.randint(0, 2, (number,), generator=generator, dtype=torch.int8) * 2 - 1
    new.view(-1)[at] += steps
    return new


class Way(NamedTuple):
    """A way to send, from tensors that the receiver holds to those that it must hold then."""

    bucket: Bucket
    rate: float  # of the link, as far as the sender knows
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def ways_to_send() -> dict[str, Way]:
    """Return the ways by name."""
    generator = torch.Generator().manual_seed(0)
    codes = {
        name: torch.randint(-120, 120, shape, dtype=torch.int8, generator=generator)
        for name, shape in SHAPES.items()
    }
    new = {name: moved(tensor, generator) for name, tensor in codes.items()}
    bf16 = {name: tensor.bfloat16() for name, tensor in new.items()}
    compared = [delta.compare(n, (0, 0), codes[n], new[n], is_relative=True) for n in codes]
    flat = delta.pack([change for change in compared if change is not None], CPU)
    changed = delta_bucket(1, flat)
    return {
        "delta, compressed": Way(changed, 1.0, codes, new),
        "delta, plain": Way(changed, float("inf"), codes, new),
        "all, int8": Way(Bucket.pack(new), float("inf"), codes, new),
        "all, bf16": Way(Bucket.pack(bf16), float("inf"), bf16, bf16),
    }


def send(link: ShapedLink, way: Way) -> tuple[int, float]:
    """Return the bytes and the seconds of one sending."""
    endpoint = HttpEndpoint("weights", remote_server(link.url, KEY), 60.0, flush_cache=True)
    channel = HttpChannel(endpoint)
    channel.rate = way.rate
    before, start = link.sent_bytes, time.perf_counter()
    channel.send(way.bucket, 2).result()
    spent_s = time.perf_counter() - start
    assert channel.failure is None
    channel.close()
    return link.sent_bytes - before, spent_s


def measure(rounds: int) -> None:
    """Print a table."""
    ways = ways_to_send()
    parameters = sum(math.prod(shape) for shape in SHAPES.values())
    print(f"{parameters:,} parameters, {rounds} rounds: median (least to most)\n")
    print("link        sent                 megabytes   a parameter   seconds")
    receiver = Receiver()
    plugin.write_bucket = receiver.write_bucket  # type: ignore[assignment]
    try:
        with ShapedLink(receiver.port, 1e6) as link:
            for megabits in MEGABITS:
                link.bytes_per_s = 1e6 * megabits / 8
                results: dict[str, list[tuple[int, float]]] = {name: [] for name in ways}
                for _ in range(rounds):
                    for name, way in ways.items():
                        receiver.held = {n: tensor.clone() for n, tensor in way.before.items()}
                        results[name].append(send(link, way))
                        for tensor_name, tensor in way.after.items():
                            assert torch.equal(receiver.held[tensor_name], tensor), name
                for name, result in results.items():
                    print_row(megabits, name, result, parameters)
    finally:
        receiver.close()


def print_row(megabits: int, name: str, results: list[tuple[int, float]], parameters: int) -> None:
    """Print the measurements of one way over one link."""
    sizes, seconds = zip(*results, strict=True)
    spread = f"{median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
    print(
        f"{megabits:4} Mb/s   {name:17}  {median(sizes) / 1e6:11.3f}   "
        f"{median(sizes) / parameters:9.6f}   {spread}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, torch {version('torch')}, "
        f"httpx {version('httpx')}, uvicorn {version('uvicorn')}"
    )
    measure(arguments.rounds)


if __name__ == "__main__":
    main()
