"""The `qurl` command. A wrong word ends it with one line and exit code 2; nothing has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.prepare import load_recipe, prepare_new, prepare_resume, recipe_names, refusals

if TYPE_CHECKING:
    from qurl_megatron.config.schema import Config
    from qurl_megatron.model.architecture import Architecture
    from qurl_megatron.model.huggingface import Progress
    from qurl_megatron.planning.plan import Plan

# Before torch, transformers or SGLang are imported; their warnings are not the run's to give.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def qurl() -> None:
    """Reinforcement learning with quantized rollouts on Megatron-core and SGLang."""


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="a module of recipes/, such as quickstart")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="fields to change")
    ] = None,
) -> None:
    """Run a recipe on this machine: start its servers and learner ranks, and watch them."""
    from launch import local
    from qurl_megatron.device import num_gpus

    with refusals():
        config = prepare_new(recipe, overrides or [], num_gpus())
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
    from qurl_megatron.device import num_gpus

    with refusals():
        config = prepare_resume(run_dir, overrides or [], num_gpus())
    sys.exit(local.run(config))


@app.command()
def launch(
    recipe: Annotated[str, typer.Argument(help="a module of recipes/, such as quickstart")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="fields to change")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE,VALUE", help="a run for each; of several, each pair"),
    ] = None,
    executor: Annotated[str, typer.Option(help="local or slurm")] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would be started")] = False,
    account: Annotated[str | None, typer.Option(help="of the job")] = None,
    partition: Annotated[str | None, typer.Option(help="of the job")] = None,
    time: Annotated[str | None, typer.Option(help="limit of the job, such as 04:00:00")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(help="that a node has; 8 unless told")
    ] = None,
    heterogeneous: Annotated[
        bool, typer.Option("--heterogeneous", help="a job of two kinds of nodes, not equal ones")
    ] = False,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="OPTION=VALUE", help="any other, such as qos=high")
    ] = None,
    container_image: Annotated[str | None, typer.Option(help="pyxis's, for the steps")] = None,
    container_mounts: Annotated[str | None, typer.Option(help="A:B,C:D")] = None,
    max_restarts: Annotated[int | None, typer.Option(help="of a job; 20 unless told")] = None,
) -> None:
    """Run a recipe, or a sweep over it, by nemo-run: here, or as jobs on as many nodes as it takes.

    Slurm jobs are requeued and go on as those of launch/qurl.sbatch do.
    """
    with refusals():
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
        list[Path], typer.Argument(metavar="RUN...", help="directories of runs, runs/NAME")
    ],
) -> None:
    """Say how far runs have come, and whether they are running."""
    from launch.status import status

    with refusals():
        for run_dir in run_dirs:
            print(f"{run_dir}: {status(run_dir)}", flush=True)


@app.command()
def logs(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="a run's directory, runs/NAME")],
    lines: Annotated[int, typer.Option(help="of each log")] = 20,
) -> None:
    """Show the ends of the newest logs of a run: its job's, its servers', its learner ranks'."""
    from launch.status import newest_logs
    from qurl_megatron.process import tail

    with refusals():
        for path in newest_logs(run_dir):
            print(f"==> {path} <==\n{tail(path, lines)}\n")


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="RUN/checkpoints/step_NNNNNN")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="a directory to be made")],
) -> None:
    """Make a Hugging Face directory of a checkpoint, UAQ undone."""
    with refusals(), progress_bar("exporting") as progress:
        from qurl_megatron.weight_sync.export import export_checkpoint

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
        from qurl_megatron.config.overrides import with_overrides
        from qurl_megatron.loop.avg_at_k import EvalConfig
        from qurl_megatron.rollout.server import ServerFailed

        data = [word for word in words if "=" not in word]
        settings = [word for word in words if "=" in word]
        try:
            evaluate.run(with_overrides(EvalConfig(model=model, data=data), settings))
        except ServerFailed as failure:
            print(f"qurl: {failure}", file=sys.stderr)
            sys.exit(1)


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
    from qurl_megatron.report.page import write_report

    output = output or run_dirs[0] / "report" / "index.html"
    with refusals():
        write_report(run_dirs, output)
    print(f"{output} is ready")


_NOT_YET = "as if the learner had it; it has not yet"

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
    """Quantize a Hugging Face directory as a publish would, for an SGLang server to load.

    Killed, it goes on where it was when it is called again.
    """
    from typing import get_args

    from qurl_megatron.config.schema import ConfigError, WeightFormat
    from qurl_megatron.quantization.offline import quantize_directory

    with refusals(), progress_bar(f"quantizing to {weight_format}") as progress:
        if weight_format not in get_args(WeightFormat):
            raise ConfigError(
                f"--format {weight_format}: formats are {', '.join(get_args(WeightFormat))}"
            )
        quantize_directory(source, destination, weight_format, progress)  # type: ignore[arg-type]
    print(f"{destination} is ready")


@app.command()
def uaq(
    source: SourceDirectory,
    destination: NewDirectory,
    scale: Annotated[float, typer.Option(help="s of Eq. 11")] = 1.5,
    undo: Annotated[bool, typer.Option("--undo", help="give the original back")] = False,
) -> None:
    """Scale a Hugging Face directory by UAQ, or undo it, and say what that did to its logits."""
    from qurl_megatron.config.schema import ConfigError, UaqConfig
    from qurl_megatron.quantization.offline import scale_directory, unscale_directory

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


