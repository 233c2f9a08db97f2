"""One run for each server: the weights of a second run would silently replace those of the first.

A run names itself in a header of every request. `Claim` knows which run the server serves, and
`Claimed` refuses the requests of any other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from qurl_megatron.rollout.wire import DESCRIPTION_PATH, RUN_HEADER, RUN_PATH

# A run that asks for nothing for so long has ended without saying so. The learner's part of a step
# must be shorter.
CLAIM_S = 3600.0


class Claim:
    """Which run a server serves: the one that asked last, unless that was long ago."""

    def __init__(self) -> None:
        self._run = ""
        self._num_running = 0  # requests of the run
        self._heard_at = 0.0  # when its last one ended, by the monotonic clock

    @property
    def run(self) -> str:
        """The run that the server serves; empty: none."""
        silent_s = time.monotonic() - self._heard_at
        return self._run if self._num_running or silent_s < CLAIM_S else ""

    @contextlib.contextmanager
    def held_by(self, run: str) -> Iterator[None]:
        """Serve a request of `run`, which must be the one that the server serves, or the first."""
        self._run = run
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1
            self._heard_at = time.monotonic()

    def release(self, run: str) -> None:
        """Forget the run, if it is this one."""
        if self._run == run:
            self._run = ""


class Claimed:
    """Passes on the requests of no run, and of the run that has the claim; refuses others."""

    def __init__(self, app: Any, claim: Claim) -> None:
        self._app = app
        self._claim = claim

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, as ASGI applications do."""
        from starlette.datastructures import Headers
        from starlette.responses import JSONResponse

        run = Headers(scope=scope).get(RUN_HEADER, "") if scope["type"] == "http" else ""
        if not run or scope["path"] in (DESCRIPTION_PATH, RUN_PATH):
            await self._app(scope, receive, send)
        elif self._claim.run in ("", run):
            with self._claim.held_by(run):
                await self._app(scope, receive, send)
        else:
            message = f"it serves the run {self._claim.run}"
            refusal = JSONResponse({"success": False, "message": message}, status_code=409)
            await refusal(scope, receive, send)
