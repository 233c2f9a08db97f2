"""Write weights straight into the parameters of servers on the learner's machine.

A server hands out its parameters once (`shared_memory.py`): each of its processes names the parts
of tensors that it holds, and where their memory is. From then on every learner rank copies what it
has quantized into that memory. Nothing is gathered, and nothing is sent. The learner's parts and
the server's may be cut differently:

    learner, 1 rank       q_proj [0:256]
    server, 2 ranks       [0:128] | [128:256]

The servers must not sample meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from qurl_megatron.quantization.checksum import Part, part_of_key
from qurl_megatron.weight_sync.bucket import Bucket
from qurl_megatron.weight_sync.delta import Change
from qurl_megatron.weight_sync.gather import Team
from qurl_megatron.weight_sync.layout import PlannedBucket
from qurl_megatron.weight_sync.shared_memory import attach


class ServerParameters:
    """The parameters of servers, which this process can write."""

    def __init__(self) -> None:
        self._servers: dict[str, dict[str, list[Part]]] = {}  # parts by tensor name
        self._paused: list[str] = []

    def attach(self, servers: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
        """Attach to the parameters of servers, each under a name of its own.

        A server has a mapping for each of its ranks, from `checksum.part_key` to
        `shared_memory.describe`.
        """
        for server, ranks in servers.items():
            parts: dict[str, list[Part]] = {}
            for rank in ranks:
                for key, text in rank.items():
                    name, row, column = part_of_key(key)
                    part = Part(attach(text), row, column)
                    parts.setdefault(name, []).append(part)
            self._servers[server] = parts

    def keep(self, names: Iterable[str], paused: Iterable[str]) -> None:
        """Detach from all servers but these, and write to the `paused` ones only."""
        self._servers = {name: self._servers[name] for name in names}
        self._paused = list(paused)

    def write(self, change: Change) -> None:
        """Write a part of a tensor wherever a paused server holds some of it."""
        for server in self._paused:
            for values, row, column in self._servers[server].get(change.name, ()):
                change.write_to(values, row, column)


class ParameterWriter:
    """Writes this rank's parts of a team's buckets into servers' parameters, as a `Gatherer`."""

    def __init__(self, parameters: ServerParameters, team: Team) -> None:
        self._parameters = parameters
        self._team = team

    def add(self, planned: PlannedBucket, own: Bucket, before: Bucket | None) -> None:
        """Write `own`, this rank's part of a bucket, whatever it was `before`."""
        for tensor, (name, values) in zip(planned.tensors, own.tensors(), strict=True):
            offset = tensor.offset_on(self._team.rank)
            self._parameters.write(Change.whole(name, offset, values))

    def finish(self) -> None:
        """Do nothing more: all is written."""
