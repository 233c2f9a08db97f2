"""SGLang servers that run: how to ask, wait for and stop them; only this folder sends requests.

Callers rely on four properties of SGLang with this package's plugin. Tests check each of
them on the real server:
- `output_token_logprobs` cover the full vocabulary at the sampling temperature, whatever top_p is.
- `output_token_sampling_logprobs` cover only `output_token_sampling_mask`, the ids from which a
  token was drawn.
- A prompt that starts after a weight update uses no cached prefix from before it.
- `token_versions` in an answer has, for each token, the version of the weights that sampled it.

Every server requires a key with each request, also on loopback, which all users of a machine reach.
The key is stored in `Server`, and never appears on a command line.
"""

import asyncio
import contextlib
import dataclasses
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pydantic
import torch

from qurl_megatron.config.schema import PauseMode, Releases
from qurl_megatron.machine.network import address_towards
from qurl_megatron.machine.output import tail
from qurl_megatron.machine.processes import start_ticks
from qurl_megatron.rollout import preload
from qurl_megatron.rollout.requests import NoAnswer, Reply, ask
from qurl_megatron.rollout.wire import LARGEST_HEADER_BYTES, RUN_HEADER, dtype_names, escaped

LOOPBACK = "127.0.0.1"
POLL_S = 0.2
REVIVE_TIMEOUT_S = 30.0
LOCAL_RUN = "own"  # the name by which a run claims a server that it has started
# A server's death is noticed at once; this limit is for a server that hangs. A weight of 1.5 GB
# takes 12 s over 1 Gb/s, and a server compiles its kernels in the first publish.
PEER_TIMEOUT_S = 60.0

_CACHE = ("kv_cache", "cuda_graph")
RELEASED: Mapping[Releases, Sequence[str]] = {"cache": _CACHE, "all": (*_CACHE, "weights")}
"""SGLang's tags for the memory that a sleeping server releases, by `ServerConfig.releases`."""

locks: dict[str, int] = {}  # of the scratch directories of servers that this process started
STOP_TIMEOUT_S = 30.0  # for killed processes to end; one that waits for a broken GPU may never end


class ServerFailed(RuntimeError):
    """A server did not start, died or refused a request; the text ends with the end of its log."""


class UpdateRefused(ServerFailed):
    """A server answered that it did not do what it was asked to do."""


@dataclasses.dataclass(frozen=True)
class _Rank:
    checksums: dict[str, str]


