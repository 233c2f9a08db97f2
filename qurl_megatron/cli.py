"""The `qurl` command. Wrong input ends it with one line and exit code 2 before anything starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.exceptions import TyperException

from launch.disk import check_disk
from launch.prepare import (
    check_new,
    exit_on_bad_input,
    load_recipe,
    prepare_new,
    prepare_resume,
    print_data_summary,
    recipe_names,
    warn_of_pickles,
)

if TYPE_CHECKING:
    from qurl_megatron.config.schema import Config
    from qurl_megatron.model.architecture import Architecture
    from qurl_megatron.model.huggingface import Progress

# Set before torch, transformers or SGLang are imported: keeps their warnings out of the output.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe, such as quickstart.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: runs/NAME.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE", help="Fields to change; `qurl config RECIPE` lists them."
    ),
]
SourceDirectory = Annotated[
    Path, typer.Argument(metavar="SRC", help="Hugging Face directory: config.json, safetensors.")
]
NewDirectory = Annotated[Path, typer.Argument(metavar="DST", help="Directory to create.")]


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


@app.command()
def doctor() -> None:
    """Check this machine: packages, GPUs, shared memory, disk, ports, Slurm and InfiniBand.

    Exit with code 1 if something that a run needs is missing or wrong.
    """
    from qurl_megatron import doctor

    results = doctor.check_machine()
    print(doctor.page(results))
    sys.exit(1 if any(result.status == "!!" for result in results) else 0)


@app.command()
def config(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Print a recipe's configuration as YAML, with the meaning of each field as a comment."""
    with exit_on_bad_input():
        from qurl_megatron.config.overrides import with_overrides
        from qurl_megatron.config.yaml_file import commented_yaml

        config = with_overrides(load_recipe(recipe).recipe(), overrides or [])
    print(commented_yaml(config), end="")


@app.command()
def train(
    recipe: RecipeName,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the run and print a summary of its data. Start and write nothing.",
        ),
    ] = False,
) -> None:
    """Run a recipe on this machine: start its servers and learner ranks, and watch them.

    A summary of the data is printed before anything starts.
    """
    from launch import local
    from qurl_megatron.device import num_gpus

    with exit_on_bad_input():
        if dry_run:
            print(check_new(recipe, overrides or [], num_gpus()), end="")
            return
        config = prepare_new(recipe, overrides or [], num_gpus())
        print(f"the run {check_disk(config)}", flush=True)
    print_data_summary(config)
    sys.exit(local.run(config))


@app.command()
def resume(run_dir: RunDir, overrides: Overrides = None) -> None:
    """Resume a run from its newest checkpoint, or start it again if it has none.

    The learner's layout may differ from that of the checkpoint.
    """
    from launch import local
    from qurl_megatron.device import num_gpus

    with exit_on_bad_input():
        warn_of_pickles(run_dir)
        config = prepare_resume(run_dir, overrides or [], num_gpus())
        print(f"the run {check_disk(config)}", flush=True)
    print_data_summary(config)
    sys.exit(local.run(config))


