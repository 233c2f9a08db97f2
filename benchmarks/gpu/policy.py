"""Servers of real sizes, whose weights `benchmarks/shards.py` holds on the same GPU."""

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from qurl_megatron import device
from qurl_megatron.config.schema import ServerConfig, WeightFormat
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.learner.cpu_runtime import megatron_runtime
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.rollout.server import Server
from qurl_megatron.rollout.start import running

# Shapes of Qwen2.5: hidden size, intermediate size, layers, heads, key-value heads.
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "7B": (3584, 18944, 28, 28, 4),
    "14B": (5120, 13824, 48, 40, 8),
    "32B": (5120, 27648, 64, 40, 8),
    "tiny": (256, 512, 2, 4, 2),
}
VOCABULARY = 152064


@contextmanager
def run_server(
    shape: str,
    weight_format: WeightFormat,
    server: ServerConfig,
    context_length: int,
    log: Path,
    gpus: Sequence[int] | None = None,
) -> Iterator[tuple[Server, Architecture]]:
    """Start a server of this shape from a config.json without weights; stop it at the end."""
    with tempfile.TemporaryDirectory() as directory:
        write_config(shape, Path(directory))
        spec = ServerSpec(Path(directory), server, weight_format, context_length)
        with running(spec, log, seed=0, gpus=gpus) as started:
            yield started, Architecture.from_directory(directory)


def write_config(shape: str, directory: Path) -> None:
    """Write the config.json of this shape."""
    from transformers import Qwen2Config

    hidden, intermediate, layers, heads, key_value_heads = SHAPES[shape]
    Qwen2Config(
        vocab_size=512 if shape == "tiny" else VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(directory)


def initialize_single_rank() -> None:
    """Initialize torch.distributed and Megatron in this process, as the only learner rank."""
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    device.initialize_distributed()
    with megatron_runtime():
        parallel_state.initialize_model_parallel(1, create_gloo_process_groups=False)


def sample(
    server: Server, batch: int, prompt_length: int, output_length: int, vocabulary: int
) -> None:
    """Send one batch in one request. Prompts are random, so that the prefix cache holds none.

    Raises:
        RuntimeError: a completion has the wrong length, so that the rate would be wrong.
    """
    generator = random.Random(time.time_ns())
    prompts = [
        [generator.randrange(1, vocabulary) for _ in range(prompt_length)] for _ in range(batch)
    ]
    body = {
        "input_ids": prompts,
        "sampling_params": {
            "temperature": 1.0,
            "max_new_tokens": output_length,
            "ignore_eos": True,
        },
    }
    response = httpx.post(
        f"{server.url}/generate", json=body, headers=server.headers, timeout=None
    ).raise_for_status()
    lengths = [len(answer["output_ids"]) for answer in response.json()]
    if lengths != [output_length] * batch:
        raise RuntimeError(
            f"{server.url}: expected {batch} x {output_length} tokens, got {lengths}"
        )
