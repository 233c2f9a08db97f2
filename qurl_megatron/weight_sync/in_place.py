"""Weights in place: the ranks of a server's machine write into its parameters (`direct.py`)."""

import secrets
from dataclasses import dataclass, replace

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
