"""A server for runs on other machines: `qurl serve`.

It starts with random weights. A run that lists its URL in `rollout.servers_at`, and has the same
key, sends it the current weights.
"""

import dataclasses
import socket
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from qurl_megatron.config.keep import kept_layers
from qurl_megatron.config.schema import (
    ConfigError,
    FormatName,
    ServerConfig,
    WeightFormat,
    with_group_size,
)
from qurl_megatron.config.servers import ServerSpec
from qurl_megatron.config.validate import check_group_size, validate_server
from qurl_megatron.config.values import Count, GroupSize, Place, Seed, Text
from qurl_megatron.extensions.elsewhere.key import read_key
from qurl_megatron.files import check_output
from qurl_megatron.machine.network import free_port
from qurl_megatron.memory.host import settle_caches
from qurl_megatron.model.architecture import trainable
from qurl_megatron.rollout.preload import how_it_ended
from qurl_megatron.rollout.server import LOOPBACK, POLL_S
from qurl_megatron.rollout.start import running

EVERYWHERE = ("0.0.0.0", "::")


@dataclasses.dataclass
class ServeConfig:
    """The settings of `qurl serve`."""

    model: Place = ""
    """Hugging Face directory with the configuration and tokenizer of the run's model. Its weights
    are not read."""

    format: FormatName = "int8"
    """Weight format: the run's `quantization.format`."""

    group_size: GroupSize = 128
    """Input channels that share a scale in format int4: the run's `quantization.group_size`."""

    max_length: Count = 2048
    """Maximum prompt plus completion length, in tokens; at least the run's."""

    host: Text = LOOPBACK
    """Address to listen on; 0.0.0.0 listens on all. Behind an SSH tunnel or a proxy for HTTPS on
    this machine, loopback is right."""

    port: Annotated[int, Ge(0), Le(65535)] = 0
    """Port to listen on. 0: a free one."""

    key_file: Place = ""
    """File with the key that every request needs. Empty: the variable QURL_SERVERS_KEY."""

    log_file: Place = "server.log"
    """Log of the server."""

    seed: Seed = 0
    """Seed of sampling; each server of a run needs another one."""

    server: ServerConfig = dataclasses.field(default_factory=ServerConfig)
    """The SGLang server."""

    keep: list[Text] = dataclasses.field(default_factory=list)
    """Linear layers that stay in BF16: the run's `quantization.keep`."""

    records_routing: bool = False
    """Mixture of experts: record the experts that are chosen for each token. A run whose
    `rollout.routing` is compare or replay needs that."""

    @property
    def weight_format(self) -> WeightFormat:
        """The format and its group size."""
        return with_group_size(self.format, self.group_size)

    @property
    def server_spec(self) -> ServerSpec:
        """The server."""
        return ServerSpec(
            Path(self.model).absolute(),
            self.server,
            self.weight_format,
            self.max_length,
            self.keep,
            records_routing=self.records_routing,
        )


def run(config: ServeConfig) -> int:
    """Serve until a signal ends it; return the exit code: 1 if the server ended by itself.

    Raises:
        ConfigError, ArchitectureError: an input is wrong; the server is not started.
        ServerFailed: the server did not start.
    """
    key = read_key(config.key_file, "key_file")
    _check(config)
    log_file = Path(config.log_file)
    check_output(log_file)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log_file.open("wb").close()  # what cannot be written is refused before anything starts
    spec, port = config.server_spec, config.port or free_port()
    print(
        f"starting a server of {config.model} in {config.weight_format}, log {log_file}", flush=True
    )
    place: dict[str, Any] = {"host": config.host, "port": port, "api_key": key}
    with running(spec, log_file, seed=config.seed, **place) as server:
        url = server.url
        if config.host in EVERYWHERE:
            url = f"http://{socket.gethostname()}:{port}"
        print(f"ready: rollout.servers_at=[{url}]", flush=True)
        while server.alive():
            time.sleep(POLL_S)
        print(f"qurl: {server.failed(f'ended ({how_it_ended(server.pid)})')}", file=sys.stderr)
        return 1


def _check(config: ServeConfig) -> None:
    architecture = trainable(Path(config.model))
    if config.max_length > architecture.max_position_embeddings:
        raise ConfigError(
            f"max_length={config.max_length}: the model has "
            f"{architecture.max_position_embeddings} positions; give at most those"
        )
    check_group_size(config.format, config.group_size, "group_size=")
    validate_server("server", config.server, architecture, config.weight_format, config.max_length)
    kept_layers(config.keep, architecture, "keep")
    for line in settle_caches([config.server_spec], length_field="max_length"):
        print(f"qurl: {line}", file=sys.stderr)
    if config.records_routing and not architecture.num_experts:
        raise ConfigError("records_routing=True: the model has no experts; leave it out")
    if not config.host:
        raise ConfigError("host=: missing; give an address, or 0.0.0.0 to listen on all")
    with socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except (OSError, TypeError) as error:  # TypeError: the host is not a hostname
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"host={config.host} port={config.port}: cannot listen there: {why}"
            ) from None