@app.command()
def launch(
    recipe: RecipeName,
    overrides: Overrides = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=VALUE,VALUE",
            help="Start a run for each value; repeat the option for all combinations.",
        ),
    ] = None,
    executor: Annotated[str, typer.Option(help="Where to run: local or slurm.")] = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")
    ] = False,
    account: Annotated[str | None, typer.Option(help="Slurm account of the jobs.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm partition of the jobs.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit of each job, such as 04:00:00.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, max=128, help="Number of GPUs per node. Default: 8.")
    ] = None,
    heterogeneous: Annotated[
        bool,
        typer.Option(
            "--heterogeneous",
            help="Use a heterogeneous job: learner nodes and rollout nodes of two kinds.",
        ),
    ] = False,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION=VALUE", help="Any other sbatch option, such as qos=high."),
    ] = None,
    container_image: Annotated[
        str | None, typer.Option(help="Container image (pyxis) that the job steps run in.")
    ] = None,
    container_mounts: Annotated[
        str | None, typer.Option(help="Mounts of the container: HOST:CONTAINER,HOST:CONTAINER.")
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(min=0, max=10_000, help="How often a job may be requeued. Default: 20."),
    ] = None,
) -> None:
    """Run a recipe, or a sweep over it, with nemo-run: on this machine or as Slurm jobs.

    A Slurm job asks for the nodes that its run needs.

    A job that runs out of time or is preempted is requeued and resumes its run.
    """
    with exit_on_bad_input():
        from launch import experiment
        from qurl_megatron.config.schema import ConfigError

        others = [word.partition("=") for word in sbatch or []]
        options = {
            "account": account,
            "partition": partition,
            "time": time,
            "gpus_per_node": gpus_per_node,
            "container_image": container_image,
            "container_mounts": container_mounts.split(",") if container_mounts else [],
            "heterogeneous": heterogeneous,
            "additional_parameters": {name: value for name, _, value in others},
        }
        if executor not in ("local", "slurm"):
            raise ConfigError(f"--executor {executor}: executors are local and slurm")
        given = [name for name, value in options.items() if value]
        if executor == "local" and given:
            raise ConfigError(f"--{given[0].replace('_', '-')}: only with --executor slurm")
        if not all(name and value for name, _, value in others):
            raise ConfigError(f"--sbatch {' '.join(sbatch or [])}: not of the form OPTION=VALUE")
        sys.exit(
            experiment.launch(
                recipe,
                overrides or [],
                sweep or [],
                slurm_options=options if executor == "slurm" else None,
                max_restarts=max_restarts,
                dry_run=dry_run,
            )
        )


@app.command()
def status(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs: runs/NAME.")
    ],
) -> None:
    """Show how far runs have come, and whether they are running."""
    from launch.status import status

    with exit_on_bad_input():
        for run_dir in run_dirs:
            print(f"{run_dir}: {status(run_dir)}", flush=True)


@app.command()
def logs(
    run_dir: RunDir,
    lines: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Number of lines of each log.")
    ] = 20,
) -> None:
    """Show the last lines of the newest logs of a run's job, servers and learner ranks."""
    from launch.status import newest_logs
    from qurl_megatron.process import tail

    with exit_on_bad_input():
        for path in newest_logs(run_dir):
            print(f"==> {path} <==\n{tail(path, lines)}\n")


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint: RUN/checkpoints/step_NNNNNN.")
    ],
    destination: NewDirectory,
) -> None:
    """Export a checkpoint as a Hugging Face directory, without UAQ's scaling."""
    with exit_on_bad_input(), progress_bar("exporting") as progress:
        from qurl_megatron.weight_sync.export import export_checkpoint

        warn_of_pickles(checkpoint)
        export_checkpoint(checkpoint, destination, progress)
    print(f"{destination} is ready")


@app.command("eval")
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hugging Face directory or checkpoint.")
    ],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA... [FIELD=VALUE]...",
            help="Data files or reasoning_gym:TASK, and settings such as k=32.",
        ),
    ],
) -> None:
    """Measure Avg@1 and Avg@k of a model on data files, on a server started for it."""
    with exit_on_bad_input():
        from launch import evaluate
        from qurl_megatron.config.overrides import with_overrides
        from qurl_megatron.loop.avg_at_k import EvalConfig
        from qurl_megatron.preload import PreloadFailed
        from qurl_megatron.rollout.server import ServerFailed

        data = [word for word in words if "=" not in word]
        settings = [word for word in words if "=" in word]
        try:
            evaluate.run(with_overrides(EvalConfig(model=model, data=data), settings))
        except (PreloadFailed, ServerFailed) as failure:
            print(f"qurl: {failure}", file=sys.stderr)
            sys.exit(1)


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hugging Face directory of the run's model.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE", help="Settings, such as format=fp8 host=10.0.0.5 port=30000."
        ),
    ] = None,
) -> None:
    """Serve a model to a run on another machine, which lists it in rollout.servers_at.

    Both sides need the same key, in a file or in the variable QURL_SERVERS_KEY.
    """
    with exit_on_bad_input():
        from launch import serve
        from qurl_megatron.config.overrides import with_overrides
        from qurl_megatron.preload import PreloadFailed
        from qurl_megatron.rollout.server import ServerFailed

        try:
            sys.exit(serve.run(with_overrides(serve.ServeConfig(model=model), settings or [])))
        except (PreloadFailed, ServerFailed) as failure:
            print(f"qurl: {failure}", file=sys.stderr)
            sys.exit(1)


