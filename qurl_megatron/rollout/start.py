"""Start SGLang servers.

A server starts in the background, and dies with the process that has started it.
"""

import contextlib
import json
import math
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from qurl_megatron import device
from qurl_megatron.config.keep import kept_layers, layers_of
from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.server_options import (
    CONTEXT_RESERVE,
    command_line,
    states_per_request,
    tokens_of_requests,
)
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.config.validate import check_weight_format
from qurl_megatron.files import write_whole
from qurl_megatron.machine.environment import NO_THREADS, scratch_directory
from qurl_megatron.machine.network import free_port, make_key
from qurl_megatron.machine.processes import LAUNCHER_SIGNALS, start_ticks
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.huggingface import served_directory
from qurl_megatron.quantization.quantize import ENGINE_METHODS
from qurl_megatron.rollout import preload
from qurl_megatron.rollout.server import LOOPBACK, Server, locks, wait_ready

_said_dropped: set[str] = set()

# A server answers nothing, not even /health, before it has computed a chunk of prompts. Without a
# GPU a chunk has so many FLOPs, for which an idle core with AVX2 takes two seconds.
CHUNK_FLOPS = 1e11
CHUNK_TOKENS = 64, 4096  # smaller ones waste time; SGLang's own are not larger
UNCHUNKED_TOKENS = 2**14  # SGLang's limit of a batch of whole prompts
SLOWEST_FLOPS_PER_S = 2.5e9  # of a core that others use as well: 5 % of an idle one's
WATCHDOG_S = 300.0  # SGLang's own; after a longer step a server ends itself


def start(
    spec: ServerSpec,
    log_file: Path,
    *,
    seed: int,
    host: str = LOOPBACK,
    port: int = 0,
    api_key: str = "",
    gpus: Sequence[int] | None = None,
) -> Server:
    """Start a server in the background and return at once; `wait_ready` waits for it.

    Args:
        host, port: where it listens; 0: at a free port.
        api_key: which every request needs; empty: a new one.
        gpus: consecutive GPUs of this machine, one per tensor-parallel rank; None: the first ones.

    Raises:
        ConfigError: the GPUs cannot be used or do not support its weight format, or a compiler
            of kernels is missing.
    """
    if problem := device.unusable_gpus():
        raise ConfigError(problem)
    check_weight_format(spec.weight_format, device.capabilities())
    config, num_ranks = spec.server, spec.server.tensor_parallel_size
    port, api_key = port or free_port(), api_key or make_key()
    if gpus is None:
        gpus = range(min(num_ranks, device.num_gpus()))
    needed = environment(spec, host)  # first, because it may raise
    scratch_dir, lock = scratch_directory("qurl-server-")
    locks[scratch_dir] = lock
    chosen = options(spec, seed=seed, host=host, port=port)
    if not spec.loads or spec.weight_format == "bf16":  # else it was written for servers
        with contextlib.suppress(ArchitectureError):  # it has become unreadable, as the log says
            chosen["model_path"] = served_directory(spec.model, Path(scratch_dir) / "model")
    if gpus:
        chosen["base_gpu_id"] = gpus[0]
    key_file = Path(scratch_dir) / "key.yaml"
    write_whole(key_file, f"api-key: {json.dumps(api_key)}\n", private=True)
    chosen["config"] = key_file
    words = command_line({**chosen, **config.options})
    variables = {**needed, "TMPDIR": scratch_dir, **config.environment}
    dropped = preload.shell_variables() - set(variables)
    say_dropped(dropped)
    on_cpu = device.accelerator() == "cpu"
    program = preload.Program(
        preload.__name__ if on_cpu else "sglang.launch_server",
        [str(config.threads), *words] if on_cpu else words,
        title=f"sglang::server {host}:{port}",
        log_file=log_file,
        environment=variables,
        without=dropped,
        is_fresh=bool(dropped or config.environment),
        blocked_signals=LAUNCHER_SIGNALS,
    )
    pid = preload.start(program).pid
    return Server(
        url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
        machine=socket.gethostname(),
        pid=pid,
        start_ticks=start_ticks(pid),
        tensor_parallel_size=num_ranks,
        gpus=list(gpus),
        log_file=str(log_file),
        scratch_dir=scratch_dir,
        api_key=api_key,
        step_s=step_s(spec),
    )


@contextlib.contextmanager
def running(spec: ServerSpec, log_file: Path, **place: Any) -> Iterator[Server]:
    """Start a server as `start` does, yield it once it answers, and end it afterwards.

    Raises:
        ServerFailed: it did not start.
    """
    server = start(spec, log_file, **place)
    try:
        wait_ready([server], spec.server.start_timeout_s)
        yield server
    finally:
        server.stop()


def _architecture(spec: ServerSpec) -> Architecture | None:
    """Return the model's; None if it has become unreadable: then the server's log says so."""
    with contextlib.suppress(ArchitectureError):
        return spec.architecture
    return None


def token_flops(spec: ServerSpec) -> float:
    """Return the FLOPs of a rank for each token of the longest sequence."""
    architecture = _architecture(spec)
    if architecture is None:
        return 0.0
    flops = architecture.forward_flops(spec.context_length) / spec.context_length
    return flops / spec.server.tensor_parallel_size


