"""Control one server during a publish: pause, receive weights, report checksums, resume."""

from collections.abc import Sequence
from typing import Any

import httpx
import torch

from qurl_megatron import process
from qurl_megatron.config.schema import PauseMode
from qurl_megatron.rollout.server import Server, ServerFailed, connect
from qurl_megatron.rollout.wire import dtype_names

CONTROL_TIMEOUT_S = 600.0


class UpdateRefused(ServerFailed):
    """A server answered that it did not do what it was asked for."""


class ServerControl:
    """The control requests of one server. Every call waits for the server's answer."""

    def __init__(
        self,
        server: Server,
        pause_mode: PauseMode = "retract",
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """Connect to a server that has `timeout_s` seconds for every answer.

        `pause_mode` is the run's `rollout.pause_mode`.
        """
        self.server = server
        self._pause_mode = pause_mode
        self._client = connect(server, timeout_s)

    def pause(self) -> None:
        """Stop sampling. Running requests wait where they are, and continue after `resume`.

        In mode `retract` they give up their keys and values, which `resume` has computed again from
        their tokens. In mode `in_place` they keep them.
        """
        self._post("/pause_generation", {"mode": self._pause_mode})

    def resume(self) -> None:
        """Continue sampling, with the weights of the last update and under its version."""
        self._post("/continue_generation", {})

    def init_weights_group(self, **group: str | int) -> None:
        """Join the process group that carries weights, as all of its ranks but the first.

        `group` has its `master_address`, `master_port`, `world_size`, `group_name` and `backend`.
        """
        self._post("/init_weights_update_group", {"rank_offset": 1, **group})

    def update_weights(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        weight_version: int,
    ) -> None:
        """Receive and load what these lists announce, in the form of `weight_sync.bucket`.

        The server must be paused. Tokens sampled after it resumes carry `weight_version`. There is
        no time limit: the answer comes after all transfers, whose senders have limits.

        Raises:
            UpdateRefused: the server could not load it; a delta, because it holds another version.
        """
        self._post(
            "/update_weights_from_distributed",
            {
                "names": list(names),
                "dtypes": dtype_names(dtypes),
                "shapes": [list(shape) for shape in shapes],
                "group_name": group_name,
                "load_format": "flattened_bucket",
                "weight_version": str(weight_version),
                "flush_cache": self._pause_mode == "retract",  # SGLang cannot while requests run
            },
            timeout=None,
        )

    def checksums(self) -> list[dict[str, int]]:
        """Return the checksums of each tensor-parallel rank; `checksum.combine` adds them up."""
        ranks = self._post("/weights_checker", {"action": "checksum"})["ranks"]
        return [{name: int(value) for name, value in rank["checksums"].items()} for rank in ranks]

    def parameters(self) -> list[dict[str, str]]:
        """Have each tensor-parallel rank hand out its parameters to processes of its machine.

        Return a mapping for each rank, from `checksum.part_key` to `direct.describe`.
        """
        ranks = self._post("/weights_checker", {"action": "parameters"})["ranks"]
        return [rank["checksums"] for rank in ranks]

    def own_address(self) -> str:
        """Return the address under which the server can reach this machine."""
        return process.address_towards(self._client.base_url.host)

    def close(self) -> None:
        """Close the connection; the server keeps running."""
        self._client.close()

    def _post(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        try:
            response = self._client.post(path, json=body, **options)
        except httpx.TimeoutException:
            raise self.server.failed(f"did not answer {path} in time") from None
        except httpx.TransportError as error:
            raise self.server.failed(f"closed the connection in {path} ({error!r})") from None
        if response.is_error:
            raise UpdateRefused(str(self.server.failed(f"refused {path}: {response.text}")))
        answer = response.json()
        if answer.get("success") is False:
            message = f"failed in {path}: {answer.get('message')}"
            raise UpdateRefused(str(self.server.failed(message)))
        return answer
