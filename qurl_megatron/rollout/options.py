"""Options of SGLang's own, as a user gives them: check them, and pass them on.

SGLang's argument parser knows its options, but importing it takes seconds. A process of its own
does it, and only if a run gives any options.
"""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from qurl_megatron import device
from qurl_megatron.config.schema import ConfigError, ServerConfig
from qurl_megatron.config.server_options import refusal
from qurl_megatron.config.values import OptionValue


def command_line(options: Mapping[str, object]) -> list[str]:
    """Return options, by name with underscores, as words of a command line.

    True is a flag that is given, False one that is not. A value is in the word of its option, so
    that it may begin with a dash. SGLang finds its configuration file in a word of its own only.
    """
    words = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, str(value)] if name == "config" else [f"{flag}={value}"]
    return words


def check_options(servers: Mapping[str, ServerConfig]) -> None:
    """Check that SGLang has every option that the servers are given, and takes its value.

    `servers` are given by their section in error messages, such as `rollout.server`.

    Raises:
        ConfigError: the first option that SGLang does not take.
        RuntimeError: SGLang could not be imported.
    """
    options = {section: server.options for section, server in servers.items() if server.options}
    if not options:
        return
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(options)],
        env=device.child_environment({}),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"SGLang's options could not be read:\n{done.stderr}")
    if error := json.loads(done.stdout.splitlines()[-1]):
        raise ConfigError(error)


def first_error(options: Mapping[str, Mapping[str, OptionValue]]) -> str | None:
    """Return what is wrong with the first wrong option, given by section and name, on one line."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    actions = {
        flag.lstrip("-").replace("-", "_"): action
        for action in parser._actions
        for flag in action.option_strings
    }
    for section, named in options.items():
        for name, value in named.items():
            if error := _error(parser, actions, name, value):
                return f"{section}.options.{name}={value}: {error}"
    return None


def _error(
    parser: argparse.ArgumentParser, actions: dict[str, Any], name: str, value: OptionValue
) -> str | None:
    if name not in actions:
        close = [n for n in difflib.get_close_matches(name, actions, n=3) if not refusal(n)]
        suggestion = f"; did you mean {' or '.join(close)}?" if close else ""
        return f"SGLang has no such option{suggestion}"
    if reason := refusal(actions[name].dest):  # the name is another one of a refused option's
        return f"refused, because {reason}"
    is_flag = actions[name].nargs == 0
    if is_flag != isinstance(value, bool):
        return "takes true or false" if is_flag else "takes a value, not true or false"
    try:
        parser.parse_args(["--model-path", "unused", *command_line({name: value})])
    except argparse.ArgumentError as error:
        return str(error.message)
    return None


if __name__ == "__main__":
    print(json.dumps(first_error(json.loads(sys.argv[1]))))
