"""Random policies of real sizes that fit on one GPU, and servers for them.

A 32B learner with its optimizer needs over 500 GB. The cost of a publish depends only on the
number, shapes and dtype of the shards. `RandomPolicy` has Megatron's shards for an architecture,
with random BF16 values on the device. It stores one layer's weights and yields them for every layer
(976 MB of a 32B model, far more than any GPU cache), so that policy and server fit on one GPU. The
server stores every layer separately.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from qurl_megatron import device
from qurl_megatron.config.schema import ServerConfig, WeightFormat
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model import weight_map
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import Rule
from qurl_megatron.rollout.server import Server, ServerPlan, wait_ready

# Shapes of Qwen2.5: hidden size, intermediate size, layers, heads, key-value heads.
SHAPES = {
    "7B": (3584, 18944, 28, 28, 4),
    "14B": (5120, 13824, 48, 40, 8),
    "32B": (5120, 27648, 64, 40, 8),
    "tiny": (256, 512, 2, 4, 2),
}
VOCABULARY = 152064
START_TIMEOUT_S = 420.0


class RandomPolicy:
    """The weight shards of a learner on one rank, random and without an optimizer."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        self._shards: list[tuple[Rule, Tensor]] = []
        generator = torch.Generator(device=device.device()).manual_seed(0)
        for rule in weight_map.rules(architecture):
            parts = []
            for part in rule.tensors:
                index = weight_map.part_index(rule, part, architecture, 0, 1)
                shape = [run.stop - run.start for run in index]
                random = torch.empty(shape, dtype=torch.bfloat16, device=device.device())
                parts.append(random.normal_(std=0.02, generator=generator))
            self._shards.append((rule, weight_map.merge(rule, parts, architecture, 1)))

    def shards(
        self, *, of_experts: bool | None = None
    ) -> Iterator[tuple[Rule, int | None, Tensor]]:
        """Yield what `Learner.shards` yields: rule, layer number, BF16 weight."""
        for rule, shard in self._shards:
            if of_experts not in (None, rule.of_experts):
                continue
            for layer in range(self.architecture.num_layers) if rule.layered else [None]:
                yield rule, layer, shard


def random_learner(architecture: Architecture) -> Learner:
    """Return a `RandomPolicy` that publishing accepts as a learner.

    The converter reads only `architecture` and `shards()` of a learner.
    """
    return cast(Learner, RandomPolicy(architecture))


@contextmanager
def run_server(
    shape: str, weight_format: WeightFormat, server: ServerConfig, context_length: int, log: Path
) -> Iterator[tuple[Server, Architecture]]:
    """Start a server of this shape from a config.json without weights; stop it at the end."""
    from transformers import Qwen2Config

    hidden, intermediate, layers, heads, key_value_heads = SHAPES[shape]
    with tempfile.TemporaryDirectory() as directory:
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
        running = ServerPlan(
            Path(directory),
            server,
            weight_format,
            context_length=context_length,
            log_file=log,
            seed=0,
        ).start()
        try:
            wait_ready([running], START_TIMEOUT_S)
            yield running, Architecture.from_directory(directory)
        finally:
            running.stop()
