"""Links to servers that were started elsewhere: no process group, and no request for all buckets.

Rank 0 pauses, verifies and resumes such a server as any other. Buckets reach it by the couriers of
the senders (`remote.py`), which begin when it is paused.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from qurl_megatron.rollout.control import UpdateRefused
from qurl_megatron.weight_sync.link import Link
from qurl_megatron.weight_sync.remote import RemoteDoor
from qurl_megatron.weight_sync.stream import Announcement


class RemoteLink(Link):
    """Global rank 0's connection to one server that was started elsewhere."""

    def sent(self, failed: Mapping[str, str]) -> None:
        """Give the server all tensors, or give it up, if a courier has failed."""
        reason = failed.get(self.door.token) if self.door else None
        if reason is not None:
            # Whether it only refused a delta shows when it is asked to pause for all tensors.
            self._do(lambda: self._fail(reason))

    def _fail(self, reason: str) -> None:
        raise UpdateRefused(reason)

    def _open_door(self) -> None:
        self.door = RemoteDoor(
            token=f"remote-{secrets.token_hex(8)}",
            server=self._member.server,
            flush_cache=self._control.pause_mode == "retract",
            timeout_s=self._timeout_s,
        )

    def _let_in(self, num_senders: int) -> None:
        """Do nothing: couriers need no group."""

    def _await_answer(self, request: Announcement, version: int) -> None:
        """Do nothing: every bucket has an answer of its own, which its courier gets."""
