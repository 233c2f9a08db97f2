"""Servers that somebody starts elsewhere: `qurl serve`, their key, and the runs that use them.

`qurl serve` starts one, with random weights. A run that lists its URL in `rollout.servers_at`, and
has the same key, sends it the current weights.
"""

import dataclasses
import os
import re
import secrets
import shlex
import socket
import stat
import sys
import time
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from qurl_megatron.config.keep import kept_layers
from qurl_megatron.config.schema import (
    Config,
    ConfigError,
    FormatName,
    ServerConfig,
    WeightFormat,
    with_group_size,
)
from qurl_megatron.config.validate import check_group_size, validate_server
from qurl_megatron.config.values import Count, GroupSize, Place, Seed, Text
from qurl_megatron.files import check_output
from qurl_megatron.memory.host import ServerSet, settle_caches
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.process import free_port
from qurl_megatron.rollout.preload import how_it_ended
from qurl_megatron.rollout.roster import SERVERS_AT, read_set, save_roster
from qurl_megatron.rollout.server import LOOPBACK, POLL_S, Server, ServerPlan
from qurl_megatron.weight_sync.elsewhere.servers import (
    Unreachable,
    check_servers,
    release,
    remote_server,
)

EVERYWHERE = ("0.0.0.0", "::")
KEY_VARIABLE = "QURL_SERVERS_KEY"
HOW_TO_MAKE_A_KEY = "make one with: (umask 077; openssl rand -hex 32 > qurl.key)"


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
    plan = ServerPlan(
        Path(config.model).absolute(),
        config.server,
        config.weight_format,
        context_length=config.max_length,
        log_file=log_file,
        seed=config.seed,
        keep=config.keep,
        records_routing=config.records_routing,
        host=config.host,
        port=config.port or free_port(),
        api_key=key,
    )
    print(
        f"starting a server of {config.model} in {config.weight_format}, log {log_file}", flush=True
    )
    with plan.running() as server:
        url = server.url
        if config.host in EVERYWHERE:
            url = f"http://{socket.gethostname()}:{plan.port}"
        print(f"ready: rollout.servers_at=[{url}]", flush=True)
        while server.alive():
            time.sleep(POLL_S)
        print(f"qurl: {server.failed(f'ended ({how_it_ended(server.pid)})')}", file=sys.stderr)
        return 1


def _check(config: ServeConfig) -> None:
    architecture = Architecture.from_directory(config.model)
    if config.max_length > architecture.max_position_embeddings:
        raise ConfigError(
            f"max_length={config.max_length}: the model has "
            f"{architecture.max_position_embeddings} positions; give at most those"
        )
    check_group_size(config.format, config.group_size, "group_size=")
    validate_server("server", config.server, architecture, config.weight_format, config.max_length)
    kept_layers(config.keep, architecture, "keep")
    of_model = architecture, config.weight_format, config.max_length, config.keep
    for line in settle_caches([ServerSet(config.server, *of_model, length_field="max_length")]):
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


def read_key(key_file: str, field: str) -> str:
    """Return the key that a run and its servers elsewhere share.

    Args:
        key_file: the file that holds it; empty: the variable QURL_SERVERS_KEY holds it.
        field: the field that names the file, for messages.

    Raises:
        ConfigError: there is no key, others can read its file, or it has another form.
    """
    if key_file:
        path = Path(key_file)
        if not path.is_file():
            raise ConfigError(f"{field}={key_file}: no such file; {HOW_TO_MAKE_A_KEY}")
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"{field}={key_file}: others can read it; chmod 600 {shlex.quote(key_file)}"
            )
        key, source = path.read_text(errors="replace").strip(), f"{field}={key_file}"
    else:
        key, source = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
        if not key:
            raise ConfigError(
                f"{field}: missing; servers elsewhere need a key, in a file or in {KEY_VARIABLE}; "
                f"{HOW_TO_MAKE_A_KEY}"
            )
    # SGLang would take a key that begins with a dash for an option.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.~+/=-]{15,511}", key):
        raise ConfigError(
            f"{source}: a key has 16 to 512 letters, digits and _.~+/=-, and begins with a letter "
            f"or digit; {HOW_TO_MAKE_A_KEY}"
        )
    return key


def check_servers_at(config: Config, *, resumes: bool = False) -> None:
    """Check that every server elsewhere answers, and can sample for the run.

    A run that `resumes`, maybe in a job at night, goes on without the servers that do not answer.
    They are asked again later.

    Raises:
        ConfigError: the first thing that is wrong.
    """

    def go_on(error: Unreachable) -> None:
        print(f"qurl: {error}; the run goes on without it", file=sys.stderr)

    if config.rollout.servers_at:
        check_servers(config, _key(config), _saved_name(config), go_on if resumes else None)


def save_servers_at(config: Config) -> None:
    """Write the roster of the servers elsewhere into the run's directory, if there are any.

    The roster has the name under which the run claims them. A resumed run keeps that name.

    Raises:
        ConfigError: the key is missing.
    """
    path, rollout = config.run_dir / SERVERS_AT, config.rollout
    # The name travels in an HTTP header, which takes ASCII only.
    name = config.run_dir.name.encode("ascii", "backslashreplace").decode()
    run = _saved_name(config) or f"{name}-{secrets.token_hex(4)}"
    path.unlink(missing_ok=True)  # an earlier start may have had other servers
    if rollout.servers_at:
        key = _key(config)
        servers = [remote_server(url, key, run) for url in rollout.servers_at]
        save_roster(path, {"rollout": dict(enumerate(servers, start=rollout.servers))})


def release_servers_at(config: Config) -> None:
    """Let the servers elsewhere serve other runs: this one has ended, or will resume."""
    release(_saved(config))


def _saved(config: Config) -> list[Server]:
    """Return the servers of the roster that `save_servers_at` wrote, if it did."""
    return list(read_set([config.run_dir / SERVERS_AT], "rollout").values())


def _saved_name(config: Config) -> str:
    """Return the name under which the run claims its servers; empty before it has begun."""
    return next((server.run for server in _saved(config)), "")


def _key(config: Config) -> str:
    return read_key(config.rollout.servers_key_file, "rollout.servers_key_file")
