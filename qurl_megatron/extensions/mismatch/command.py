"""The command that compares a model with its quantized copy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from qurl_megatron.commands.models import (
    GroupSizeOption,
    SourceDirectory,
    check_format,
    found_model,
)


def mismatch(
    model: SourceDirectory,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="Problems to answer: a file, directory or reasoning_gym:TASK."
        ),
    ],
    weight_format: Annotated[
        str, typer.Option("--format", help="int8, int4, fp8, fp8-tensor or fp8-block.")
    ] = "int8",
    group_size: GroupSizeOption = 128,
    prompts: Annotated[
        int, typer.Option(min=4, max=100_000, help="Number of problems, each answered once.")
    ] = 64,
    max_completion: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Maximum completion length, in tokens.")
    ] = 128,
    budget: Annotated[
        float,
        typer.Option(min=0, max=1, help="Largest growth of a server's weights, as a fraction."),
    ] = 0.1,
    output: Annotated[Path | None, typer.Option(help="JSON file to write. Default: none.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled answers.")] = 0,
    temperature: Annotated[float, typer.Option(help="The run's rollout.temperature.")] = 1.0,
    smoothing: Annotated[float, typer.Option(help="The run's quantization.smoothing.")] = 0.0,
) -> Iterator[int]:
    """Find which tokens, layers and activations make the quantized model differ.

    Recommend layers to keep in BF16 (quantization.keep).
    """
    import json
    from functools import partial

    from rich.console import Console

    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.files import check_output, write_whole

    chosen = check_format(weight_format, group_size)
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
        print_layers,
        print_tokens,
        read_prompts,
    )
    from qurl_megatron.report.console import show_progress

    model = Path(found_model(model))
    options = MismatchOptions(
        model, data, chosen, prompts, max_completion, budget, seed, temperature, smoothing
    )
    read = read_prompts(options)
    yield 1
    console = Console(stderr=True, highlight=False)
    console.print(f"comparing {weight_format} with BF16")
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
