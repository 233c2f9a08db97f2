"""The `qurl` command. A wrong word ends it with one line and exit code 2; nothing has started."""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qurl_megatron.config import Config

# Before torch, transformers or SGLang are imported; their warnings are not the run's to give.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def qurl() -> None:
    """Reinforcement learning with quantised rollouts on Megatron-core and SGLang."""


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="a module of recipes/, such as quickstart")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="fields to change")
    ] = None,
) -> None:
    """Run a recipe on this machine: start its servers and learner ranks, and watch them."""
    from launch import local
    from qurl_megatron.config import ConfigError
    from qurl_megatron.data import DataError

    try:
        config = prepare(recipe, overrides or [])
    except (ConfigError, DataError) as error:
        print(f"qurl: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(local.run(config))


def prepare(recipe: str, overrides: list[str]) -> Config:
    """Make the run's directory with its config.yaml, and its model where the recipe builds one.

    Everything that can be wrong is looked at first; the directory appears only when all is right.

    Raises:
        ConfigError, DataError: what is wrong, where, and what would be right, in one line.
    """
    from transformers import AutoTokenizer

    from qurl_megatron import config as configs
    from qurl_megatron import data

    module = _recipe(recipe)
    config = configs.with_overrides(module.recipe(), overrides)
    config.name = config.name or f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    if config.run_dir.exists():
        raise configs.ConfigError(f"name={config.name}: {config.run_dir} exists; choose another")
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "model"
        if not config.model and hasattr(module, "build_model"):
            module.build_model(built, config.seed)
            config.model = str(built)
        configs.validate(config)
        data.load_prompts(
            config.data,
            config.data_options,
            AutoTokenizer.from_pretrained(config.model),
            reward=config.reward,
            held_out_fraction=config.evaluation.held_out_fraction,
            max_prompt_length=config.rollout.max_prompt_length,
            seed=config.seed,
        )
        config.run_dir.mkdir(parents=True)
        if built.exists():
            config.model = str(config.run_dir / "model")
            shutil.move(built, config.model)
    configs.save(config, config.run_dir / "config.yaml")
    return config


def _recipe(name: str) -> ModuleType:
    import recipes
    from qurl_megatron.config import ConfigError

    names = sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))
    if name not in names:
        raise ConfigError(f"{name}: no such recipe; there are {', '.join(names)}")
    return importlib.import_module(f"recipes.{name}")


def main() -> None:
    app()
