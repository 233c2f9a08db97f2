"""SGLang servers: start, watch, sample from, control and stop them. The room that speaks HTTP.

What SGLang 0.5.17 does that callers rely on, each tested against the real server:
- `output_token_logprobs` are of the full vocabulary at the sampling temperature, whatever top_p is.
- A weight update empties the prefix cache, also while the server is paused.
- `weight_version` in an answer is the version set last; it is ours to set.

A server on loopback asks nobody who he is. One that other machines can reach wants its key with
every request; the key is in `Server` and in no command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.config.schema import ServerConfig, WeightFormat
from qurl_megatron.files import write_whole
from qurl_megatron.quantization.quantize import ENGINE_METHODS

LOOPBACK = "127.0.0.1"
POLL_S = 0.2
CONTROL_TIMEOUT_S = 600.0  # a publish waits for the slowest server
ROUTER_START_TIMEOUT_S = 120.0
ROUTER_REQUEST_TIMEOUT_S = 7 * 24 * 3600  # none; it wants a number
LOG_TAIL_LINES = 20
LOG_LINE_LENGTH = 500
PORTS = range(20000, 32768)  # below Linux's ephemeral ports
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# SGLang leaves a request this many fewer tokens than its context has.
CONTEXT_RESERVE = 2
# Signals that Slurm and launchers send to every process of a node, and that are not for servers.
NOT_FOR_SERVERS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
# `python -m sglang_router.launch_router` would import SGLang first: ten seconds.
START_ROUTER = """
import json, sys
from sglang_router.router import Router
from sglang_router.router_args import RouterArgs
Router.from_args(RouterArgs(**json.load(sys.stdin))).start()
"""


class ServerFailed(RuntimeError):
    """A server that did not come up, died or refused; the text ends with its log's last lines."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server, as its starter and every other process of the run know it."""

    url: str
    machine: str  # name of the one it runs on
    pid: int  # of its main process, the root of its process tree
    tensor_parallel_size: int
    gpus: list[int]  # of its machine, one a tensor-parallel rank; none without a GPU
    log_file: str
    scratch_dir: str  # its sockets and temporary files
    api_key: str | None = None  # that it wants with every request

    @property
    def headers(self) -> dict[str, str]:
        """Of every request to it."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def here(self) -> bool:
        """Whether it runs on this machine."""
        return self.machine == socket.gethostname()

    def alive(self) -> bool:
        """Whether its main process runs; True of another machine's, which its starter watches."""
        if not self.here:
            return True
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def stop(self) -> None:
        """End its whole process tree and remove its scratch files. Only its starter may.

        Killed at once, for it has nothing to save: asked to end, SGLang takes its own dying
        children for a crash and spends seconds on diagnosing it.
        """
        try:
            main = psutil.Process(self.pid)
            tree = [main, *main.children(recursive=True)]
        except psutil.NoSuchProcess:
            tree = []
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree)
        shutil.rmtree(self.scratch_dir, ignore_errors=True)

    def failed(self, what: str) -> ServerFailed:
        """The exception for what went wrong, with the end of the log."""
        log = Path(self.log_file)
        return ServerFailed(f"server {self.url} {what}; {log} ends:\n{tail(log)}")


