"""The command that compares a model with its quantized copy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qurl_megatron.commands.models import check_format, found_model

if TYPE_CHECKING:
    from qurl_megatron.config.schema import Config


def mismatch(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|MODEL",
            help="Recipe: a name, FILE.yaml or FILE.py:NAME. Or a model: a Hugging Face directory "
            "or a name of the Hub.",
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIELD=VALUE]...|DATA",
            help="Of a recipe: fields to change. Of a model: problems to answer, a file, directory "
            "or reasoning_gym:TASK.",
        ),
    ] = None,
    weight_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="int8, int4, fp8, fp8-tensor or fp8-block. Default: int8. This and the other "
            "options that a recipe has a field for are for a model.",
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="As quantization.group_size. Default: 128.")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=4, max=100_000, help="Number of problems, each answered once.")
    ] = 64,
    max_completion: Annotated[
        int,
        typer.Option(
            min=1, max=1_000_000, help="Maximum completion length, in tokens; a recipe's, if less."
        ),
    ] = 128,
    budget: Annotated[
        float,
        typer.Option(min=0, max=1, help="Largest growth of a server's weights, as a fraction."),
    ] = 0.1,
    output: Annotated[Path | None, typer.Option(help="JSON file to write. Default: none.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled answers.")] = 0,
    temperature: Annotated[
        float | None, typer.Option(help="As rollout.temperature. Default: 1.")
    ] = None,
    smoothing: Annotated[
        float | None, typer.Option(help="As quantization.smoothing. Default: 0.")
    ] = None,
) -> Iterator[int]:
    """Find which tokens, layers and activations make the quantized model differ.

    A recipe says all that a run of it would do: data, prompts, format, UAQ, smoothing, temperature.
    Recommend layers to keep in BF16 (quantization.keep).
    """
    import json
    from functools import partial
    from tempfile import TemporaryDirectory

    from rich.console import Console

    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.files import check_output, write_whole
    from qurl_megatron.launch.recipe import is_file

    data = None
    if words and len(words) == 1 and "=" not in words[0] and not is_file(words[0]):
        (data,) = words
        chosen = check_format(
            "int8" if weight_format is None else weight_format,
            128 if group_size is None else group_size,
        )
    else:
        of_model = {
            "--format": weight_format,
            "--group-size": group_size,
            "--temperature": temperature,
            "--smoothing": smoothing,
        }
        if given := next((name for name, value in of_model.items() if value is not None), None):
            raise ConfigError(f"{given}: is for MODEL DATA; of a recipe, change the field")
    if output is not None:
        if os.path.lexists(output):
            raise ConfigError(f"--output {output}: exists; choose another file")
        if not output.parent.is_dir():
            raise ConfigError(f"--output {output}: there is no directory {output.parent}; make it")
        check_output(output)
    # It imports torch, so the cheap checks come first.
    from qurl_megatron.extensions.mismatch.mismatch import (
        MismatchOptions,
        measure,
        options_of,
        print_layers,
        print_tokens,
        read_prompts,
    )
    from qurl_megatron.report.progress import show_progress

    with TemporaryDirectory(prefix="qurl-mismatch-") as scratch:
        teach = None
        if data is None:
            run, teach = _run_of(subject, words or [], Path(scratch) / "model")
            options = options_of(run, prompts, max_completion, budget, seed)
        else:
            options = MismatchOptions(
                Path(found_model(subject)),
                data,
                chosen,
                prompts,
                max_completion,
                budget,
                seed,
                1.0 if temperature is None else temperature,
                smoothing or 0.0,
            )
        read = read_prompts(options)
        yield 1
        if teach:
            teach(run)
        console = Console(stderr=True, highlight=False)
        console.print(f"comparing {options.weight_format} with BF16")
        result = measure(
            options,
            read,
            partial(console.print, markup=False, soft_wrap=True),
            print_tokens,
            lambda passes: show_progress("layers", passes, "passes", console),
        )
        print_layers(result)
    if output is not None:
        write_whole(output, json.dumps(result, indent=2) + "\n")
        print(f"{output} is ready")


def _run_of(recipe: str, words: list[str], built: Path) -> tuple[Config, Any]:
    """Return a recipe's fields, with a model built at `built` if it builds one, and its lesson."""
    from qurl_megatron.config.validate import validate
    from qurl_megatron.launch.prepare import find_or_build
    from qurl_megatron.launch.recipe import load_recipe

    read = load_recipe(recipe, words)
    run = read.config
    teach = find_or_build(read, built)
    validate(run)
    run.model = found_model(run.model)
    return run, teach
