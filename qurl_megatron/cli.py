"""The `qurl` command: a table of its commands, whose functions are in `qurl_megatron/commands/`.

A function is imported when its command is called, and imports what it needs only then, so that
`qurl train` does not read what `qurl plan` does. Wrong input ends a command with one line and exit
code 2 before anything starts.
"""

import inspect
import locale
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from qurl_megatron.commands.command import Command
from qurl_megatron.config import extensions
from qurl_megatron.machine.environment import settle_environment
from qurl_megatron.machine.processes import ended_by, ending_signals

# Set before torch, transformers or SGLang are imported: keeps their warnings out of the output.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# In the order of `qurl --help`. A function that yields its number of GPUs can be a Slurm job.
COMMANDS = {
    "doctor": "commands.doctor:doctor",
    "config": "commands.runs:config",
    "train": "commands.runs:train",
    "resume": "commands.runs:resume",
    "launch": "commands.jobs:launch",
    "status": "commands.watch:status",
    "logs": "commands.watch:logs",
    "export": "commands.models:export",
    "eval": "commands.models:evaluate",
    "quantize": "commands.models:quantize",
    "uaq": "commands.models:uaq",
    **{
        name: f"extensions.{extension}.command:{name}"
        for name, extension in extensions.COMMANDS.items()
        if extensions.is_there(extension)
    },
}


class _Commands(Mapping[str, TyperCommand]):
    """The commands by name; each is made of its function when it is asked for."""

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __getitem__(self, name: str) -> Any:
        function = resolve_name(f"qurl_megatron.{COMMANDS[name]}")
        is_job = inspect.isgeneratorfunction(function)
        kind = resolve_name("qurl_megatron.commands.jobs:JobCommand") if is_job else Command
        only = typer.Typer(add_completion=False)
        only.command(name, cls=kind)(function)
        return typer.main.get_command(only)


class _Group(TyperGroup):
    """What `qurl` alone is."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        print(f"qurl-megatron {version('qurl-megatron')}")
        raise typer.Exit


@app.callback()
def qurl(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run reinforcement learning with quantized rollouts on Megatron-core and SGLang."""


command = typer.main.get_command(app)


def main() -> None:
    """Run the command. A signal ends it with a line and a code; a launcher has its own handlers."""
    is_utf8 = sys.flags.utf8_mode or locale.getencoding().lower() == "utf-8"
    if not is_utf8 and os.environ.get("PYTHONUTF8") != "1":  # as under LC_ALL=C; files are UTF-8
        os.environ["PYTHONUTF8"] = "1"  # also for every process that this one starts
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    settle_environment(os.environ)
    try:
        with ended_by(ending_signals() | {signal.SIGUSR1}):
            sys.exit(command(standalone_mode=False))
    except TyperException as error:
        context = getattr(error, "ctx", None)
        given = context.command.params if context else ()
        takes_fields = "overrides" in {each.name for each in given}  # of a run
        field = _field_of(getattr(error, "option_name", "")) if takes_fields else ""
        message = error.message if field else error.format_message()
        if message:  # without a command, the help has been printed
            hint = field or f"see {context.command_path if context else 'qurl'} --help"
            print(f"qurl: {message.removesuffix('.')}; {hint}", file=sys.stderr)
        sys.exit(2)


def _field_of(option: str) -> str:
    """Return how to give a field that was given as an unknown option; empty if there is none."""
    from qurl_megatron.config.other_names import our_name
    from qurl_megatron.config.schema import Config
    from qurl_megatron.config.text import leaf_values

    name = option.lstrip("-").replace("-", "_")
    for field in leaf_values(Config()) if name else ():
        if f".{field}".endswith(f".{name}"):
            given = " ".join(sys.argv).partition(f" {option}")[2][1:].partition(" ")[0]
            return f"give {field}={given or 'VALUE'}"
    ours = our_name(name)
    return f"give {ours}, as FIELD=VALUE" if ours else ""