def start_server(
    model_dir: Path,
    server: ServerConfig,
    weight_format: WeightFormat,
    *,
    context_length: int,
    log_file: Path,
    seed: int,
    loads: bool = False,
    host: str = LOOPBACK,
    api_key: str | None = None,
    gpus: Sequence[int] | None = None,
) -> Server:
    """Start a server of `model_dir`; it comes up in the background.

    Where it `loads` its weights they are those of the directory, in `weight_format`; otherwise the
    first publish is to bring them.
    `context_length` is prompt and response together, in tokens. The server listens on `host`; where
    that is not loopback it wants `api_key`, one for all the servers behind a router. `gpus` follow
    each other; the first of the machine when left out. It ends when the calling process does.
    """
    if host != LOOPBACK and not api_key:
        raise ValueError(f"a server on {host} without a key would serve anybody")
    if gpus is None:
        gpus = range(min(server.tensor_parallel_size, device.num_gpus()))
    port = free_port()
    arguments: dict[str, object] = {
        "model-path": model_dir,
        "load-format": "safetensors" if loads else "dummy",
        "dtype": "bfloat16",
        "host": host,
        "port": port,
        "nccl-port": free_port(),
        "tensor-parallel-size": server.tensor_parallel_size,
        "mem-fraction-static": server.mem_fraction_static,
        "max-running-requests": server.max_running_requests,
        "context-length": context_length + CONTEXT_RESERVE,
        "random-seed": seed,
        "weight-version": 0,
        "log-level-http": "warning",
        "grammar-backend": "none",  # nothing here asks for structured answers
    }
    flags = ["--skip-tokenizer-init"]  # prompts and completions travel as tokens
    if gpus:
        arguments["base-gpu-id"] = gpus[0]
    if server.max_total_tokens is not None:
        arguments["max-total-tokens"] = server.max_total_tokens
    if weight_format != "bf16" and not loads:  # a quantised directory says itself what it is
        arguments["quantization"] = ENGINE_METHODS[weight_format]
    scratch_dir = tempfile.mkdtemp(prefix="qurl-server-")
    if api_key:
        key_file = Path(scratch_dir) / "key.yaml"  # in a directory nobody else reads
        key_file.write_text(f"api-key: {api_key}\n")
        arguments["config"] = key_file
    additions = {
        "TMPDIR": scratch_dir,
        # A crashed server would diagnose itself for over a minute before it ends.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }
    if device.accelerator() == "cpu":
        arguments["device"] = "cpu"
        # An idle scheduler would poll, and take a core from the learner. Logits in float32 are
        # faster than in bfloat16 here, and better.
        flags += ["--disable-overlap-schedule", "--sleep-on-idle", "--enable-fp32-lm-head"]
        additions["SGLANG_PLATFORM"] = "qurl_cpu"
        additions["OMP_NUM_THREADS"] = str(server.threads)
        if server.tensor_parallel_size > 1:
            additions["SGLANG_CPU_OMP_THREADS_BIND"] = _a_core_a_rank(server)
    elif device.lacks_flash_attention():
        arguments |= {"attention-backend": "triton", "sampling-backend": "pytorch"}
        additions["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *words, *flags],
            env=device.child_environment(additions),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is its starter's to handle
            preexec_fn=_end_only_by_parent,
        )
    return Server(
        url=f"http://{host}:{port}",
        machine=socket.gethostname(),
        pid=process.pid,
        tensor_parallel_size=server.tensor_parallel_size,
        gpus=list(gpus),
        log_file=str(log_file),
        scratch_dir=scratch_dir,
        api_key=api_key,
    )


def wait_ready(
    servers: Sequence[Server], timeout_s: float, given_up: Callable[[], bool] = lambda: False
) -> None:
    """Return when every server answers, or the caller has `given_up`.

    Raises:
        ServerFailed: one died, or `timeout_s` is over.
    """
    deadline = time.monotonic() + timeout_s
    for server in servers:
        while not given_up() and not _answers(server):
            if not server.alive():
                raise server.failed("died while starting")
            if time.monotonic() > deadline:
                raise server.failed(f"did not come up in {timeout_s:.0f} s")
            time.sleep(POLL_S)


def save_servers(servers: dict[str, list[Server]], path: Path) -> None:
    """Write the server sets by name, for `load_servers` in the learner's processes."""
    tree = {name: [dataclasses.asdict(s) for s in members] for name, members in servers.items()}
    write_whole(path, json.dumps(tree, indent=2) + "\n", private=True)  # for the keys in it


def load_servers(path: Path) -> dict[str, list[Server]]:
    tree = json.loads(path.read_text())
    return {name: [Server(**fields) for fields in members] for name, members in tree.items()}


class Router:
    """sglang-router before several servers that hold the same weights, as one that samples.

    A child of the calling process, on loopback. It hands out requests in turn: every prompt is new,
    and a publish empties the prefix caches, so there is nothing to find in them. It never tries
    again and never leaves a server out: a lost one is to end the run.
    """

    def __init__(self, servers: Sequence[Server], log_file: Path) -> None:
        port = free_port()
        self.url = f"http://{LOOPBACK}:{port}"
        self.headers = servers[0].headers
        self._num_servers = len(servers)
        self._log_file = log_file
        arguments = {
            "worker_urls": [server.url for server in servers],
            "host": LOOPBACK,
            "port": port,
            "policy": "round_robin",
            "api_key": servers[0].api_key,
            "prometheus_host": LOOPBACK,
            "prometheus_port": free_port(),
            "log_level": "warn",
            "request_timeout_secs": ROUTER_REQUEST_TIMEOUT_S,
            "worker_startup_check_interval": 1,
            "disable_retries": True,
            "disable_circuit_breaker": True,
            "disable_health_check": True,
        }
        with log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START_ROUTER],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_only_by_parent,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments).encode())
        self._process.stdin.close()

    def wait_ready(self, timeout_s: float = ROUTER_START_TIMEOUT_S) -> None:
        """Return when it knows all its servers. Raises ServerFailed if it does not come to that."""
        deadline = time.monotonic() + timeout_s
        while not self._ready():
            if self._process.poll() is not None:
                raise self.failed("died while starting")
            if time.monotonic() > deadline:
                raise self.failed(f"did not come up in {timeout_s:.0f} s")
            time.sleep(POLL_S)

    def _ready(self) -> bool:
        try:
            answer = httpx.get(f"{self.url}/readiness", headers=self.headers, timeout=5.0)
        except httpx.TransportError:
            return False
        return answer.is_success and answer.json()["healthy_workers"] == self._num_servers

    def failed(self, what: str) -> ServerFailed:
        """The exception for what went wrong, with the end of the log."""
        log = self._log_file
        return ServerFailed(f"router {self.url} {what}; {log} ends:\n{tail(log)}")

    def close(self) -> None:
        self._process.kill()  # it has nothing to save
        self._process.wait()


