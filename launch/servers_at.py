"""The servers of `rollout.servers_at`, which somebody has started elsewhere, and their key."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.rollout.elsewhere import Unreachable, check_servers, release, remote_server
from qurl_megatron.rollout.roster import SERVERS_AT, read_set, save_roster
from qurl_megatron.rollout.server import Server

KEY_VARIABLE = "QURL_SERVERS_KEY"
HOW_TO_MAKE_A_KEY = "make one with: (umask 077; openssl rand -hex 32 > qurl.key)"


def read_key(key_file: str, field: str) -> str:
    """Return the key that a run and its servers elsewhere share.

    Args:
        key_file: the file that holds it; empty: the variable QURL_SERVERS_KEY does.
        field: the field that names the file, for messages.

    Raises:
        ConfigError: there is no key, others can read its file, or it is none.
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
    # SGLang would take a dash at its start for an option.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.~+/=-]{15,511}", key):
        raise ConfigError(
            f"{source}: a key has 16 to 512 letters, digits and _.~+/=-, and begins with a letter "
            f"or digit; {HOW_TO_MAKE_A_KEY}"
        )
    return key


def check_servers_at(config: Config, *, resumes: bool = False) -> None:
    """Check that every server elsewhere answers, and can sample for the run.

    A run that `resumes`, maybe in a job at night, goes on without those that do not answer. They
    are asked again later.

    Raises:
        ConfigError: the first thing that is wrong.
    """

    def go_on(error: Unreachable) -> None:
        print(f"qurl: {error}; the run goes on without it", file=sys.stderr)

    if config.rollout.servers_at:
        check_servers(config, _key(config), _saved_name(config), go_on if resumes else None)


def save_servers_at(config: Config) -> None:
    """Write the roster of the servers elsewhere into the run's directory, if there are any.

    It has the name under which the run claims them, which stays the same when the run resumes.

    Raises:
        ConfigError: the key is missing.
    """
    path, rollout = config.run_dir / SERVERS_AT, config.rollout
    # It travels in an HTTP header, which takes ASCII only.
    name = config.run_dir.name.encode("ascii", "backslashreplace").decode()
    run = _saved_name(config) or f"{name}-{secrets.token_hex(4)}"
    path.unlink(missing_ok=True)  # an earlier start may have had other servers
    if rollout.servers_at:
        key = _key(config)
        servers = [remote_server(url, key, run) for url in rollout.servers_at]
        save_roster(path, {"rollout": dict(enumerate(servers, start=rollout.servers))})


def release_servers_at(config: Config) -> None:
    """Let the servers elsewhere serve other runs: this one has ended, or will resume."""
    if servers := _saved(config):
        with ThreadPoolExecutor(len(servers)) as threads:  # some may not answer
            threads.map(release, servers)


def _saved(config: Config) -> list[Server]:
    """Return the servers of the roster that `save_servers_at` wrote, if it did."""
    return list(read_set([config.run_dir / SERVERS_AT], "rollout").values())


def _saved_name(config: Config) -> str:
    """Return the name under which the run claims its servers; empty before it has begun."""
    return next((server.run for server in _saved(config)), "")


def _key(config: Config) -> str:
    return read_key(config.rollout.servers_key_file, "rollout.servers_key_file")
