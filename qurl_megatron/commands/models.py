"""Commands on models: export, quantize, compare, scale and evaluate them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from qurl_megatron.config.schema import WeightFormat
    from qurl_megatron.model.huggingface import Progress

SourceDirectory = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="Hugging Face directory (config.json, safetensors), or a name of the Hub.",
    ),
]
GroupSizeOption = Annotated[
    int, typer.Option(help="Input channels that share a scale in format int4: 32 or 128.")
]
NewDirectory = Annotated[Path, typer.Argument(metavar="DST", help="Directory to create.")]


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint: RUN/checkpoints/step_NNNNNN.")
    ],
    destination: NewDirectory,
) -> Iterator[int]:
    """Export a checkpoint as a Hugging Face directory, without UAQ's scaling."""
    from qurl_megatron.launch.resume import warn_of_pickles

    _check_new(destination)
    warn_of_pickles(checkpoint)
    warnings.filterwarnings("ignore", module=r"megatron\.")  # about optional packages
    from qurl_megatron.learner.saved_masters import read_config

    read_config(checkpoint)
    yield 0
    with progress_bar("exporting") as progress:
        from qurl_megatron.weight_sync.export_checkpoint import export_checkpoint

        export_checkpoint(checkpoint, destination, progress)
    print(f"{destination} is ready")


def quantize(
    source: SourceDirectory,
    destination: NewDirectory,
    weight_format: Annotated[
        str, typer.Option("--format", help="int8, int4, fp8, fp8-tensor, fp8-block or bf16.")
    ] = "int8",
    group_size: GroupSizeOption = 128,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Linear layers that stay in BF16, as in quantization.keep; repeat the option for "
            "several.",
        ),
    ] = None,
    smoothing: Annotated[
        float, typer.Option(help="As quantization.smoothing; holds the model in memory.")
    ] = 0.0,
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="Problems of which smoothing sees 64 prompts."),
    ] = None,
    rounding: Annotated[
        Literal["unbiased", "nearest"],
        typer.Option(help="How float32 values become BF16, as in optimizer.rounding."),
    ] = "unbiased",
) -> Iterator[int]:
    """Quantize a Hugging Face directory, as training does, for an SGLang server to load.

    If it is interrupted, call it again: it continues where it stopped.
    """
    from qurl_megatron.config.keep import kept_layers
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.model.architecture import Architecture
    from qurl_megatron.quantization.offline import quantize_directory

    chosen = check_format(weight_format, group_size)
    source = Path(found_model(source))
    kept_layers(keep or [], Architecture.from_directory(source))
    _check_new(destination)
    if bool(smoothing) != bool(data):
        raise ConfigError("--smoothing: its scales come from the prompts of --data; give both")
    scales = None
    if data:
        from qurl_megatron.config.extensions import needed

        served = needed("mismatch", "mismatch", by="--smoothing")
        options = served.MismatchOptions(source, data, chosen, smoothing=smoothing)
        prompts = served.read_prompts(options)
        yield 0
        scales = served.smoothing_by(prompts, options)
    else:
        yield 0
    with progress_bar(f"quantizing to {weight_format}") as progress:
        quantize_directory(source, destination, chosen, progress, keep or [], scales, rounding)
    print(f"{destination} is ready")


def uaq(
    source: SourceDirectory,
    destination: NewDirectory,
    scale: Annotated[
        float, typer.Option(help="Scale s of QuRL Eq. 11; with experts, a power of two.")
    ] = 1.5,
    undo: Annotated[bool, typer.Option("--undo", help="Restore the original weights.")] = False,
) -> None:
    """Scale a Hugging Face directory for update-aware quantization (UAQ), or undo the scaling.

    Then print how much the model's logits changed.
    """
    from qurl_megatron.config.schema import ConfigError, UaqConfig
    from qurl_megatron.config.text import from_tree
    from qurl_megatron.quantization.offline import scale_directory, unscale_directory

    source = Path(found_model(source))
    title = "undoing UAQ" if undo else f"scaling by {scale}"
    with progress_bar(title) as progress:
        try:
            config = from_tree(UaqConfig, {"scale": scale})
        except ConfigError as error:
            raise ConfigError(f"--{error}") from None
        if undo:
            invariance = unscale_directory(source, destination, progress)
        else:
            invariance = scale_directory(source, destination, config, progress)
    print(
        f"{destination} is ready. The largest logit is {invariance.largest_logit:.3g}. Logits "
        f"changed by at most {invariance.float32_difference:.2g} in float32, which is rounding, "
        f"and by {invariance.stored_difference:.2g} with weights rounded to their stored dtype."
    )
    if invariance.rounded_tensors:
        verb = "are" if undo else "will be, after an undo,"
        print(
            f"Of the original, {invariance.exact_tensors} tensors {verb} exact: UAQ leaves them or "
            f"scales them by a power of two. {invariance.rounded_tensors} {verb} the original "
            "up to a rounding in the stored dtype: of a weight, or of 1 + w in a hybrid's norm w."
        )
    else:
        print("Every scale is a power of two: an undo gives back the original, bit for bit.")


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Hugging Face directory, name of the Hub or checkpoint."
        ),
    ],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA... [FIELD=VALUE]...",
            help="Data files, datasets of the Hub, reasoning_gym:TASK; settings such as k=32.",
        ),
    ],
) -> Iterator[int]:
    """Measure Avg@1 and Avg@k of a model on data files, on a server started for it."""
    from qurl_megatron.config.text import with_overrides
    from qurl_megatron.evaluation import evaluate

    data = {word: word for word in words if "=" not in word}
    settings = [word for word in words if "=" in word]
    config = with_overrides(evaluate.EvalConfig(model=found_model(model), data=data), settings)
    evaluate.check(config)
    evaluate.check_output(config)
    yield config.server.tensor_parallel_size
    evaluate.run(config)


def found_model(model: str | Path) -> str:
    """Return the directory of a model; a model of the Hub is downloaded first."""
    from qurl_megatron.model.hub import local_model

    return local_model(str(model))


def _check_new(destination: Path) -> None:
    """Check that nothing exists under this name, not even a broken link."""
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.files import check_output

    if os.path.lexists(destination):
        raise ConfigError(f"{destination} exists; choose another directory")
    check_output(destination)


def check_format(name: str, group_size: int) -> WeightFormat:
    """Return a format and its group size as one name; raise ConfigError if one is unknown."""
    from typing import get_args

    from qurl_megatron.config.schema import ConfigError, FormatName, with_group_size
    from qurl_megatron.config.validate import check_group_size
    from qurl_megatron.config.values import GROUP_SIZES

    formats = get_args(FormatName)
    if name not in formats:
        raise ConfigError(f"--format {name}: formats are {', '.join(formats)}")
    if group_size not in GROUP_SIZES:
        raise ConfigError(f"--group-size {group_size}: must be 32 or 128")
    chosen: FormatName = formats[formats.index(name)]
    check_group_size(chosen, group_size, "--group-size ")
    return with_group_size(chosen, group_size)


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """Show a progress bar; yield a function that takes the bytes done and to do."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