class RolloutClient:
    """Samples completions from a server, or from a router before several."""

    def __init__(self, server: Server | Router, tokenizer: Any, stop_token_ids: Sequence[int]):
        self._server = server
        self._tokenizer = tokenizer
        self._stop_token_ids = list(stop_token_ids)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        completions_per_prompt: int,
        temperature: float,
        max_response_length: int,
        top_p: float = 1.0,
    ) -> list[list[Completion]]:
        """Completions of each prompt, in order; temperature 0 is greedy.

        Raises:
            ServerFailed: a server died or refused a request.
        """
        sampling = {
            "n": completions_per_prompt,
            "temperature": temperature,
            "top_p": top_p,
            "max_new_tokens": max_response_length,
            "stop_token_ids": self._stop_token_ids,
        }
        return asyncio.run(self._generate(prompts, sampling))

    async def _generate(
        self, prompts: Sequence[Prompt], sampling: dict[str, Any]
    ) -> list[list[Completion]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            timeout=None, limits=limits, headers=self._server.headers
        ) as client:
            requests = [self._group(client, prompt, sampling) for prompt in prompts]
            return await asyncio.gather(*requests)

    async def _group(
        self, client: httpx.AsyncClient, prompt: Prompt, sampling: dict[str, Any]
    ) -> list[Completion]:
        body = {
            "input_ids": prompt.token_ids,
            "sampling_params": sampling,
            "return_logprob": True,
        }
        try:
            response = await client.post(f"{self._server.url}/generate", json=body)
        except httpx.TransportError as error:
            raise self._server.failed(f"broke off while sampling ({error!r})") from None
        if response.is_error:
            raise self._server.failed(f"refused to sample: {response.text}")
        answers = response.json()
        return [self._completion(a) for a in (answers if isinstance(answers, list) else [answers])]

    def _completion(self, answer: dict[str, Any]) -> Completion:
        meta = answer["meta_info"]
        token_ids = answer["output_ids"]
        return Completion(
            token_ids=token_ids,
            behaviour_logprobs=[logprob for logprob, *_ in meta["output_token_logprobs"]],
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            # SGLang also calls it "length" when the last token there is room for is a stop token.
            truncated=meta["finish_reason"]["type"] == "length"
            and token_ids[-1] not in self._stop_token_ids,
            weight_version=int(meta["weight_version"]),
        )


