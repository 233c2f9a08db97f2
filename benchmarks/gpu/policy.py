"""Servers of policies of real sizes, whose weights `benchmarks/shards.py` has on the same GPU."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qurl_megatron.config.schema import ServerConfig, WeightFormat
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.rollout.server import Server, ServerPlan

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
        plan = ServerPlan(
            Path(directory), server, weight_format, context_length, log, seed=0, gpus=gpus
        )
        with plan.running() as running:
            yield running, Architecture.from_directory(directory)


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
