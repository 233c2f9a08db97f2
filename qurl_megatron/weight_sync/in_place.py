"""Weights in place: the ranks of a server's machine write into its parameters (`direct.py`)."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch.distributed as dist

from qurl_megatron.device import device
from qurl_megatron.weight_sync import delta
from qurl_megatron.weight_sync.bucket import Bucket, Manifest, PlannedBucket
from qurl_megatron.weight_sync.conversion import Conversion
from qurl_megatron.weight_sync.crossings import Crossings, Transfer, find_crossings
from qurl_megatron.weight_sync.direct import ServerParameters
from qurl_megatron.weight_sync.gather import Team
from qurl_megatron.weight_sync.reshard import Converter
from qurl_megatron.weight_sync.transport import Delivery, Destination, Transport


@dataclass(frozen=True)
class ParametersDestination(Destination):
    """The parameters that a server has handed out; see `Server.parameters`."""

    machine: str  # only its ranks can attach to the parameters
    ranks: list[dict[str, str]]


class InPlace(Transport):
    """Global rank 0's end of the way to a server that hands out its parameters."""

    async def connect(self, num_senders: int) -> None:
        """Ask the server to hand out its parameters."""
        self.destination = ParametersDestination(
            f"weights-{secrets.token_hex(8)}",
            self.server.machine,
            await self.server.parameters(),
        )

    async def load(self, delivery: Delivery) -> None:
        """Announce the new weights to the server once all ranks have written them."""
        await delivery.sent.wait()
        await super().load(delivery)
        # The ranks have attached now, and need the long texts no more.
        if isinstance(self.destination, ParametersDestination):
            self.destination = replace(self.destination, ranks=[])


class Writer:
    """Writes a converter's weights into the parameters of servers. Collective over all ranks."""

    def __init__(self, converter: Converter, parameters: ServerParameters) -> None:
        """Write nothing yet."""
        self._converter = converter
        self._parameters = parameters

    def send(
        self, delivery: Delivery, destinations: Sequence[Destination], paused: Sequence[str]
    ) -> Conversion:
        """Write a delivery to the destinations whose tokens are in `paused`; return its measures.

        Args:
            destinations: of all servers that can be reached. This rank detaches from others.
        """
        held = [each for each in destinations if isinstance(each, ParametersDestination)]
        here = socket.gethostname()
        new = {each.token: each.ranks for each in held if each.ranks and each.machine == here}
        self._parameters.attach(new)
        self._parameters.keep({each.token: each.machine for each in held}, paused)
        return self.write(since=delivery.since)

    def write(self, *, since: int | None = None) -> Conversion:
        """Write the current weights, and return checksums and drift.

        Nothing is gathered. A part crosses between learner ranks only if no rank of a server's
        machine holds it (`crossings.py`). Servers that hold a version `since` have the constants.
        """
        conversions, changing, converter = [], since is not None, self._converter
        for team, holders in zip(converter.teams, self._holders, strict=True):
            crossings = find_crossings(converter.machines, holders, self._parameters.machines)
            parts = self._parts(changing)[team.of_experts] if crossings.transfers else []
            sink = ParameterWriter(self._parameters, team, crossings, parts)
            conversions.append(
                converter.convert_team(team, sink, crossings.converting, changing=changing)
            )
        return converter.complete(conversions)

    def close(self) -> None:
        """Detach from all servers."""
        self._parameters.keep({}, [])

    @cached_property
    def _holders(self) -> list[list[tuple[int, ...]]]:
        """For each team, the `Team.holders` of each rank. Collective at the first call."""
        by_rank: list[list[tuple[int, ...]]] = [[]] * dist.get_world_size()
        dist.all_gather_object(by_rank, [team.holders for team in self._converter.teams])
        return [list(holders) for holders in zip(*by_rank, strict=True)]

    @cache  # noqa: B019  a run has one writer at most
    def _parts(self, changing: bool) -> dict[bool, list[list[PartOfBucket]]]:
        """By `Team.of_experts`, each rank's parts of its buckets. Collective at the first call."""
        by_team = {}
        for team in self._converter.teams:
            parts: list[list[PartOfBucket]] = [[]] * dist.get_world_size()
            own = [
                PartOfBucket.on(each, team.rank) for each in self._converter.plan(team, changing)
            ]
            dist.all_gather_object(parts, own)
            by_team[team.of_experts] = parts
        return by_team


@dataclass(frozen=True)
class PartOfBucket:
    """A rank's part of a bucket: its tensors, and where each begins in the full tensor."""

    manifest: Manifest
    offsets: list[tuple[int, int]]

    @classmethod
    def on(cls, planned: PlannedBucket, rank: int) -> PartOfBucket:
        """Describe the part that a rank of the team has."""
        offsets = [tensor.offset_on(rank) for tensor in planned.tensors]
        return cls(planned.manifest_on(rank), offsets)


class ParameterWriter:
    """Writes a team's buckets into servers' parameters; its methods are those of a `Gatherer`.

    A rank writes its own parts, and the parts that others send to it (`crossings.py`). All ranks go
    through their buckets in step: the first ones cross, then the second ones, and so on.
    """

    def __init__(
        self,
        parameters: ServerParameters,
        team: Team,
        crossings: Crossings,
        parts: Sequence[Sequence[PartOfBucket]],
    ) -> None:
        """Write nothing yet.

        Args:
            parts: of each rank's buckets, by global rank; not read if nothing crosses.
        """
        self._parameters = parameters
        self._team = team
        self._parts = parts
        self._writes = dist.get_rank() in crossings.writers
        self._transfers: dict[int, list[Transfer]] = {}  # of this rank, by round
        for transfer in crossings.transfers:
            if dist.get_rank() in (transfer.sender, transfer.receiver):
                self._transfers.setdefault(transfer.round, []).append(transfer)
        self._number = 0  # of the bucket that comes next

    def add(self, planned: PlannedBucket, own: Bucket) -> None:
        """Write `own`, this rank's part of a bucket, and let parts cross.

        Collective over the ranks that send to each other.
        """
        if self._writes:
            self._write(PartOfBucket.on(planned, self._team.rank), own)
        self._exchange(own)

    def finish(self) -> None:
        """Receive the remaining buckets: other ranks may have more than this rank."""
        senders = [each.sender for some in self._transfers.values() for each in some]
        while self._number < max((len(self._parts[rank]) for rank in senders), default=0):
            self._exchange(None)

    def _write(self, part: PartOfBucket, values: Bucket) -> None:
        for offset, (name, tensor) in zip(part.offsets, values.tensors(), strict=True):
            self._parameters.write(delta.Change.whole(name, offset, tensor))

    def _exchange(self, own: Bucket | None) -> None:
        """Send `own` if a transfer says so; receive and write the parts of other ranks."""
        number, rank = self._number, dist.get_rank()
        self._number += 1
        for _, transfers in sorted(self._transfers.items()):  # rounds, in one order on all ranks
            exchanged, arriving = [], []  # at most one arrives
            for transfer in transfers:
                buckets = self._parts[transfer.sender]
                if number >= len(buckets) or not buckets[number].manifest.num_bytes:
                    continue
                if transfer.sender == rank:
                    assert own is not None
                    exchanged.append(dist.P2POp(dist.isend, own.flat, transfer.receiver))
                else:
                    bucket = Bucket.empty(buckets[number].manifest, device())
                    arriving.append((buckets[number], bucket))
                    exchanged.append(dist.P2POp(dist.irecv, bucket.flat, transfer.sender))
            for work in dist.batch_isend_irecv(exchanged) if exchanged else ():
                work.wait()
            for part, bucket in arriving:
                self._write(part, bucket)