class ServerControl:
    """What publishing asks of one server. Every call waits for its answer."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._client = httpx.Client(
            base_url=server.url, headers=server.headers, timeout=CONTROL_TIMEOUT_S
        )

    def pause(self) -> None:
        """Stop sampling; requests that are running wait, and will be computed afresh."""
        self._post("/pause_generation", {"mode": "retract"})

    def resume(self, weight_version: int) -> None:
        """Sample again; what is sampled from now on carries `weight_version`."""
        version = {"new_version": str(weight_version), "abort_all_requests": False}
        self._post("/update_weight_version", version)
        self._post("/continue_generation", {})

    def init_weights_group(
        self,
        master_address: str,
        master_port: int,
        *,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Join the process group weights come over, as ranks `rank_offset` and following."""
        self._post(
            "/init_weights_update_group",
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            },
        )

    def update_weights(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
    ) -> None:
        """Receive one flat buffer of these tensors, broadcast by rank 0, and load them."""
        self._post(
            "/update_weights_from_distributed",
            {
                "names": list(names),
                "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
                "shapes": [list(shape) for shape in shapes],
                "group_name": group_name,
                "load_format": "flattened_bucket",
            },
        )

    def checksums(self) -> list[dict[str, int]]:
        """What each tensor-parallel rank holds; see `checksum.combine`."""
        ranks = self._post("/weights_checker", {"action": "checksum"})["ranks"]
        return [{name: int(value) for name, value in rank["checksums"].items()} for rank in ranks]

    def close(self) -> None:
        self._client.close()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            response = self._client.post(path, json=body)
        except httpx.TransportError as error:
            raise self.server.failed(f"broke off in {path} ({error!r})") from None
        if response.is_error:
            raise self.server.failed(f"refused {path}: {response.text}")
        answer = response.json()
        if answer.get("success") is False:
            raise self.server.failed(f"failed in {path}: {answer.get('message')}")
        return answer


def free_port() -> int:
    """A port of this machine nobody uses now, drawn from those no outgoing connection will take.

    A server binds its ports many seconds after they are chosen; the kernel could hand one it chose
    itself to anybody else in between.
    """
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))  # free on every address
            return port


def address_towards(server: Server) -> str:
    """The address of this machine that `server` can reach it under."""
    url = httpx.URL(server.url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.host, url.port))  # chooses a route, sends nothing
        return probe.getsockname()[0]


def tail(log_file: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log, shortened: SGLang prints all its settings on one."""
    last = log_file.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join(line[:LOG_LINE_LENGTH] for line in last)


def die_with_parent() -> None:
    """In a child before its program starts: have the kernel end it when its parent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_only_by_parent() -> None:
    """In a server or router before its program starts; its starter ends it by killing it."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_SERVERS)


def _answers(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", headers=server.headers, timeout=5.0).is_success
    except httpx.TransportError:
        return False


def _a_core_a_rank(server: ServerConfig) -> str:
    """SGLang binds each tensor-parallel rank's threads to cores of its own, or refuses to start."""
    cores = psutil.cpu_count() or 1
    return "|".join(str(rank % cores) for rank in range(server.tensor_parallel_size))
