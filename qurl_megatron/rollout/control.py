"""Control one server: pause, receive weights, report checksums, resume, sleep and wake."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pydantic
import torch

from qurl_megatron.config.schema import PauseMode, Releases
from qurl_megatron.machine import network
from qurl_megatron.rollout.requests import NoAnswer
from qurl_megatron.rollout.server import Server, ServerFailed
from qurl_megatron.rollout.wire import LARGEST_HEADER_BYTES, dtype_names, escaped

CONTROL_TIMEOUT_S = 600.0

_CACHE = ("kv_cache", "cuda_graph")
RELEASED: Mapping[Releases, Sequence[str]] = {"cache": _CACHE, "all": (*_CACHE, "weights")}
"""SGLang's tags for the memory that a sleeping server releases, by `ServerConfig.releases`."""


@dataclass(frozen=True)
class _Rank:
    checksums: dict[str, str]


_RANKS = pydantic.TypeAdapter(list[_Rank])


class UpdateRefused(ServerFailed):
    """A server answered that it did not do what it was asked to do."""


class ServerControl:
    """The control requests of one server. Every call waits for the server's answer."""

    def __init__(
        self,
        server: Server,
        pause_mode: PauseMode = "retract",
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """Store the server, which has `timeout_s` seconds for each answer.

        `pause_mode` is the run's `rollout.pause_mode`.
        """
        self.server = server
        self.timeout_s = timeout_s
        self.flushes_cache = pause_mode == "retract"  # impossible while requests run
        self._pause_mode = pause_mode

    async def pause(self) -> None:
        """Stop sampling. Running requests wait where they are, and continue after `resume`.

        In mode `retract` they give up their keys and values; after `resume` SGLang computes these
        again from the tokens. In mode `in_place` they keep them.
        """
        await self._post("/pause_generation", {"mode": self._pause_mode})

    async def resume(self) -> None:
        """Continue sampling, with the weights of the last update and under its version."""
        await self._post("/continue_generation", {})

    async def sleep(self, tags: Sequence[str]) -> None:
        """Stop sampling, and release the memory that these SGLang tags name.

        Running requests wait without keys and values, whatever the run's `rollout.pause_mode` is.
        """
        await self._post("/pause_generation", {"mode": "retract"})
        await self._post("/release_memory_occupation", {"tags": list(tags)})

    async def wake(self, tags: Sequence[str]) -> None:
        """Take the memory of these tags again, without its old content, but sample nothing yet."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)})

    async def init_weights_group(self, **group: str | int) -> None:
        """Join the process group that carries weights; the server has all ranks but rank 0.

        `group` has its `master_address`, `master_port`, `world_size`, `group_name` and `backend`.
        """
        await self._post("/init_weights_update_group", {"rank_offset": 1, **group})

    async def update_weights(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        weight_version: int,
    ) -> None:
        """Receive and load the tensors that these lists announce, as `weight_sync.bucket` defines.

        The server must be paused. Tokens sampled after it resumes carry `weight_version`. There is
        no time limit: the answer comes after all transfers, and their senders have limits.

        Raises:
            UpdateRefused: the server could not load it, or lacks the version that a delta changes.
        """
        await self._post(
            "/update_weights_from_distributed",
            {
                "names": list(names),
                "dtypes": dtype_names(dtypes),
                "shapes": [list(shape) for shape in shapes],
                "group_name": group_name,
                "load_format": "flattened_bucket",
                "weight_version": str(weight_version),
                "flush_cache": self.flushes_cache,
            },
            timeout_s=None,
        )

    async def checksums(self) -> list[dict[str, int]]:
        """Return the checksums of each tensor-parallel rank; `checksum.combine` adds them up."""
        try:
            ranks = await self._check("checksum")
            return [{name: int(value) for name, value in rank.items()} for rank in ranks]
        except ValueError as error:
            raise self.server.failed(f"gave no checksums: {escaped(str(error))}") from None

    async def parameters(self) -> list[dict[str, str]]:
        """Let each tensor-parallel rank hand out its parameters to processes of its machine.

        Return a mapping for each rank, from keys of `checksum.part_key` to texts of
        `direct.describe`.
        """
        return await self._check("parameters")

    def own_address(self) -> str:
        """Return the address at which the server can reach this machine."""
        return network.address_towards(urlsplit(self.server.url).hostname or "")

    async def _check(self, action: str) -> list[dict[str, str]]:
        """Return the answers of each tensor-parallel rank, by `checksum.part_key`."""
        answer = await self._post("/weights_checker", {"action": action})
        try:
            return [rank.checksums for rank in _RANKS.validate_python(answer.get("ranks"))]
        except ValueError:
            raise self.server.failed("answered /weights_checker with unexpected content") from None

    async def _post(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        options = {"timeout_s": self.timeout_s, "most_bytes": LARGEST_HEADER_BYTES, **options}
        try:
            answer = await self.server.ask("POST", path, json=body, **options)
        except NoAnswer as error:
            raise self.server.failed(str(error)) from None
        if not answer.is_success:
            raise UpdateRefused(str(self.server.failed(f"refused {path}: {answer.text}")))
        if answer.content == b"null":  # as after a sleep or a wake
            return {}
        try:
            fields = answer.fields()
        except ValueError as error:
            raise self.server.failed(f"answered {path} with {error}") from None
        if fields.get("success") is False:
            message = f"failed in {path}: {escaped(str(fields.get('message')))}"
            raise UpdateRefused(str(self.server.failed(message)))
        return fields