@app.command()
def report(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of the runs to compare.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="HTML file to write. Default: report/index.html in the first run."),
    ] = None,
) -> None:
    """Write an HTML page about one run, or about several side by side."""
    from qurl_megatron.report.page import write_report

    output = output or run_dirs[0] / "report" / "index.html"
    with exit_on_bad_input():
        write_report(run_dirs, output)
    print(f"{output} is ready")


@app.command()
def quantize(
    source: SourceDirectory,
    destination: NewDirectory,
    weight_format: Annotated[
        str, typer.Option("--format", help="int8, int4, fp8, fp8-tensor, fp8-block or bf16.")
    ] = "int8",
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Linear layers that stay in BF16, as in quantization.keep; repeat the option for "
            "several.",
        ),
    ] = None,
) -> None:
    """Quantize a Hugging Face directory, as training does, for an SGLang server to load.

    If it is interrupted, call it again: it continues where it stopped.
    """
    from typing import get_args

    from qurl_megatron.config.schema import ConfigError, WeightFormat
    from qurl_megatron.quantization.offline import quantize_directory

    with exit_on_bad_input(), progress_bar(f"quantizing to {weight_format}") as progress:
        if weight_format not in get_args(WeightFormat):
            raise ConfigError(
                f"--format {weight_format}: formats are {', '.join(get_args(WeightFormat))}"
            )
        quantize_directory(source, destination, weight_format, progress, keep or [])  # type: ignore[arg-type]
    print(f"{destination} is ready")


@app.command()
def noise(
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
    prompts: Annotated[
        int, typer.Option(min=4, max=100_000, help="Number of problems, each answered once.")
    ] = 64,
    max_response: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Maximum response length, in tokens.")
    ] = 128,
    budget: Annotated[
        float,
        typer.Option(min=0, max=1, help="Largest growth of a server's weights, as a fraction."),
    ] = 0.1,
    output: Annotated[Path | None, typer.Option(help="JSON file to write. Default: none.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled answers.")] = 0,
) -> None:
    """Find which tokens, layers and activations make the quantized model differ.

    Recommend layers to keep in BF16 (quantization.keep).
    """
    import json
    from typing import get_args

    from qurl_megatron.config.schema import ConfigError, WeightFormat
    from qurl_megatron.files import write_whole

    with exit_on_bad_input():
        if weight_format not in get_args(WeightFormat):
            raise ConfigError(
                f"--format {weight_format}: formats are {', '.join(get_args(WeightFormat))}"
            )
        if output is not None and output.exists():
            raise ConfigError(f"--output {output}: exists; choose another file")
        from launch.noise import NoiseOptions, measure, print_noise, read_prompts

        options = NoiseOptions(
            model,
            data,
            weight_format,  # type: ignore[arg-type]
            prompts,
            max_response,
            budget,
            seed,
        )
        read = read_prompts(options)
        with pass_bar(f"comparing {weight_format} with BF16") as progress:
            result = measure(options, read, progress)
    print_noise(result)
    if output is not None:
        write_whole(output, json.dumps(result, indent=2) + "\n")
        print(f"{output} is ready")


@app.command()
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
    from qurl_megatron.config.tree import from_tree
    from qurl_megatron.quantization.offline import scale_directory, unscale_directory

    title = "undoing UAQ" if undo else f"scaling by {scale}"
    with exit_on_bad_input(), progress_bar(title) as progress:
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
            f"Of the original, {invariance.exact_tensors} tensors {verb} exact: those that UAQ "
            f"leaves or scales by a power of two. {invariance.rounded_tensors} {verb} the original "
            "up to one unit in the last place of the stored dtype."
        )
    else:
        print("Every scale is a power of two: an undo gives back the original, bit for bit.")