@app.command("plan")
def plan_command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RECIPE",
            help="a directory with config.json, Qwen2.5-32B, Qwen3-32B, or a module of recipes/",
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[FIELD=VALUE]...", help="fields to change")
    ] = None,
    gpus: Annotated[int, typer.Option(min=2, help="H100s of learner and servers together")] = 64,
    mean_prompt: Annotated[
        float | None, typer.Option(help="tokens; by default half of max_prompt_length")
    ] = None,
    mean_response: Annotated[
        float | None, typer.Option(help="tokens; by default half of max_response_length")
    ] = None,
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel", help=_NOT_YET)] = False,
    distributed_optimizer: Annotated[
        bool, typer.Option("--distributed-optimizer", help=_NOT_YET)
    ] = False,
) -> None:
    """Say what a run needs in memory and takes in time on N H100s; nothing is allocated.

    A model gets the layout with the shortest step, unless a field names one; a recipe keeps its
    own. What does not fit is refused, with the part that breaks it.
    """
    with refusals():
        from qurl_megatron.planning.memory import Savings
        from qurl_megatron.planning.plan import plan_or_suggest
        from qurl_megatron.planning.step_time import Workload

        architecture, config, has_layout = _to_plan(what, overrides or [])
        half = Workload.half(config)
        found = plan_or_suggest(
            architecture,
            config,
            gpus,
            Savings(sequence_parallel, distributed_optimizer),
            Workload(
                half.mean_prompt if mean_prompt is None else mean_prompt,
                half.mean_response if mean_response is None else mean_response,
            ),
            has_layout=has_layout,
        )
    _print_plan(found)


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


def _to_plan(what: str, overrides: list[str]) -> tuple[Architecture, Config, bool]:
    """Shape and configuration of a recipe, or of a model under the 32B study's; has it a layout?

    Raises:
        ArchitectureError, ConfigError: one line.
    """
    from qurl_megatron.config.overrides import with_overrides
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.model.architecture import Architecture
    from recipes.scaling_32b import ARCHITECTURES

    is_model = what in ARCHITECTURES or Path(what).is_dir()
    if is_model:
        overrides = [f"model={what}", *overrides]
    elif what not in recipe_names():
        raise ConfigError(
            f"{what}: no such directory, model ({', '.join(ARCHITECTURES)}) or recipe "
            f"({', '.join(recipe_names())})"
        )
    recipe = load_recipe("scaling_32b" if is_model else what).recipe()
    config = with_overrides(recipe, overrides)
    if not config.model:
        raise ConfigError(
            f"model=: missing; give a directory with config.json, or {' or '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES.get(config.model) or Architecture.from_directory(config.model)
    layout = ("learner.", "rollout.server.tensor_parallel_size")
    return architecture, config, not is_model or any(word.startswith(layout) for word in overrides)


def _print_plan(plan: Plan) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from qurl_megatron.planning.memory import GIB, GPU_BYTES
    from qurl_megatron.planning.plan import layout_words

    def table(title: str, column: str, rows: dict[str, float], total: tuple[str, float]) -> Table:
        made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", show_footer=True)
        made.add_column("", footer=total[0])
        made.add_column(column, justify="right", footer=f"{total[1]:.1f}")
        for name, value in rows.items():
            made.add_row(name, f"{value:.1f}")
        return made

    def memory(parts: dict[str, int]) -> dict[str, float]:
        return {name: num_bytes / GIB for name, num_bytes in parts.items()}

    config, server = plan.config, plan.config.rollout.server
    console = Console(highlight=False)
    console.print(f"{plan.gpus} H100: {' '.join(layout_words(config))}", soft_wrap=True)
    if plan.savings.names:
        console.print(f"as if the learner had: {', '.join(plan.savings.names)}")
    console.print(
        table(
            f"learner, {config.learner.world_size} GPUs, the fullest of them",
            f"GiB of {GPU_BYTES / GIB:.1f}",
            {
                **memory(plan.learner_bytes),
                "or, publishing, buckets": plan.converter_bucket_bytes / GIB,
            },
            ("at most", plan.learner_total_bytes / GIB),
        ),
        table(
            f"rollout.servers={plan.servers}, in {config.quantization.format}, of "
            f"{server.tensor_parallel_size} GPUs, each GPU",
            f"GiB of {GPU_BYTES / GIB:.1f}",
            memory(plan.server_bytes),
            ("in all", sum(plan.server_bytes.values()) / GIB),
        ),
        table("a step", "s", plan.step_s, ("in all", plan.total_s)),
    )
    console.print(
        f"A server keeps {plan.kv_tokens:,} tokens and decodes {plan.slots} sequences at once. A "
        f"publish sends {plan.publish_bytes / 1e9:.1f} GB. Formulas, sources and what is left out: "
        "qurl_megatron/planning/memory.py and step_time.py; how far off: docs/findings.md.",
        soft_wrap=True,
    )


def main() -> None:
    app()
