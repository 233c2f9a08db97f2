"""Check everything that can be wrong with a run, then create or update its directory.

`prepare_new` is for a new run, `prepare_resume` for an existing one, `prepare_resume_or_new` for
either.
"""

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

from launch.owner import claim
from launch.placement import place_servers
from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.config.schema import Config, ConfigError, UaqConfig
from qurl_megatron.config.validate import validate, validate_resume
from qurl_megatron.config.yaml_file import load, save

DATA_SUMMARY = "data.txt"  # in a run's directory


@contextmanager
def exit_on_bad_input() -> Iterator[None]:
    """Turn an error in the user's input into one line on stderr and exit code 2."""
    from qurl_megatron.data.problems import DataError
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


def check_new(recipe: str, overrides: list[str], num_gpus: int = 0) -> str:
    """Check a new run as `prepare_new` does, write nothing, and return the summary of its data.

    Raises:
        ConfigError, DataError: one line that says what is wrong, where, and what would be right.
    """
    with _checked(recipe, overrides, num_gpus) as (_, _, summary):
        return summary


def prepare_new(recipe: str, overrides: list[str], num_gpus: int = 0) -> Config:
    """Create a new run's directory: its config.yaml, data.txt, and a model that the recipe builds.

    Nothing is written before all checks have passed. `num_gpus` is the number of GPUs of this
    machine if the whole run is to fit on it; 0 skips that check.

    Raises:
        ConfigError, DataError: one line that says what is wrong, where, and what would be right.
    """
    with _checked(recipe, overrides, num_gpus) as (config, built, summary):
        config.run_dir.mkdir(parents=True)
        if built.exists():
            config.model = str(config.run_dir / "model")
            shutil.move(built, config.model)
    save(config, config.run_dir / "config.yaml")
    (config.run_dir / DATA_SUMMARY).write_text(summary)
    return config


@contextmanager
def _checked(
    recipe: str, overrides: list[str], num_gpus: int
) -> Iterator[tuple[Config, Path, str]]:
    """Yield a new run's configuration, where its model is if the recipe built one, and its data."""
    module = load_recipe(recipe)
    config = with_overrides(module.recipe(), overrides)
    uaq_is_given = any(word.startswith("quantization.uaq.") for word in overrides)
    if config.quantization.format == "bf16" and not uaq_is_given:
        config.quantization.uaq = UaqConfig(scale=1)  # there is no quantization to scale for
    config.name = config.name or default_name(recipe)
    if config.run_dir.exists():
        raise run_exists_error(config)
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "model"
        if not config.model and hasattr(module, "build_model"):
            module.build_model(built, config.seed)
            config.model = str(built)
        yield config, built, _check(config, num_gpus)


def prepare_resume(run_dir: Path, overrides: list[str], num_gpus: int = 0) -> Config:
    """Apply overrides to an existing run, and write its config.yaml and data.txt.

    `num_gpus` is as for `prepare_new`.

    Raises:
        ConfigError, DataError: one line that says what is wrong, where, and what would be right.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: not a run's directory, it has no config.yaml")
    with claim(run_dir):
        saved = load(run_dir / "config.yaml")
        # The directory may have been moved or renamed since.
        saved.output_dir, saved.name = str(run_dir.parent), run_dir.name
        config = with_overrides(saved, overrides)
        validate_resume(saved, config)
        summary = _check(config, num_gpus)
        save(config, run_dir / "config.yaml")
        (run_dir / DATA_SUMMARY).write_text(summary)
    return config


def prepare_resume_or_new(recipe: str, overrides: Sequence[str]) -> Config:
    """Resume the named run, or create it.

    Raises:
        ConfigError, DataError: one line that says what is wrong, where, and what would be right.
    """
    names = [word for word in overrides if word.startswith("name=")]
    if not names:
        raise ConfigError("name=: missing; a job needs it to find its run after a restart")
    output_dirs = [word for word in overrides if word.startswith("output_dir=")]
    output_dir = output_dirs[-1].partition("=")[2] if output_dirs else Config.output_dir
    run_dir = Path(output_dir) / names[-1].partition("=")[2]
    if not (run_dir / "config.yaml").is_file():
        return prepare_new(recipe, list(overrides))
    others = [word for word in overrides if word not in names + output_dirs]
    return prepare_resume(run_dir, others)


def default_name(recipe: str) -> str:
    return f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"


def run_exists_error(config: Config) -> ConfigError:
    """Return the error for a new run whose directory exists."""
    return ConfigError(
        f"name={config.name}: {config.run_dir} exists; choose another name, or resume that run: "
        f"qurl resume {config.run_dir}"
    )


def print_data_summary(config: Config) -> None:
    """Print the summary of a prepared run's data."""
    print((config.run_dir / DATA_SUMMARY).read_text(), end="", flush=True)


def _check(config: Config, num_gpus: int) -> str:
    """Check the fields, the machine and the data; return the summary of the data.

    Raises:
        ConfigError, DataError: something cannot be used.
    """
    from transformers import AutoTokenizer

    from qurl_megatron.data.prompts import load_prompts
    from qurl_megatron.data.summary import summarize

    validate(config)
    place_servers(config, num_gpus)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    return summarize(config, load_prompts(config, tokenizer), tokenizer)


def load_recipe(name: str) -> ModuleType:
    if name not in recipe_names():
        raise ConfigError(f"{name}: no such recipe; there are {', '.join(recipe_names())}")
    return importlib.import_module(f"recipes.{name}")


def recipe_names() -> list[str]:
    import recipes

    return sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))
