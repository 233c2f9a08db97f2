"""The servers that a run asks for."""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from qurl_megatron.config.schema import (
    AdaptersConfig,
    Config,
    Releases,
    ServerConfig,
    WeightFormat,
)
from qurl_megatron.model.architecture import Architecture


@dataclasses.dataclass(frozen=True)
class ServerSpec:
    """A server that is asked for, before it has a place."""

    model: Path  # Hugging Face directory with configuration and tokenizer
    server: ServerConfig
    weight_format: WeightFormat
    context_length: int  # maximum prompt plus completion length, in tokens
    keep: Sequence[str] = ()  # the layers that stay in BF16, as in `quantization.keep`
    adapters: AdaptersConfig = dataclasses.field(default_factory=AdaptersConfig)
    # Load the model's weights, which are in `weight_format`. Otherwise the server has random
    # weights until the first publish.
    loads: bool = False
    releases: Releases | None = None  # what it gives back while it sleeps; None: it never does
    records_routing: bool = False  # answer with the experts chosen, if a request asks for them
    set_name: str = ""  # rollout or evaluation; empty: of no run
    index: int = 0  # within its set

    @cached_property
    def architecture(self) -> Architecture:
        """The model's.

        Raises:
            ArchitectureError: it is unreadable, or not supported.
        """
        return Architecture.from_directory(self.model)


def server_specs(config: Config) -> list[ServerSpec]:
    """Return all servers of a run: the rollout servers in order, then the evaluation server."""
    rollout = config.rollout
    sets = [("rollout", rollout.server, config.quantization, rollout.servers)]
    if config.evaluation.enabled:
        held = config.evaluation_quantization
        sets.append(("evaluation", config.evaluation.server, held, 1))
    return [
        ServerSpec(
            Path(config.model),
            server,
            weights.weight_format,
            rollout.max_length,
            tuple(weights.keep),
            adapters=config.adapters if weights.weight_format != "bf16" else AdaptersConfig(),
            releases=server.releases if rollout.placement == "colocated" else None,
            records_routing=name == "rollout" and rollout.routing != "ignore",
            set_name=name,
            index=index,
        )
        for name, server, weights, number in sets
        for index in range(number)
    ]
