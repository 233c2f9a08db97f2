"""Publish the learner's policy to the servers as the next weight version.

    pause servers -> convert and send buckets -> compare checksums -> resume as version + 1

A publish is all or nothing:
- Between pause and resume the servers sample no token, so every token has one version.
- A prompt that starts after it uses no attention states of older weights. Nor does a request that
  was running, unless `pause_mode` is `in_place`.
- They resume only if every tensor's checksum, computed from the learner's shards before they were
  sent, equals the checksum of the parameters that the servers' layers multiply with. Otherwise the
  publish raises `PublishError`.

Example, on every learner rank:

    publisher = Publisher(learner, servers, "int8", bucket_bytes=512 * 2**20, group_name="rollout")
    published = publisher.publish()
    publisher.close()
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch.distributed as dist
from sglang.srt.utils import init_custom_process_group

from qurl_megatron.config.schema import PauseMode, WeightFormat
from qurl_megatron.device import backend_to, rank
from qurl_megatron.learner.learner import Learner
from qurl_megatron.process import free_port
from qurl_megatron.quantization import checksum
from qurl_megatron.rollout.control import ServerControl, address_towards
from qurl_megatron.rollout.server import Server
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.reshard import Conversion, Converter
from qurl_megatron.weight_sync.shared_memory import GROUP_SUFFIX, describe

T = TypeVar("T")

Carrier = Literal["nccl", "gloo", "shared_memory"]
"""The transport of buckets to the servers.

"nccl" broadcasts from GPU to GPU, "gloo" broadcasts through host memory. With "shared_memory" the
servers, on the learner's machine, read the buckets in place.
"""


class PublishError(RuntimeError):
    """A server does not hold the weights that were sent."""


@dataclass(frozen=True)
class Published:
    """The result of one publish; only global rank 0's is complete."""

    version: int  # the weight version the servers serve
    sent_bytes: int  # size of all buckets; each server receives that much
    conversion: Conversion


class Publisher:
    """Publishes a learner's weights to a fixed set of servers, over one process group.

    Collective: every learner rank constructs it, publishes and closes it. Only global rank 0 talks
    to the servers; it is rank 0 of the process group.
    """

    def __init__(
        self,
        learner: Learner,
        servers: list[Server],
        weight_format: WeightFormat,
        bucket_bytes: int,
        group_name: str,
        carrier: Carrier | None = None,
        pause_mode: PauseMode = "retract",
    ) -> None:
        """Form a process group with the servers.

        Args:
            weight_format: the format in which the servers were started.
            bucket_bytes: largest bucket; see `reshard.Converter`.
            group_name: name of the process group, unique among those of a server.
            carrier: None: NCCL if every process has its own GPU, else gloo.
            pause_mode: the run's `rollout.pause_mode`.
        """
        self.version = 0
        self._carrier = carrier or backend_to(
            [gpu for server in servers if server.is_local for gpu in server.gpus]
        )
        self._converter = Converter(learner, weight_format, bucket_bytes)
        self._controls = (
            [ServerControl(server, pause_mode) for server in servers] if rank() == 0 else []
        )
        self._group_name = group_name + (GROUP_SUFFIX if self._carrier == "shared_memory" else "")
        self._threads = ThreadPoolExecutor(max_workers=len(servers))
        if rank() == 0:
            self._group = self._join(servers)

    def publish(self) -> Published:
        """Send the current policy under the next version.

        Raises:
            PublishError: a server does not hold what was sent.
            rollout.server.ServerFailed: a server refused a request or died.
            quantize.NonFiniteWeight: a weight holds NaN or infinity; the message names it.
        """
        self.version += 1
        sent_bytes: list[int] = []

        def send(bucket: Bucket) -> None:
            self._send(bucket)
            sent_bytes.append(bucket.flat.numel())

        self._on_every_server(lambda control: control.pause())
        conversion = self._converter.convert(send)
        self._on_every_server(lambda control: verify(control, conversion.checksums))
        self._on_every_server(lambda control: control.resume())
        return Published(self.version, sum(sent_bytes), conversion)

    def close(self) -> None:
        """Leave the process group; the servers keep the last version."""
        if rank() == 0:
            dist.destroy_process_group(self._group)
        for control in self._controls:
            control.close()
        self._threads.shutdown()

    def _join(self, servers: list[Server]) -> dist.ProcessGroup:
        address, port = address_towards(servers[0]), free_port()
        sizes = [server.tensor_parallel_size for server in servers]
        world_size = 1 + sum(sizes)
        backend = "gloo" if self._carrier == "shared_memory" else self._carrier
        joining = [
            self._threads.submit(
                control.init_weights_group,
                address,
                port,
                rank_offset=1 + sum(sizes[:index]),
                world_size=world_size,
                group_name=self._group_name,
                backend=backend,
            )
            for index, control in enumerate(self._controls)
        ]
        group = init_custom_process_group(
            backend=backend,
            init_method=f"tcp://{address}:{port}",
            world_size=world_size,
            rank=0,
            group_name=self._group_name,
        )
        for join in joining:
            join.result()
        return group

    def _send(self, bucket: Bucket) -> None:
        """Send a bucket to every server; return when all have loaded it."""
        shared = self._carrier == "shared_memory"
        message = describe(bucket.flat) if shared else bucket.flat
        receiving = [
            self._threads.submit(
                control.update_weights,
                bucket.names,
                bucket.dtypes,
                bucket.shapes,
                group_name=self._group_name,
                weight_version=self.version,
            )
            for control in self._controls
        ]
        sending = dist.broadcast(message, src=0, group=self._group, async_op=True)
        # A server that refuses the request never receives, so the broadcast would never end.
        # Raise that server's answer before waiting for the broadcast.
        done, _ = wait(receiving, return_when=FIRST_EXCEPTION)
        for received in done:
            received.result()
        sending.wait()

    def _on_every_server(self, action: Callable[[ServerControl], T]) -> list[T]:
        return list(self._threads.map(action, self._controls))


def verify(control: ServerControl, sent: dict[str, int]) -> None:
    """Compare the checksums of a server's tensors with those of the tensors `sent`, by name.

    Raises:
        PublishError: a checksum differs; the message names the first such tensor.
    """
    try:
        held = checksum.combine(control.checksums())
    except ValueError as error:
        raise PublishError(f"{control.server.url}: {error}") from None
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise PublishError(
            f"{control.server.url} does not hold the weights it was sent: {len(wrong)} of "
            f"{len(sent)} checksums differ, first {wrong[0]}"
        )