def prefill_chunk(spec: ServerSpec) -> int:
    """Return the tokens of prompts that a server without a GPU computes at once."""
    least, most = CHUNK_TOKENS
    tokens = min(most, max(least, CHUNK_FLOPS / max(1.0, token_flops(spec))))
    page = int(spec.server.options.get("page_size", 1))  # SGLang wants a multiple of it
    return math.ceil(2 ** int(math.log2(tokens)) / page) * page


def step_s(spec: ServerSpec) -> float:
    """Return the longest time, in seconds, for which a server without a GPU computes one batch."""
    architecture = _architecture(spec)
    if device.accelerator() == "cuda" or architecture is None:
        return 0.0
    requests = spec.server.max_running_requests
    chunk = int(spec.server.options.get("chunked_prefill_size", prefill_chunk(spec)))
    tokens = max(requests, chunk if chunk > 0 else UNCHUNKED_TOKENS)
    logits = 2.0 * requests * architecture.vocab_size * architecture.hidden_size
    return (tokens * token_flops(spec) + logits) / SLOWEST_FLOPS_PER_S


def options(
    spec: ServerSpec, *, seed: int, host: str = LOOPBACK, port: int = 0
) -> dict[str, object]:
    """Return the server's options of `sglang.launch_server`, by name with underscores."""
    config, architecture = spec.server, _architecture(spec)
    options: dict[str, object] = {
        "model_path": spec.model,
        "load_format": "safetensors" if spec.loads else "dummy",
        "dtype": "bfloat16",
        "host": host,
        "port": port,
        "nccl_port": free_port(),
        "tensor_parallel_size": config.tensor_parallel_size,
        "expert_parallel_size": config.expert_parallel_size,
        "enable_return_routed_experts": spec.records_routing,
        "mem_fraction_static": config.mem_fraction_static,
        "max_running_requests": config.max_running_requests,
        "context_length": spec.context_length + CONTEXT_RESERVE,
        "random_seed": seed,
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
    if spec.weight_format != "bf16" and not spec.loads:  # a quantized directory has its own
        method = options["quantization"] = ENGINE_METHODS[spec.weight_format]
        quantization: dict[str, object] = {"quant_method": method}
        if spec.keep:
            kept = kept_layers(spec.keep, spec.architecture)
            quantization["modules_to_not_convert"] = layers_of(kept)
        if rank := spec.adapters.rank:
            quantization["adapters"] = {"rank": rank, "alpha": spec.adapters.alpha}
        if len(quantization) > 1:
            override = {"quantization_config": quantization}
            options["json_model_override_args"] = json.dumps(override)
    if device.accelerator() == "cpu":
        # By default SGLang would fill a fraction of all memory, which others need too.
        requests = config.max_running_requests
        needed = tokens_of_requests(config, spec.context_length, requests)
        options["max_total_tokens"] = config.max_total_tokens or needed
        options["mem_fraction_static"] = 1.0
        options["chunked_prefill_size"] = prefill_chunk(spec)
        options["watchdog_timeout"] = WATCHDOG_S + step_s(spec)
        if architecture and architecture.is_hybrid:
            # SGLang's choice on a GPU: completions of one prompt share the prompt's state.
            options["mamba_radix_cache_strategy"] = "extra_buffer"
            # With fewer states SGLang would serve fewer requests at a time.
            states = states_per_request(config, on_gpu=False)
            options["max_mamba_cache_size"] = states * requests
        # Without sleep-on-idle the scheduler polls and takes a core from the learner.
        flags = ("disable_overlap_schedule", "sleep_on_idle")
        options |= {"device": "cpu", **dict.fromkeys(flags, True)}
    else:
        options["enable_memory_saver"] = spec.releases is not None
        # This tells `sglang_plugin/memory.py` that the weights stay in a sleeping server.
        options["enable_weights_cpu_backup"] = spec.releases == "cache"
        # Every batch is decoded from a graph, and no graph is captured for larger ones.
        options["cuda_graph_max_bs_decode"] = config.max_running_requests
        # Capturing graphs of prefills took 40 of a start's 100 s (7B on an H100). A rollout
        # mostly decodes.
        options["cuda_graph_backend_prefill"] = "disabled"
    return options


def environment(spec: ServerSpec, host: str = LOOPBACK) -> dict[str, str]:
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
    if host == LOOPBACK:
        # Its process groups are on this machine too, and need not listen elsewhere.
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if device.accelerator() == "cpu":
        variables |= {**NO_THREADS, "SGLANG_PLATFORM": preload.PLATFORM}
        # SGLang then calls torch.multinomial, which `sglang_plugin/sampling.py` replaces.
        variables["SGLANG_OPT_USE_GUMBEL_SAMPLE"] = "0"
        num_ranks, cores = spec.server.tensor_parallel_size, psutil.cpu_count() or 1
        if num_ranks > 1:  # SGLang requires one core for each rank
            bindings = "|".join(str(rank % cores) for rank in range(num_ranks))
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = bindings
    else:
        from qurl_megatron.rollout import toolkit

        variables |= toolkit.environment()
        # DeepGEMM (fp8-block) would compile 16384 kernels for each shape at the first start,
        # which takes 10 to 20 minutes; with this it compiles 3072.
        variables["SGLANG_JIT_DEEPGEMM_FAST_WARMUP"] = "1"
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
