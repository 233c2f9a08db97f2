"""Start, watch and stop SGLang servers; only this folder sends them requests.

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
import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import psutil
import pydantic
import torch

from qurl_megatron import device
from qurl_megatron.config.keep import kept_layers, layers_of
from qurl_megatron.config.schema import (
    AdaptersConfig,
    ConfigError,
    PauseMode,
    Releases,
    ServerConfig,
    WeightFormat,
)
from qurl_megatron.config.server_options import (
    CONTEXT_RESERVE,
    command_line,
    states_per_request,
    tokens_of_requests,
)
from qurl_megatron.config.validate import check_weight_format
from qurl_megatron.files import write_whole
from qurl_megatron.machine.environment import NO_THREADS, scratch_directory
from qurl_megatron.machine.network import free_port, make_key
from qurl_megatron.machine.output import tail
from qurl_megatron.machine.processes import LAUNCHER_SIGNALS, start_ticks
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.huggingface import served_directory
from qurl_megatron.quantization.quantize import ENGINE_METHODS
from qurl_megatron.rollout import preload, toolkit
from qurl_megatron.rollout.requests import Answer, NoAnswer, ask
from qurl_megatron.rollout.wire import LARGEST_HEADER_BYTES, RUN_HEADER, dtype_names, escaped

LOOPBACK = "127.0.0.1"
POLL_S = 0.2
REVIVE_TIMEOUT_S = 30.0
OWN_RUN = "own"  # the name by which a run claims a server that it has started
# A server's death is noticed at once; this limit is for a server that hangs. A weight of 1.5 GB
# takes 12 s over 1 Gb/s, and a server compiles its kernels in the first publish.
PEER_TIMEOUT_S = 60.0

_CACHE = ("kv_cache", "cuda_graph")
RELEASED: Mapping[Releases, Sequence[str]] = {"cache": _CACHE, "all": (*_CACHE, "weights")}
"""SGLang's tags for the memory that a sleeping server releases, by `ServerConfig.releases`."""

_said_dropped: set[str] = set()
_locks: dict[str, int] = {}  # of the scratch directories of servers that this process started
STOP_TIMEOUT_S = 30.0  # for killed processes to end; one that waits for a broken GPU may never end

