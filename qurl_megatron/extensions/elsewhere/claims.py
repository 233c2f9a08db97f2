"""What a run does with its servers elsewhere: it checks that they fit, and claims them."""

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from qurl_megatron.config.schema import Config
from qurl_megatron.extensions.elsewhere.key import read_key
from qurl_megatron.extensions.elsewhere.servers import (
    Unreachable,
    check_servers,
    release,
    remote_server,
)
from qurl_megatron.rollout.roster import SERVERS_AT, read_set, save_roster
from qurl_megatron.rollout.server import Server


def check(config: Config, *, resumes: bool = False) -> None:
    """Check that every server elsewhere answers, and can sample for the run.

    A run that `resumes`, maybe in a job at night, goes on without the servers that do not answer.
    They are asked again later.

    Raises:
        ConfigError: the first thing that is wrong.
    """

    def go_on(error: Unreachable) -> None:
        print(f"qurl: {error}; the run goes on without it", file=sys.stderr)

    check_servers(config, _key(config), _saved_name(config), go_on if resumes else None)


@contextmanager
def claimed(config: Config) -> Iterator[None]:
    """Claim the servers elsewhere; afterwards, if they answer, they serve other runs.

    Their roster in the run's directory has the name under which the run claims them. A resumed run
    keeps that name.

    Raises:
        ConfigError: the key is missing.
    """
    # The name travels in an HTTP header, which takes ASCII only.
    name = config.run_dir.name.encode("ascii", "backslashreplace").decode()
    run = _saved_name(config) or f"{name}-{secrets.token_hex(4)}"
    key, rollout = _key(config), config.rollout
    servers = [remote_server(url, key, run) for url in rollout.servers_at]
    roster = {"rollout": dict(enumerate(servers, start=rollout.servers))}
    save_roster(config.run_dir / SERVERS_AT, roster)
    try:
        yield
    finally:
        release(servers)


def _saved_name(config: Config) -> str:
    """Return the name under which the run claims its servers; empty before it has begun."""
    saved: list[Server] = [*read_set([config.run_dir / SERVERS_AT], "rollout").values()]
    return saved[0].run if saved else ""


def _key(config: Config) -> str:
    return read_key(config.rollout.servers_key_file, "rollout.servers_key_file")
