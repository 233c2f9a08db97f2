"""The `qurl` command. A wrong word ends it with one line and exit code 2; nothing has started."""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from qurl_megatron.config import Config
    from qurl_megatron.huggingface import Progress

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

    with refusals():
        config = prepare(recipe, overrides or [])
    sys.exit(local.run(config))


@app.command()
def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="a run's directory, runs/NAME")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="fields to change")
    ] = None,
) -> None:
    """Go on with a run from its newest checkpoint, on any layout; without one, from its start."""
    from launch import local

    with refusals():
        config = prepare_resume(run_dir, overrides or [])
    sys.exit(local.run(config))


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoints/step_NNNNNN")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="a directory to be made")],
) -> None:
    """Make a Hugging Face directory of a checkpoint, UAQ undone."""
    with refusals(), progress_bar("exporting") as progress:
        from qurl_megatron.export import export_checkpoint

        export_checkpoint(checkpoint, destination, progress)
    print(f"{destination} is ready")


@app.command("eval")
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a Hugging Face directory or a checkpoint")
    ],
    words: Annotated[
        list[str], typer.Argument(metavar="DATA... [FIELD=VALUE]...", help="files, and settings")
    ],
) -> None:
    """Measure Avg@1 and Avg@k of a model on some problems, on a server of its own."""
    with refusals():
        from launch import evaluate
        from qurl_megatron.avg_at_k import EvalConfig
        from qurl_megatron.config import with_overrides

        data = [word for word in words if "=" not in word]
        settings = [word for word in words if "=" in word]
        evaluate.run(with_overrides(EvalConfig(model=model, data=data), settings))


@app.command()
def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="directories of runs, to compare")
    ],
    output: Annotated[
        Path | None, typer.Option(help="the page; by default report/index.html of the first run")
    ] = None,
) -> None:
    """Write one HTML page on a run, or on several side by side."""
    from qurl_megatron.report import write_report

    output = output or run_dirs[0] / "report" / "index.html"
    with refusals():
        write_report(run_dirs, output)
    print(f"{output} is ready")


SourceDirectory = Annotated[
    Path, typer.Argument(metavar="SRC", help="a Hugging Face directory: config.json, safetensors")
]
NewDirectory = Annotated[Path, typer.Argument(metavar="DST", help="a directory to be made")]


@app.command()
def quantize(
    source: SourceDirectory,
    destination: NewDirectory,
    weight_format: Annotated[
        str, typer.Option("--format", help="int8, int4, fp8, fp8-tensor, fp8-block or bf16")
    ] = "int8",
) -> None:
    """Quantise a Hugging Face directory as a publish would, for an SGLang server to load.

    Killed, it goes on where it was when it is called again.
    """
    from typing import get_args

    from qurl_megatron.config import ConfigError, WeightFormat
    from qurl_megatron.offline import quantise_directory

    with refusals(), progress_bar(f"quantising to {weight_format}") as progress:
        if weight_format not in get_args(WeightFormat):
            raise ConfigError(
                f"--format {weight_format}: formats are {', '.join(get_args(WeightFormat))}"
            )
        quantise_directory(source, destination, weight_format, progress)  # type: ignore[arg-type]
    print(f"{destination} is ready")


@app.command()
def uaq(
    source: SourceDirectory,
    destination: NewDirectory,
    scale: Annotated[float, typer.Option(help="s of Eq. 11")] = 1.5,
    undo: Annotated[bool, typer.Option("--undo", help="give the original back")] = False,
) -> None:
    """Scale a Hugging Face directory by UAQ, or undo it, and say what that did to its logits."""
    from qurl_megatron.config import ConfigError, UaqConfig
    from qurl_megatron.offline import scale_directory, unscale_directory

    with refusals(), progress_bar("undoing UAQ" if undo else f"scaling by {scale}") as progress:
        if not 0 < scale < float("inf"):
            raise ConfigError(f"--scale {scale}: must be a positive finite number")
        if undo:
            invariance = unscale_directory(source, destination, progress)
        else:
            invariance = scale_directory(source, destination, UaqConfig(scale), progress)
    print(
        f"{destination} is ready. Largest logit {invariance.largest_logit:.3g}; it changed by at "
        f"most {invariance.float32_difference:.2g} in float32, which is rounding only, and by "
        f"{invariance.stored_difference:.2g} with weights rounded to the dtype they are stored in."
    )


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what is wrong with the input into one line and exit code 2."""
    from qurl_megatron.architecture import ArchitectureError
    from qurl_megatron.config import ConfigError
    from qurl_megatron.data import DataError
    from qurl_megatron.offline import OfflineError
    from qurl_megatron.quantize import NonFiniteWeight

    try:
        yield
    except (ArchitectureError, ConfigError, DataError, NonFiniteWeight, OfflineError) as error:
        print(f"qurl: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"qurl: {error.strerror}: {error.filename}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """A bar on the terminal, to be told the bytes that are done and the bytes in all."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def prepare(recipe: str, overrides: list[str]) -> Config:
    """Make the run's directory with its config.yaml, and its model where the recipe builds one.

    Everything that can be wrong is looked at first; the directory appears only when all is right.

    Raises:
        ConfigError, DataError: what is wrong, where, and what would be right, in one line.
    """
    from qurl_megatron import config as configs
    from qurl_megatron import device

    module = _recipe(recipe)
    config = configs.with_overrides(module.recipe(), overrides)
    given = any(word.startswith("quantization.uaq.") for word in overrides)
    if config.quantization.format == "bf16" and not given:
        config.quantization.uaq = configs.UaqConfig(scale=1)  # nothing to make updates visible to
    config.name = config.name or f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    if config.run_dir.exists():
        raise configs.ConfigError(
            f"name={config.name}: {config.run_dir} exists; choose another name, or go on with it: "
            f"qurl resume {config.run_dir}"
        )
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / "model"
        if not config.model and hasattr(module, "build_model"):
            module.build_model(built, config.seed)
            config.model = str(built)
        configs.validate(config)
        configs.place_servers(config, device.num_gpus())
        _check_prompts(config)
        config.run_dir.mkdir(parents=True)
        if built.exists():
            config.model = str(config.run_dir / "model")
            shutil.move(built, config.model)
    configs.save(config, config.run_dir / "config.yaml")
    return config


def prepare_resume(run_dir: Path, overrides: list[str]) -> Config:
    """The run's configuration with `overrides`, written back to its config.yaml.

    Raises:
        ConfigError, DataError: what is wrong, where, and what would be right, in one line.
    """
    from qurl_megatron import config as configs
    from qurl_megatron import device

    if not (run_dir / "config.yaml").is_file():
        raise configs.ConfigError(f"{run_dir}: not a run's directory, it has no config.yaml")
    saved = configs.load(run_dir / "config.yaml")
    saved.output_dir, saved.name = str(run_dir.parent), run_dir.name  # it may have been moved
    config = configs.with_overrides(saved, overrides)
    configs.validate_resume(saved, config)
    configs.validate(config)
    configs.place_servers(config, device.num_gpus())
    _check_prompts(config)
    configs.save(config, run_dir / "config.yaml")
    return config


def _check_prompts(config: Config) -> None:
    """Raises DataError."""
    from transformers import AutoTokenizer

    from qurl_megatron import data

    data.load_prompts(config, AutoTokenizer.from_pretrained(config.model))


def _recipe(name: str) -> ModuleType:
    import recipes
    from qurl_megatron.config import ConfigError

    names = sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))
    if name not in names:
        raise ConfigError(f"{name}: no such recipe; there are {', '.join(names)}")
    return importlib.import_module(f"recipes.{name}")


def main() -> None:
    app()