# A server answers nothing, not even /health, before it has computed a chunk of prompts. Without a
# GPU a chunk has so many FLOPs, for which an idle core with AVX2 takes two seconds.
CHUNK_FLOPS = 1e11
CHUNK_TOKENS = 64, 4096  # smaller ones waste time; SGLang's own are not larger
UNCHUNKED_TOKENS = 2**14  # SGLang's limit of a batch of whole prompts
SLOWEST_FLOPS_PER_S = 2.5e9  # of a core that others use as well: 5 % of an idle one's
WATCHDOG_S = 300.0  # SGLang's own; after a longer step a server ends itself


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
    start_ticks: int | None = None  # start of that process, see process.start_ticks; None: it died
    tensor_parallel_size: int = 1
    gpus: list[int] = dataclasses.field(default_factory=list)
    """Indices on its machine, one per tensor-parallel rank; empty without a GPU."""
    log_file: str = ""
    scratch_dir: str = ""  # holds its sockets and temporary files
    is_remote: bool = False  # somebody started it elsewhere
    step_s: float = 0.0  # that it may compute without an answer; see `ServerPlan`
    timeout_s: float = PEER_TIMEOUT_S  # of an answer to what controls it, and of a transfer to it
    run: str = OWN_RUN  # names the run to the server, which serves one at a time

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that every request needs."""
        key = {"Authorization": f"Bearer {self.api_key}"}
        return key | ({RUN_HEADER: self.run} if self.run else {})

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        """Send a request to the server, with its headers; see `requests.ask`."""
        return await ask(method, f"{self.url}{path}", self.headers, **options)

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
        try:
            answer = await self.ask("POST", path, json=body, **options)
        except NoAnswer as error:
            raise self.failed(str(error)) from None
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
        if self.scratch_dir in _locks:
            os.close(_locks.pop(self.scratch_dir))

    def failed(self, what: str) -> ServerFailed:
        """Return the exception for a failure, with the end of the log if there is one here."""
        if self.is_remote:
            return ServerFailed(f"server {self.url} {what}")
        log, end = Path(self.log_file), ""
        with contextlib.suppress(OSError):  # a shared file system may falter
            end = tail(log)
        return ServerFailed(f"server {self.url} {what}; {log} ends:\n{end}")


@dataclasses.dataclass(frozen=True)
class ServerPlan:
    """The settings of one server's start."""

    model_dir: Path  # Hugging Face directory with configuration and tokenizer
    config: ServerConfig
    weight_format: WeightFormat
    context_length: int  # maximum prompt plus completion length, in tokens
    log_file: Path
    seed: int
    keep: Sequence[str] = ()  # the layers that stay in BF16, as in `quantization.keep`
    adapters: AdaptersConfig = dataclasses.field(default_factory=AdaptersConfig)
    # Load the directory's weights, which are in `weight_format`. Otherwise the server has random
    # weights until the first publish.
    loads: bool = False
    releases: Releases | None = None  # what it gives back while it sleeps; None: it never does
    records_routing: bool = False  # answer with the experts chosen, if a request asks for them
    host: str = LOOPBACK  # address to listen on
    port: int = dataclasses.field(default_factory=free_port)
    api_key: str = dataclasses.field(default_factory=make_key)
    # Consecutive GPUs of this machine, one per tensor-parallel rank; None: the first ones.
    gpus: Sequence[int] | None = None

    def start(self) -> Server:
        """Start the server in the background and return at once; `wait_ready` waits for it.

        It dies with the calling process.

        Raises:
            ConfigError: the GPUs cannot be used or do not support its weight format, or a compiler
                of kernels is missing.
        """
        if problem := device.unusable_gpus():
            raise ConfigError(problem)
        check_weight_format(self.weight_format, device.capabilities())
        host, num_ranks = self.host, self.config.tensor_parallel_size
        gpus = self.gpus
        if gpus is None:
            gpus = range(min(num_ranks, device.num_gpus()))
        needed = self.environment()  # first, because it may raise
        scratch_dir, lock = scratch_directory("qurl-server-")
        _locks[scratch_dir] = lock
        options = self.options()
        if self._architecture and self._architecture.is_hybrid:
            options["model_path"] = served_directory(self.model_dir, Path(scratch_dir) / "model")
        if gpus:
            options["base_gpu_id"] = gpus[0]
        key_file = Path(scratch_dir) / "key.yaml"
        write_whole(key_file, f"api-key: {json.dumps(self.api_key)}\n", private=True)
        options["config"] = key_file
        words = command_line({**options, **self.config.options})
        environment = {**needed, "TMPDIR": scratch_dir, **self.config.environment}
        dropped = preload.shell_variables() - set(environment)
        say_dropped(dropped)
        on_cpu = device.accelerator() == "cpu"
        program = preload.Program(
            preload.__name__ if on_cpu else "sglang.launch_server",
            [str(self.config.threads), *words] if on_cpu else words,
            title=f"sglang::server {host}:{self.port}",
            log_file=self.log_file,
            environment=environment,
            without=dropped,
            is_fresh=bool(dropped or self.config.environment),
            blocked_signals=LAUNCHER_SIGNALS,
        )
        pid = preload.start(program).pid
        return Server(
            url=f"http://{f'[{host}]' if ':' in host else host}:{self.port}",
            machine=socket.gethostname(),
            pid=pid,
            start_ticks=start_ticks(pid),
            tensor_parallel_size=num_ranks,
            gpus=list(gpus),
            log_file=str(self.log_file),
            scratch_dir=scratch_dir,
            api_key=self.api_key,
            step_s=self.step_s,
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        """Yield the server once it answers, and end it afterwards.

        Raises:
            ServerFailed: it did not start.
        """
        server = self.start()
        try:
            wait_ready([server], self.config.start_timeout_s)
            yield server
        finally:
            server.stop()

    @cached_property
    def _architecture(self) -> Architecture | None:
        """The model's; None if it has become unreadable: then the server's own log says so."""
        with contextlib.suppress(ArchitectureError):
            return Architecture.from_directory(self.model_dir)
        return None

    @property
    def _token_flops(self) -> float:
        """The FLOPs of a rank for each token of the longest sequence."""
        if self._architecture is None:
            return 0.0
        flops = self._architecture.forward_flops(self.context_length) / self.context_length
        return flops / self.config.tensor_parallel_size

    @property
    def prefill_chunk(self) -> int:
        """The tokens of prompts that a server without a GPU computes at once."""
        least, most = CHUNK_TOKENS
        tokens = min(most, max(least, CHUNK_FLOPS / max(1.0, self._token_flops)))
        page = int(self.config.options.get("page_size", 1))  # SGLang wants a multiple of it
        return math.ceil(2 ** int(math.log2(tokens)) / page) * page

    @property
    def step_s(self) -> float:
        """The longest time, in seconds, for which a server without a GPU computes one batch."""
        if device.accelerator() == "cuda" or self._architecture is None:
            return 0.0
        requests = self.config.max_running_requests
        chunk = int(self.config.options.get("chunked_prefill_size", self.prefill_chunk))
        tokens = max(requests, chunk if chunk > 0 else UNCHUNKED_TOKENS)
        logits = 2.0 * requests * self._architecture.vocab_size * self._architecture.hidden_size
        return (tokens * self._token_flops + logits) / SLOWEST_FLOPS_PER_S

    def options(self) -> dict[str, object]:
        """Return the server's options of `sglang.launch_server`, by name with underscores."""
        config = self.config
        options: dict[str, object] = {
            "model_path": self.model_dir,
            "load_format": "safetensors" if self.loads else "dummy",
            "dtype": "bfloat16",
            "host": self.host,
            "port": self.port,
            "nccl_port": free_port(),
            "tensor_parallel_size": config.tensor_parallel_size,
            "expert_parallel_size": config.expert_parallel_size,
            "enable_return_routed_experts": self.records_routing,
            "mem_fraction_static": config.mem_fraction_static,
            "max_running_requests": config.max_running_requests,
            "context_length": self.context_length + CONTEXT_RESERVE,
            "random_seed": self.seed,
            "weight_version": 0,
            "log_level_http": "warning",
            "grammar_backend": "none",  # no request asks for structured output
            "skip_tokenizer_init": True,  # prompts and completions travel as token ids
            # Like the learner, do not round logits to bfloat16. On a CPU this is also faster.
            "enable_fp32_lm_head": True,
            # FlashInfer's would be compiled in the first request with top_p, which takes minutes.
            # Meanwhile the server does not answer /health, and would be taken for dead.
            "sampling_backend": "pytorch",
        }
        if config.max_total_tokens is not None:
            options["max_total_tokens"] = config.max_total_tokens
        if self.weight_format != "bf16" and not self.loads:  # a quantized directory has its own
            method = options["quantization"] = ENGINE_METHODS[self.weight_format]
            quantization: dict[str, object] = {"quant_method": method}
            if self.keep:
                kept = kept_layers(self.keep, Architecture.from_directory(self.model_dir))
                quantization["modules_to_not_convert"] = layers_of(kept)
            if rank := self.adapters.rank:
                quantization["adapters"] = {"rank": rank, "alpha": self.adapters.alpha}
            if len(quantization) > 1:
                override = {"quantization_config": quantization}
                options["json_model_override_args"] = json.dumps(override)
        if device.accelerator() == "cpu":
            # By default SGLang would fill a fraction of all memory, which others need too.
            requests = config.max_running_requests
            needed = tokens_of_requests(config, self.context_length, requests)
            options["max_total_tokens"] = config.max_total_tokens or needed
            options["mem_fraction_static"] = 1.0
            options["chunked_prefill_size"] = self.prefill_chunk
            options["watchdog_timeout"] = WATCHDOG_S + self.step_s
            if self._architecture and self._architecture.is_hybrid:
                # SGLang's choice on a GPU: completions of one prompt share the prompt's state.
                options["mamba_radix_cache_strategy"] = "extra_buffer"
                # With fewer states SGLang would serve fewer requests at a time.
                states = states_per_request(config, on_gpu=False)
                options["max_mamba_cache_size"] = states * requests
            # Without sleep-on-idle the scheduler polls and takes a core from the learner.
            flags = ("disable_overlap_schedule", "sleep_on_idle")
            options |= {"device": "cpu", **dict.fromkeys(flags, True)}
        else:
            options["enable_memory_saver"] = self.releases is not None
            # This tells `sglang_plugin/memory.py` that the weights stay in a sleeping server.
            options["enable_weights_cpu_backup"] = self.releases == "cache"
            # Every batch is decoded from a graph, and no graph is captured for larger ones.
            options["cuda_graph_max_bs_decode"] = config.max_running_requests
            # Capturing graphs of prefills took 40 of a start's 100 s (7B on an H100). A rollout
            # mostly decodes.
            options["cuda_graph_backend_prefill"] = "disabled"
        if device.lacks_flash_attention():
            options["attention_backend"] = "triton"
        return options

    def environment(self) -> dict[str, str]:
        """Return the environment variables that the server needs."""
        variables = {
            # A crashed server would otherwise diagnose itself for over a minute before it ends.
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
            **preload.ENVIRONMENT,
            # With the reserve the context may exceed the model's positions; no request does.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            # The server asks itself over HTTP, and a proxy could not reach its loopback.
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "*"),
        }
        if self.host == LOOPBACK:
            # Its process groups are on this machine too, and need not listen elsewhere.
            variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        if device.accelerator() == "cpu":
            variables |= {**NO_THREADS, "SGLANG_PLATFORM": preload.PLATFORM}
            # SGLang then calls torch.multinomial, which `sglang_plugin/sampling.py` replaces.
            variables["SGLANG_OPT_USE_GUMBEL_SAMPLE"] = "0"
            num_ranks, cores = self.config.tensor_parallel_size, psutil.cpu_count() or 1
            if num_ranks > 1:  # SGLang requires one core for each rank
                bindings = "|".join(str(rank % cores) for rank in range(num_ranks))
                variables["SGLANG_CPU_OMP_THREADS_BIND"] = bindings
        else:
            variables |= toolkit.environment()
            # DeepGEMM (fp8-block) would compile 16384 kernels for each shape at the first start,
            # which takes 10 to 20 minutes; with this it compiles 3072.
            variables["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] = "1"
        if device.lacks_flash_attention():
            variables["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
        return variables


def say_dropped(names: set[str]) -> None:
    """Print which of the user's variables servers do not get, once for each."""
    if new := names - _said_dropped:
        _said_dropped.update(new)
        print(
            f"qurl: servers do not get {', '.join(sorted(new))} from this shell; to set a variable "
            "in one, give the server's environment.NAME=value",
            file=sys.stderr,
        )


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
