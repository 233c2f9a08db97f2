"""SGLang servers: start, watch, sample from, control and stop them. The room that speaks HTTP.

What SGLang 0.5.17 does that callers rely on, each tested against the real server:
- `output_token_logprobs` are of the full vocabulary at the sampling temperature, whatever top_p is.
- A weight update empties the prefix cache, also while the server is paused.
- `weight_version` in an answer is the version set last; it is ours to set.

A server on loopback asks nobody who he is. One that other machines can reach wants its key with
every request; the key is in `Server` and in no command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from qurl_megatron import device
from qurl_megatron.config.schema import ServerConfig, WeightFormat
from qurl_megatron.files import write_whole
from qurl_megatron.preload import Preload
from qurl_megatron.process import LAUNCHER_SIGNALS, end_only_with_parent, free_port, tail
from qurl_megatron.quantization.quantize import ENGINE_METHODS

LOOPBACK = "127.0.0.1"
CPU_PLATFORM = "qurl_cpu"  # an entry point in pyproject.toml
POLL_S = 0.2
# SGLang leaves a request this many fewer tokens than its context has.
CONTEXT_RESERVE = 2


class ServerFailed(RuntimeError):
    """A server that did not come up, died or refused; the text ends with its log's last lines."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server, as its starter and every other process of the run know it."""

    url: str
    machine: str  # name of the one it runs on
    pid: int  # of its main process, the root of its process tree
    started_at_s: float  # that process's start, as the kernel tells it: it tells a pid used again
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
            process = psutil.Process(self.pid)
            started = process.create_time() == self.started_at_s  # a pid may be used again
            return started and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def stop(self) -> None:
        """End its whole process tree and remove its scratch files. Only its starter may.

        Killed at once, for it has nothing to save: asked to end, SGLang takes its own dying
        children for a crash and spends seconds on diagnosing it.
        """
        try:
            main = psutil.Process(self.pid)
            ours = main.create_time() == self.started_at_s
            tree = [main, *main.children(recursive=True)] if ours else []
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
    preload: Preload | None = None,
) -> Server:
    """Start a server of `model_dir`; it comes up in the background.

    Where it `loads` its weights they are those of the directory, in `weight_format`; otherwise the
    first publish is to bring them.
    `context_length` is prompt and response together, in tokens. The server listens on `host`; where
    that is not loopback it wants `api_key`, one for all the servers behind a router. `gpus` follow
    each other; the first of the machine when left out. It ends when the calling process does.
    With `preload`, from `preloaded_sglang`, it is forked and not imported anew.
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
    if weight_format != "bf16" and not loads:  # a quantized directory says itself what it is
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
        additions["SGLANG_PLATFORM"] = CPU_PLATFORM
        additions["OMP_NUM_THREADS"] = str(server.threads)
        if server.tensor_parallel_size > 1:
            additions["SGLANG_CPU_OMP_THREADS_BIND"] = _a_core_a_rank(server)
    elif device.lacks_flash_attention():
        arguments |= {"attention-backend": "triton", "sampling-backend": "pytorch"}
        additions["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    if preload:
        pid = preload.start(
            "qurl_megatron.rollout.forked:serve",
            [str(server.threads), *words, *flags],
            title=f"sglang::server {host}:{port}",
            environment=additions,
            log_file=log_file,
            blocked_signals=LAUNCHER_SIGNALS,
        ).pid
    else:
        with log_file.open("wb") as log:
            pid = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *words, *flags],
                env=device.child_environment(additions),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for its starter to handle
                preexec_fn=end_only_with_parent,
            ).pid
    return Server(
        url=f"http://{host}:{port}",
        machine=socket.gethostname(),
        pid=pid,
        started_at_s=psutil.Process(pid).create_time(),
        tensor_parallel_size=server.tensor_parallel_size,
        gpus=list(gpus),
        log_file=str(log_file),
        scratch_dir=scratch_dir,
        api_key=api_key,
    )


@contextmanager
def preloaded_sglang(log_file: Path, also: Sequence[str] = ()) -> Iterator[Preload | None]:
    """Yield a process to fork servers from, or None on a machine with a GPU.

    `also` are further preparations of that process; see `Preload`.
    """
    if device.accelerator() == "cuda":
        yield None
        return
    environment = {"SGLANG_PLATFORM": CPU_PLATFORM}
    preparations = ["qurl_megatron.rollout.forked:import_sglang", *also]
    with Preload(preparations, environment, log_file) as preload:
        yield preload


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


def _answers(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", headers=server.headers, timeout=5.0).is_success
    except httpx.TransportError:
        return False


def _a_core_a_rank(server: ServerConfig) -> str:
    """SGLang binds each tensor-parallel rank's threads to cores of its own, or refuses to start."""
    cores = psutil.cpu_count() or 1
    return "|".join(str(rank % cores) for rank in range(server.tensor_parallel_size))
