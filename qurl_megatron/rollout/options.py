"""Options of SGLang's own, as a user gives them: check their values, and pass them on.

SGLang's argument parser knows their values, but importing it takes seconds. A process of its own
does it, and only if a run gives any options.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping

from qurl_megatron.config.schema import ConfigError, ServerConfig
from qurl_megatron.config.values import OptionValue


def command_line(options: Mapping[str, object]) -> list[str]:
    """Return options, by name with underscores, as words of a command line.

    True is a flag that is given, False one that is not. A value is in the word of its option, so
    that it may begin with a dash. Only the path of a configuration file is a word of its own,
    because SGLang does not find it otherwise.
    """
    words = []
    for name, value in options.items():
        flag = flag_of(name)
        if value is True:
            words.append(flag)
        elif value is not False:
            words += [flag, str(value)] if name == "config" else [f"{flag}={value}"]
    return words


def flag_of(name: str) -> str:
    """Return an option as the command line has it."""
    return f"--{name.replace('_', '-')}"


def check_options(servers: Mapping[str, ServerConfig]) -> None:
    """Check that SGLang takes the values of the servers' options, which `check_names` has passed.

    `servers` are given by their section in error messages, such as `rollout.server`.

    Raises:
        ConfigError: the first value that SGLang does not take.
        RuntimeError: SGLang could not be imported.
    """
    options = {section: server.options for section, server in servers.items() if server.options}
    if not options:
        return
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(options)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"SGLang's options could not be read:\n{done.stderr}")
    if error := json.loads(done.stdout.splitlines()[-1]):
        raise ConfigError(error)


def first_error(options: Mapping[str, Mapping[str, OptionValue]]) -> str | None:
    """Return what is wrong with the first wrong value, given by section and name, on one line."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    for section, named in options.items():
        for name, value in named.items():
            if error := _error(parser, name, value):
                return f"{section}.options.{name}={value}: {error}"
    return None


def _error(parser: argparse.ArgumentParser, name: str, value: OptionValue) -> str | None:
    is_flag = parser._option_string_actions[flag_of(name)].nargs == 0
    if is_flag != isinstance(value, bool):
        return "takes true or false" if is_flag else "takes a value, not true or false"
    try:
        parser.parse_args(["--model-path", "unused", *command_line({name: value})])
    except argparse.ArgumentError as error:
        return str(error.message)
    return None


if __name__ == "__main__":
    print(json.dumps(first_error(json.loads(sys.argv[1]))))
