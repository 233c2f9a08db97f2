"""Publishing: pause the servers, send them the policy, verify what they hold, resume.

A publish is all or nothing. The servers answer no prompt between pause and resume, their prefix
caches are emptied, and they resume under the new version only after every tensor's checksum, taken
of the learner's shards before they travelled, equals that of what lies in the servers' layers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch.distributed as dist
from sglang.srt.utils import init_custom_process_group

from qurl_megatron.config.schema import WeightFormat
from qurl_megatron.device import backend_to, rank
from qurl_megatron.learner.learner import Learner
from qurl_megatron.process import free_port
from qurl_megatron.quantization import checksum
from qurl_megatron.rollout.control import ServerControl, address_towards
from qurl_megatron.rollout.server import Server
from qurl_megatron.weight_sync.reshard import Bucket, Conversion, Converter
from qurl_megatron.weight_sync.shared_memory import SHARED, describe

T = TypeVar("T")

Carrier = Literal["nccl", "gloo", "shared_memory"]
"""How buckets reach the servers: by a broadcast over NCCL, or over gloo through host memory; or the
servers, on this machine, read them where they lie."""


class PublishError(RuntimeError):
    """The servers do not hold what was sent."""


@dataclass(frozen=True)
class Published:
    """One publish, as global rank 0 saw it."""

    version: int
    sent_bytes: int
    conversion: Conversion


class Publisher:
    """Carries a learner's weights to one set of servers, over one process group made once.

    Every learner rank constructs it, publishes and closes it; only global rank 0, which is rank 0
    of the process group, talks to the servers.
    """

    def __init__(
        self,
        learner: Learner,
        servers: list[Server],
        weight_format: WeightFormat,
        bucket_bytes: int,
        group_name: str,
        carrier: Carrier | None = None,
    ) -> None:
        """`carrier` is NCCL where every process has a GPU of its own, or else gloo, if left out."""
        self.version = 0
        self._carrier = carrier or backend_to(
            [gpu for one in servers if one.here for gpu in one.gpus]
        )
        self._converter = Converter(learner, weight_format, bucket_bytes)
        self._controls = [ServerControl(server) for server in servers] if rank() == 0 else []
        self._group_name = group_name + (SHARED if self._carrier == "shared_memory" else "")
        self._threads = ThreadPoolExecutor(max_workers=len(servers))
        if rank() == 0:
            self._group = self._join(servers)

    def publish(self) -> Published:
        """Send the policy as it is now, under the next version.

        Raises:
            PublishError: a server refused the weights, or holds others than were sent.
            quantize.NonFiniteWeight: a weight holds NaN or infinity; its name is in the message.
        """
        self.version += 1
        sent_bytes = 0
        self._on_every_server(lambda control: control.pause())
        for bucket in self._converter.buckets():
            self._send(bucket)
            sent_bytes += bucket.flat.numel()
        conversion = self._converter.conversion
        self._on_every_server(lambda control: verify(control, conversion.checksums))
        self._on_every_server(lambda control: control.resume(weight_version=self.version))
        return Published(self.version, sent_bytes, conversion)

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
        shared = self._carrier == "shared_memory"
        message = describe(bucket.flat) if shared else bucket.flat
        receiving = [
            self._threads.submit(
                control.update_weights,
                bucket.names,
                bucket.dtypes,
                bucket.shapes,
                group_name=self._group_name,
            )
            for control in self._controls
        ]
        sending = dist.broadcast(message, src=0, group=self._group, async_op=True)
        # A server that refuses the request never receives: its answer must not wait for the send.
        done, _ = wait(receiving, return_when=FIRST_EXCEPTION)
        for received in done:
            received.result()
        sending.wait()

    def _on_every_server(self, action: Callable[[ServerControl], T]) -> list[T]:
        return list(self._threads.map(action, self._controls))


def verify(control: ServerControl, sent: dict[str, int]) -> None:
    """Compare the checksums of what a server holds with those of what was `sent`, by name.

    Raises:
        PublishError: they differ; the first tensor that does is named.
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