@app.command("plan")
def plan_command(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RECIPE",
            help="Directory with config.json, Qwen2.5-32B, Qwen3-32B, or a recipe.",
        ),
    ],
    overrides: Overrides = None,
    gpus: Annotated[
        int,
        typer.Option(min=2, max=16_384, help="Number of H100s of learner and servers together."),
    ] = 64,
    mean_prompt: Annotated[
        float | None,
        typer.Option(help="Mean prompt length, in tokens. Default: half of max_prompt_length."),
    ] = None,
    mean_response: Annotated[
        float | None,
        typer.Option(help="Mean response length, in tokens. Default: half of max_response_length."),
    ] = None,
    log_deviation: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of log(response length), for lognormal lengths; around 1 for "
            "reasoning. Default: a power law, without long tails."
        ),
    ] = None,
) -> None:
    """Estimate the memory and time that a run needs on H100s; nothing is allocated.

    For a model, choose the layout with the shortest step, unless a field sets the layout.

    For a recipe, keep its own layout.

    If something does not fit, the error names the part that is too large.
    """
    with exit_on_bad_input():
        from qurl_megatron.cli_plan import print_plan
        from qurl_megatron.config.schema import ConfigError
        from qurl_megatron.planning.plan import plan_or_suggest
        from qurl_megatron.planning.step_time import Workload

        architecture, config, has_layout = _plan_input(subject, overrides or [])
        half = Workload.half(config)
        for name, mean in {"prompt": mean_prompt, "response": mean_response}.items():
            longest = getattr(config.rollout, f"max_{name}_length")
            if mean is not None and not 1 <= mean <= longest:
                raise ConfigError(
                    f"--mean-{name} {mean}: must be from 1 to rollout.max_{name}_length={longest}"
                )
        plan = plan_or_suggest(
            architecture,
            config,
            gpus,
            Workload(
                half.mean_prompt if mean_prompt is None else mean_prompt,
                half.mean_response if mean_response is None else mean_response,
                log_deviation,
            ),
            has_layout=has_layout,
        )
    print_plan(plan)


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """Show a progress bar; yield a function that takes the bytes done and the total bytes."""
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


@contextmanager
def pass_bar(title: str) -> Iterator[Progress]:
    """Show a progress bar on stderr; yield a function that takes passes done and all passes."""
    from rich import progress
    from rich.console import Console

    with progress.Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _plan_input(subject: str, overrides: list[str]) -> tuple[Architecture, Config, bool]:
    """Return the model's shape, the configuration, and whether the configuration sets a layout.

    A recipe has its own configuration; a model gets that of recipes/scaling_32b.py, or with experts
    of recipes/qwen3_moe.py.

    Raises:
        ArchitectureError, ConfigError: one line.
    """
    from qurl_megatron.config.overrides import with_overrides
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.model.architecture import Architecture
    from recipes import qwen3_moe, scaling_32b

    known = scaling_32b.ARCHITECTURES | qwen3_moe.ARCHITECTURES
    is_model = subject in known or Path(subject).is_dir()
    if is_model:
        overrides = [f"model={subject}", *overrides]
    elif subject not in recipe_names():
        raise ConfigError(
            f"{subject}: no such directory, model ({', '.join(known)}) or recipe "
            f"({', '.join(recipe_names())})"
        )
    if is_model:
        architecture = known.get(subject) or Architecture.from_directory(subject)
        subject = "qwen3_moe" if architecture.num_experts else "scaling_32b"
    config = with_overrides(load_recipe(subject).recipe(), overrides)
    if not config.model:
        raise ConfigError(
            f"model=: missing; give a directory with config.json, or {' or '.join(known)}"
        )
    architecture = known.get(config.model) or Architecture.from_directory(config.model)
    layout_fields = ("learner.", "rollout.server.tensor_parallel_size")
    has_layout = not is_model or any(word.startswith(layout_fields) for word in overrides)
    return architecture, config, has_layout


def main() -> None:
    """Run the command. A wrong option, like any wrong input, ends it with one line and code 2."""
    try:
        sys.exit(app(standalone_mode=False))
    except TyperException as error:
        message = error.format_message()
        if message:  # without a command, the help has been printed
            print(f"qurl: {message.removesuffix('.')}; see qurl --help", file=sys.stderr)
        sys.exit(2)
