"""Weights in place: the ranks of a server's machine write into its parameters (`direct.py`)."""

import secrets
from dataclasses import dataclass, replace

from qurl_megatron.weight_sync.transport import Destination, Transport, Update


@dataclass(frozen=True)
class ParametersDestination(Destination):
    """The parameters that a server has handed out; see `ServerControl.parameters`."""

    machine: str  # only its ranks can attach to the parameters
    ranks: list[dict[str, str]]


class InPlace(Transport):
    """Global rank 0's end of the way to a server that hands out its parameters."""

    async def connect(self, num_senders: int) -> None:
        """Ask the server to hand out its parameters."""
        self.destination = ParametersDestination(
            f"weights-{secrets.token_hex(8)}",
            self._control.server.machine,
            await self._control.parameters(),
        )

    async def load(self, update: Update) -> None:
        """Announce the new weights to the server once all ranks have written them."""
        await update.sent.wait()
        await super().load(update)
        # The ranks have attached now, and need the long texts no more.
        if isinstance(self.destination, ParametersDestination):
            self.destination = replace(self.destination, ranks=[])