_RANKS = pydantic.TypeAdapter(list[_Rank])


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server, as every process of the run knows it, and the requests that control it.

    Of a server that somebody started elsewhere, only URL, key and run are known. Every request
    waits for the answer, and raises `ServerFailed` if that does not come or makes no sense.
    """

    url: str
    api_key: str
    machine: str = ""  # hostname
    pid: int = 0  # the main process, root of the server's process tree
    start_ticks: int | None = None  # when that process started; None: it died
    tensor_parallel_size: int = 1
    gpus: list[int] = dataclasses.field(default_factory=list)
    """Indices on its machine, one per tensor-parallel rank; empty without a GPU."""
    log_file: str = ""
    scratch_dir: str = ""  # holds its sockets and temporary files
    is_remote: bool = False  # somebody started it elsewhere
    step_s: float = 0.0  # that it may compute without an answer; see `start.step_s`
    timeout_s: float = PEER_TIMEOUT_S  # of an answer to what controls it, and of a transfer to it
    run: str = LOCAL_RUN  # names the run to the server, which serves one at a time

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that every request needs."""
        key = {"Authorization": f"Bearer {self.api_key}"}
        return key | ({RUN_HEADER: self.run} if self.run else {})

    async def ask(self, method: str, path: str, **options: Any) -> Reply:
        """Send a request to the server, with its headers; see `requests.ask`."""
        headers = {**self.headers, **options.pop("headers", {})}
        return await ask(method, f"{self.url}{path}", headers, **options)

    async def request(self, method: str, path: str, **options: Any) -> Reply:
        """Ask as `ask` does, but raise `ServerFailed` if there is no answer."""
        try:
            return await self.ask(method, path, **options)
        except NoAnswer as error:
            raise self.failed(str(error)) from None

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Stop sampling. Running requests wait where they are, and continue after `resume`.

        In mode `retract` they give up their keys and values; after `resume` SGLang computes these
        again from the tokens. In mode `in_place` they keep them.
        """
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue sampling, with the weights of the last update and under its version."""
        await self._post("/continue_generation", {})

    async def sleep(self, tags: Sequence[str]) -> None:
        """Stop sampling, and release the memory that these SGLang tags name.

        Running requests wait without keys and values, whatever the run's `rollout.pause_mode` is.
        """
        await self.pause()
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
        flush_cache: bool = True,
    ) -> None:
        """Receive and load the tensors that these lists announce, as `weight_sync.bucket` defines.

        The server must be paused. Tokens sampled after it resumes carry `weight_version`. There is
        no time limit: the answer comes after all transfers, and their senders have limits.

        Args:
            flush_cache: empty the cache of prefixes, which is impossible while requests run.

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
                "flush_cache": flush_cache,
            },
            timeout_s=None,
        )

    async def checksums(self) -> list[dict[str, int]]:
        """Return the checksums of each tensor-parallel rank; `checksum.combine` adds them up."""
        try:
            ranks = await self._check_weights("checksum")
            return [{name: int(value) for name, value in rank.items()} for rank in ranks]
        except ValueError as error:
            raise self.failed(f"gave no checksums: {escaped(str(error))}") from None

    async def parameters(self) -> list[dict[str, str]]:
        """Let each tensor-parallel rank hand out its parameters to processes of its machine.

        Return a mapping for each rank, from keys of `checksum.part_key` to texts of
        `direct.describe`.
        """
        return await self._check_weights("parameters")

    async def _check_weights(self, action: str) -> list[dict[str, str]]:
        """Return the answers of each tensor-parallel rank, by `checksum.part_key`."""
        answer = await self._post("/weights_checker", {"action": action})
        try:
            return [rank.checksums for rank in _RANKS.validate_python(answer.get("ranks"))]
        except ValueError:
            raise self.failed("answered /weights_checker with unexpected content") from None

    async def _post(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        options = {"timeout_s": self.timeout_s, "most_bytes": LARGEST_HEADER_BYTES, **options}
        answer = await self.request("POST", path, json=body, **options)
        if not answer.is_success:
            raise UpdateRefused(str(self.failed(f"refused {path}: {answer.text}")))
        if answer.content == b"null":  # as after a sleep or a wake
            return {}
        try:
            fields = answer.fields()
        except ValueError as error:
            raise self.failed(f"answered {path} with {error}") from None
        if fields.get("success") is False:
            message = f"failed in {path}: {escaped(str(fields.get('message')))}"
            raise UpdateRefused(str(self.failed(message)))
        return fields

    def address_here(self) -> str:
        """Return the address at which the server can reach this machine."""
        return address_towards(urlsplit(self.url).hostname or "")

    @property
    def is_local(self) -> bool:
        """True if the server runs on this machine."""
        return self.machine == socket.gethostname()

    def alive(self) -> bool:
        """Return whether the main process runs.

        Return True for a server on another machine: the launcher there watches it.
        """
        if not self.is_local:
            return True
        return self.start_ticks is not None and start_ticks(self.pid) == self.start_ticks

    def stop(self) -> None:
        """Kill the process tree and remove the scratch files. Only the starter may call it.

        The signal is SIGKILL: a server has nothing to save, and on SIGTERM SGLang takes its own
        dying children for a crash and spends seconds on a diagnosis.
        """
        try:
            main = psutil.Process(self.pid)
            tree = [main, *main.children(recursive=True)] if self.alive() else []
        except psutil.NoSuchProcess:
            tree = []
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self.scratch_dir, ignore_errors=True)  # before the wait, which may be long
        psutil.wait_procs(tree, timeout=STOP_TIMEOUT_S)
        if self.scratch_dir in locks:
            os.close(locks.pop(self.scratch_dir))

    def failed(self, what: str) -> ServerFailed:
        """Return the exception for a failure, with the end of the log if there is one here."""
        if self.is_remote:
            return ServerFailed(f"server {self.url} {what}")
        log, end = Path(self.log_file), ""
        with contextlib.suppress(OSError):  # a shared file system may falter
            end = tail(log)
        return ServerFailed(f"server {self.url} {what}; {log} ends:\n{end}")


def wait_ready(
    servers: Sequence[Server],
    timeout_s: float,
    ready: Callable[[Server], None] = lambda server: None,
) -> None:
    """Wait until every server answers, and call `ready` for each as soon as it does.

    Raises:
        ServerFailed: a server died, or did not answer within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    waiting = list(servers)
    while waiting:
        for server in list(waiting):
            if answers(server):
                waiting.remove(server)
                ready(server)
            elif not server.alive():
                raise server.failed(f"died while starting ({preload.how_it_ended(server.pid)})")
            elif time.monotonic() > deadline:
                raise server.failed(f"did not come up in {timeout_s:.0f} s")
        if waiting:
            time.sleep(POLL_S)


def answers(server: Server) -> bool:
    """Return whether a server answers /health, as it does unless it starts or is paused."""
    with contextlib.suppress(NoAnswer):
        return asyncio.run(server.ask("GET", "/health", timeout_s=5.0)).is_success
    return False


def revive(servers: Iterable[Server]) -> list[Server]:
    """Return the servers that answer, after ending pauses that an earlier learner began."""
    return asyncio.run(those_that(servers, partial(revived, timeout_s=REVIVE_TIMEOUT_S)))


async def revived(server: Server, timeout_s: float) -> bool:
    """End a server's pause; return whether it answers and takes requests of the run.

    A learner may have paused it and ended, and a paused server does not answer /health. A server of
    another run refuses to resume.

    Raises:
        NoAnswer: it does not answer.
    """
    resumed = await server.ask("POST", "/continue_generation", json={}, timeout_s=timeout_s)
    healthy = await server.ask("GET", "/health", timeout_s=timeout_s)
    return resumed.is_success and healthy.is_success


async def those_that(
    servers: Iterable[Server], do: Callable[[Server], Awaitable[bool]]
) -> list[Server]:
    """Call `do` for all servers at once; return the servers for which it returns True."""

    async def does(server: Server) -> bool:
        with contextlib.suppress(NoAnswer):
            return await do(server)
        return False

    servers = list(servers)
    return [
        server
        for server, done in zip(servers, await asyncio.gather(*map(does, servers)), strict=True)
        if done
    ]
