"""Runs that are started from Python."""

import signal
import subprocess

from qurl_megatron import device
from qurl_megatron.config.schema import Config
from qurl_megatron.launch import local
from qurl_megatron.launch.prepare import prepare_new
from qurl_megatron.launch.recipe import Recipe, load_recipe, of_code
from qurl_megatron.machine.environment import settle_environment
from qurl_megatron.machine.processes import die_with_parent
from qurl_megatron.report.record import RunRecord, read_run


def load(recipe: str, *words: str) -> Config:
    """Return the configuration of a recipe, with what would follow it on a command line.

    Args:
        recipe: a name, FILE.yaml or FILE.py:NAME, as for `qurl train`.
        words: `field=value`, or more YAML files.

    Raises:
        ConfigError: there is no such recipe, or a field is wrong.
    """
    read = load_recipe(recipe, words)
    read.config.recipe_file = dict(read.files)
    return read.config


def train(config: Config | str, *words: str) -> RunRecord:
    """Run a configuration on this machine, as `qurl train` does, and return the run.

    The run has processes of its own, which end when this one does. After an interrupt (Ctrl-C) they
    end first, and `qurl resume` goes on.

    Args:
        config: a configuration, or the name of a recipe.
        words: what would follow it on a command line.

    Raises:
        ArchitectureError, ConfigError, DataError: the run cannot be; nothing was started.
        RuntimeError: it has ended early; its last lines were printed.
    """
    recipe = Recipe("run", "", of_code(config)) if isinstance(config, Config) else config
    prepared, data_summary = prepare_new(recipe, words, device.num_gpus())
    print(data_summary, end="", flush=True)
    settle_environment(environment := local.environment())  # as `qurl` does for itself
    launcher = subprocess.Popen(
        local.command(prepared.run_dir), env=environment, preexec_fn=die_with_parent
    )
    try:
        code = launcher.wait()
    except BaseException:
        launcher.send_signal(signal.SIGINT)
        launcher.wait()
        raise
    if code:
        raise RuntimeError(f"{prepared.run_dir} has ended with code {code}")
    return read_run(prepared.run_dir)
