"""Start, watch and stop SGLang servers. Only this folder speaks HTTP.

Callers rely on three properties of SGLang 0.5.17 with this package's plugin. Tests check each of
them on the real server:
- `output_token_logprobs` cover the full vocabulary at the sampling temperature, whatever top_p is.
- A prompt that starts after a weight update uses no prefix from before it.
- `token_versions` in an answer has, for each token, the version of the weights that sampled it.

Loopback servers are unauthenticated. A server that other machines can reach requires a key with
every request. The key is stored in `Server` and never appears on a command line.

A server that somebody started elsewhere (`remote.py`) is a `Server` too, of which only the URL and
the key are known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shutil
import socket
import ssl
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
from qurl_megatron.config.keep import kept_layers
from qurl_megatron.config.schema import ServerConfig, WeightFormat
from qurl_megatron.config.server_options import CONTEXT_RESERVE
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.preload import Preload, PreloadFailed
from qurl_megatron.process import (
    LAUNCHER_SIGNALS,
    end_only_with_parent,
    free_port,
    start_ticks,
    tail,
)
from qurl_megatron.quantization.quantize import ENGINE_METHODS
from qurl_megatron.rollout.options import command_line
from qurl_megatron.rollout.wire import RUN_HEADER

LOOPBACK = "127.0.0.1"
CPU_PLATFORM = "qurl_cpu"  # an entry point in pyproject.toml
POLL_S = 0.2
STOP_TIMEOUT_S = 30.0  # for killed processes to end; one that waits for a broken GPU may never end
# Connections are not kept: a server closes an idle one after 5 s, maybe just when it is used again,
# which could not be told from a server that dies.
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


@functools.cache
def certificates() -> ssl.SSLContext:
    """Return what servers elsewhere are verified with.

    A client that is not given it reads the certificates of all authorities anew, even if it only
    speaks plain HTTP.
    """
    return httpx.create_ssl_context()


class ServerFailed(RuntimeError):
    """A server did not start, died or refused a request; the text ends with the end of its log."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server, as every process of the run knows it."""

    url: str
    machine: str  # hostname
    pid: int  # the main process, root of the server's process tree
    start_ticks: int | None  # start of that process, see process.start_ticks; None if it died
    tensor_parallel_size: int
    gpus: list[int]  # indices on its machine, one per tensor-parallel rank; empty without a GPU
    log_file: str
    scratch_dir: str  # holds its sockets and temporary files
    api_key: str | None = None  # None: unauthenticated
    is_remote: bool = False  # somebody started it elsewhere; see remote.remote_server
    run: str = ""  # names the run to a server elsewhere, which serves one at a time

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that every request needs."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return key | ({RUN_HEADER: self.run} if self.run else {})

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

        SIGKILL is used because a server has nothing to save, and because on SIGTERM SGLang takes
        its own dying children for a crash and spends seconds on a diagnosis.
        """
        try:
            main = psutil.Process(self.pid)
            tree = [main, *main.children(recursive=True)] if self.alive() else []
        except psutil.NoSuchProcess:
            tree = []
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree, timeout=STOP_TIMEOUT_S)
        shutil.rmtree(self.scratch_dir, ignore_errors=True)

    def failed(self, what: str) -> ServerFailed:
        """Return the exception for a failure, with the end of the log if there is one here."""
        if self.is_remote:
            return ServerFailed(f"server {self.url} {what}")
        log = Path(self.log_file)
        return ServerFailed(f"server {self.url} {what}; {log} ends:\n{tail(log)}")


def start_server(
    model_dir: Path,
    server: ServerConfig,
    weight_format: WeightFormat,
    *,
    keep: Sequence[str] = (),
    context_length: int,
    log_file: Path,
    seed: int,
    loads: bool = False,
    records_routing: bool = False,
    host: str = LOOPBACK,
    port: int | None = None,
    api_key: str | None = None,
    gpus: Sequence[int] | None = None,
    preload: Preload | None = None,
) -> Server:
    """Start a server in the background and return at once; `wait_ready` waits for it.

    The server dies with the calling process.

    Args:
        model_dir: Hugging Face directory with configuration and tokenizer.
        keep: the layers that stay in BF16, as in `quantization.keep`.
        context_length: maximum prompt plus response length, in tokens.
        loads: load the directory's weights, which are in `weight_format`. Otherwise the server
            has random weights until the first publish.
        records_routing: answer with the experts that were chosen, if a request asks for them.
        host: address to listen on. Any address other than loopback requires `api_key`, which must
            be the same for all servers of a run.
        port: to listen on; None: a free one.
        gpus: consecutive GPUs of this machine, one per tensor-parallel rank; None: the first ones.
        preload: from `preloaded_sglang`; the server is then a fork of that process.
    """
    if host != LOOPBACK and not api_key:
        raise ValueError(f"host {host}: a server that others can reach needs an api_key")
    if preload:
        preload.wait_ready()
    if gpus is None:
        gpus = range(min(server.tensor_parallel_size, device.num_gpus()))
    port = port or free_port()
    options: dict[str, object] = {
        "model_path": model_dir,
        "load_format": "safetensors" if loads else "dummy",
        "dtype": "bfloat16",
        "host": host,
        "port": port,
        "nccl_port": free_port(),
        "tensor_parallel_size": server.tensor_parallel_size,
        "expert_parallel_size": server.expert_parallel_size,
        "enable_return_routed_experts": records_routing,
        "mem_fraction_static": server.mem_fraction_static,
        "max_running_requests": server.max_running_requests,
        "context_length": context_length + CONTEXT_RESERVE,
        "random_seed": seed,
        "weight_version": 0,
        "log_level_http": "warning",
        "grammar_backend": "none",  # no request asks for structured output
        "skip_tokenizer_init": True,  # prompts and completions travel as token ids
    }
    if gpus:
        options["base_gpu_id"] = gpus[0]
    if server.max_total_tokens is not None:
        options["max_total_tokens"] = server.max_total_tokens
    if weight_format != "bf16" and not loads:  # a quantized directory names its own method
        method = options["quantization"] = ENGINE_METHODS[weight_format]
        if keep:
            layers = kept_layers(keep, Architecture.from_directory(model_dir))
            config = {"quant_method": method, "modules_to_not_convert": layers}
            options["json_model_override_args"] = json.dumps({"quantization_config": config})
    scratch_dir = tempfile.mkdtemp(prefix="qurl-server-")
    if api_key:
        key_file = Path(scratch_dir) / "key.yaml"  # mkdtemp's directories are private
        key_file.write_text(f"api-key: {json.dumps(api_key)}\n")
        options["config"] = key_file
    additions = {
        "TMPDIR": scratch_dir,
        # A crashed server would otherwise diagnose itself for over a minute before it ends.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        # With the reserve the context may exceed the model's positions; no request does.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # It asks itself over HTTP, which a proxy that HTTP_PROXY names cannot do.
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "*"),
    }
    if host == LOOPBACK:
        # Its process groups are on this machine too, and need not listen elsewhere.
        additions |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if device.accelerator() == "cpu":
        # Without sleep-on-idle the scheduler polls and takes a core from the learner. On a CPU
        # float32 logits are faster than bfloat16 ones, and more exact.
        flags = ("disable_overlap_schedule", "sleep_on_idle", "enable_fp32_lm_head")
        options |= {"device": "cpu", **dict.fromkeys(flags, True)}
        additions["SGLANG_PLATFORM"] = CPU_PLATFORM
        additions["OMP_NUM_THREADS"] = str(server.threads)
        if server.tensor_parallel_size > 1:
            additions["SGLANG_CPU_OMP_THREADS_BIND"] = _core_bindings(server)
    else:
        # DeepGEMM (fp8-block) would compile 16384 kernels for each shape at the first start, which
        # takes 10 to 20 minutes; with this it compiles 3072.
        additions["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] = "1"
    if device.lacks_flash_attention():
        options |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
        additions["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    words = command_line({**options, **server.options})
    if preload:
        try:
            pid = preload.start(
                "qurl_megatron.rollout.forked:serve",
                [str(server.threads), *words],
                title=f"sglang::server {host}:{port}",
                environment=additions,
                log_file=log_file,
                blocked_signals=LAUNCHER_SIGNALS,
            ).pid
        except PreloadFailed:
            shutil.rmtree(scratch_dir)
            raise
    else:
        with log_file.open("wb") as log:
            pid = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *words],
                env=device.child_environment(additions),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # only the starter handles Ctrl-C
                preexec_fn=end_only_with_parent,
            ).pid
    return Server(
        url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
        machine=socket.gethostname(),
        pid=pid,
        start_ticks=start_ticks(pid),
        tensor_parallel_size=server.tensor_parallel_size,
        gpus=list(gpus),
        log_file=str(log_file),
        scratch_dir=scratch_dir,
        api_key=api_key,
    )


@contextmanager
def preloaded_sglang(log_file: Path, also: Sequence[str] = ()) -> Iterator[Preload | None]:
    """Yield a process that has imported SGLang, to fork servers from; None on a machine with a GPU.

    `also` lists further preparations of that process; see `Preload`.
    """
    if device.accelerator() == "cuda":
        yield None
        return
    environment = {"SGLANG_PLATFORM": CPU_PLATFORM}
    preparations = ["qurl_megatron.rollout.forked:import_sglang", *also]
    with Preload(preparations, environment, log_file) as preload:
        yield preload


def wait_ready(
    servers: Sequence[Server],
    timeout_s: float,
    given_up: Callable[[], bool] = lambda: False,
    ready: Callable[[Server], None] = lambda server: None,
) -> None:
    """Wait until every server answers, or `given_up` returns True; call `ready` for each at once.

    Raises:
        ServerFailed: a server died, or did not answer within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    waiting = list(servers)
    while waiting and not given_up():
        for server in list(waiting):
            if answers(server):
                waiting.remove(server)
                ready(server)
            elif not server.alive():
                raise server.failed("died while starting")
            elif time.monotonic() > deadline:
                raise server.failed(f"did not come up in {timeout_s:.0f} s")
        if waiting:
            time.sleep(POLL_S)


def answers(server: Server) -> bool:
    """Return whether a server has started; it does not answer while it is paused."""
    try:
        with connect(server, timeout_s=5.0) as http:
            return http.get("/health").is_success
    except httpx.TransportError:
        return False


def connect(server: Server, timeout_s: float) -> httpx.Client:
    """Return a client of one server.

    It has a transport of its own, and so asks no proxy that a variable such as HTTP_PROXY names. A
    proxy cannot reach loopback, and would read what is sent there.
    """
    return httpx.Client(
        base_url=server.url,
        headers=server.headers,
        timeout=timeout_s,
        transport=httpx.HTTPTransport(limits=CONNECTIONS, verify=certificates()),
    )


def _core_bindings(server: ServerConfig) -> str:
    """Return one core for each tensor-parallel rank; SGLang requires this option."""
    cores = psutil.cpu_count() or 1
    return "|".join(str(rank % cores) for rank in range(server.tensor_parallel_size))
