"""Look at everything that can be wrong with a run, then make its directory."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from launch.placement import place_servers
from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.config.schema import Config, ConfigError, UaqConfig
from qurl_megatron.config.validate import validate, validate_resume
from qurl_megatron.config.yaml_file import load, save


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what is wrong with the input into one line and exit code 2."""
    from qurl_megatron.data.prompts import DataError
    from qurl_megatron.model.architecture import ArchitectureError
    from qurl_megatron.quantization.offline import OfflineError
    from qurl_megatron.quantization.quantize import NonFiniteWeight

    try:
        yield
    except (ArchitectureError, ConfigError, DataError, NonFiniteWeight, OfflineError) as error:
        print(f"qurl: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"qurl: {error.strerror}: {error.filename}", file=sys.stderr)
        sys.exit(2)


def prepare(recipe: str, overrides: list[str], num_gpus: int = 0) -> Config:
    """Make the run's directory with its config.yaml, and its model where the recipe builds one.

    Everything that can be wrong is looked at first; the directory appears only when all is right.
    `num_gpus` are this machine's, where the whole run is to be on it; 0 looks at none.

    Raises:
        ConfigError, DataError: what is wrong, where, and what would be right, in one line.
    """

    module = load_recipe(recipe)
    config = with_overrides(module.recipe(), overrides)
    given = any(word.startswith("quantization.uaq.") for word in overrides)
    if config.quantization.format == "bf16" and not given:
        config.quantization.uaq = UaqConfig(scale=1)  # nothing to make updates visible to
    config.name = config.name or f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    if config.run_dir.exists():
        raise ConfigError(
            f"name={config.name}: {config.run_dir} exists; choose another name, or go on with it: "
            f"qurl resume {config.run_dir}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "model"
        if not config.model and hasattr(module, "build_model"):
            module.build_model(built, config.seed)
            config.model = str(built)
        validate(config)
        place_servers(config, num_gpus)
        _check_prompts(config)
        config.run_dir.mkdir(parents=True)
        if built.exists():
            config.model = str(config.run_dir / "model")
            shutil.move(built, config.model)
    save(config, config.run_dir / "config.yaml")
    return config


def prepare_resume(run_dir: Path, overrides: list[str], num_gpus: int = 0) -> Config:
    """The run's configuration with `overrides`, written back to its config.yaml.

    `num_gpus` as for `prepare`.

    Raises:
        ConfigError, DataError: what is wrong, where, and what would be right, in one line.
    """

    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: not a run's directory, it has no config.yaml")
    saved = load(run_dir / "config.yaml")
    saved.output_dir, saved.name = str(run_dir.parent), run_dir.name  # it may have been moved
    config = with_overrides(saved, overrides)
    validate_resume(saved, config)
    validate(config)
    place_servers(config, num_gpus)
    _check_prompts(config)
    save(config, run_dir / "config.yaml")
    return config


def _check_prompts(config: Config) -> None:
    """Raises DataError."""
    from transformers import AutoTokenizer

    from qurl_megatron.data import prompts as data

    data.load_prompts(config, AutoTokenizer.from_pretrained(config.model))


def load_recipe(name: str) -> ModuleType:
    if name not in recipe_names():
        raise ConfigError(f"{name}: no such recipe; there are {', '.join(recipe_names())}")
    return importlib.import_module(f"recipes.{name}")


def recipe_names() -> list[str]:
    import recipes

    return sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def prepared(recipe: str, overrides: Sequence[str]) -> Config:
    """The run of this name, gone on with where it is there, else begun.

    Raises:
        ConfigError, DataError: what is wrong, in one line.
    """
    named = [word for word in overrides if word.startswith("name=")]
    if not named:
        raise ConfigError("name=: missing; a restarted job goes on with the run of this name")
    output_dirs = [word for word in overrides if word.startswith("output_dir=")]
    output_dir = output_dirs[-1].partition("=")[2] if output_dirs else Config.output_dir
    run_dir = Path(output_dir) / named[-1].partition("=")[2]
    if not (run_dir / "config.yaml").is_file():
        return prepare(recipe, list(overrides))
    others = [word for word in overrides if word not in named + output_dirs]
    return prepare_resume(run_dir, others)
