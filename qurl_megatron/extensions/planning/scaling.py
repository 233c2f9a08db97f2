"""A run on several numbers of GPUs, planned and measured: as a table, as CSV and as a picture."""

import csv
import dataclasses
import io
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from rich import box
from rich.table import Table

from qurl_megatron.config.gpus import Node
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.extensions.colocated.fit import check_fields
from qurl_megatron.extensions.planning.lengths import Workload
from qurl_megatron.extensions.planning.page import describe_workload, print_layout
from qurl_megatron.extensions.planning.plan import (
    REMEDIES,
    Plan,
    layout_overrides,
    placements,
    plan_or_suggest,
    plan_run,
    suggest,
)
from qurl_megatron.files import check_output, write_whole
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.weight_map import num_parameters
from qurl_megatron.report.metrics import PHASES
from qurl_megatron.report.progress import table_console
from qurl_megatron.report.record import read_run

PICTURES = (".svg", ".png")
COLOURS = ("#00798c", "#66a182", "#d1495b", "#edae49", "#8d96a3", "#2e4057", "#a06cd5")


@dataclass(frozen=True)
class Row:
    """A plan, with the measured run that it plans, if there is one."""

    plan: Plan
    placements_s: Mapping[str, float | None] = field(default_factory=dict)
    """Seconds of a step in each placement that was compared; None: it does not fit."""
    run: str = ""
    measured_s: dict[str, float] = field(default_factory=dict)  # by phase; empty without a run

    @property
    def measured_step_s(self) -> float:
        """Measured time of a step, in seconds."""
        return sum(self.measured_s.values())


def planned_row(
    architecture: Architecture,
    config: Config,
    gpus: int,
    workload: Workload,
    node: Node,
    given: Collection[str] | None,
) -> Row:
    """Return the plan of the fastest placement with the `given` fields; None: of that in `config`.

    Servers sample ahead only if `rollout.max_staleness` is given, since it changes what is learned.

    Raises:
        ConfigError: no placement fits; the message is of the last, which takes the least memory.
    """
    if given is None:
        return Row(plan_or_suggest(architecture, config, gpus, workload, node))
    candidates = placements(config, given)
    if not candidates:
        check_fields(config)  # all else has a placement
    plans: dict[str, Plan | None] = {}
    refusals = []
    for name, candidate in candidates.items():
        try:
            plans[name] = suggest(architecture, candidate, gpus, workload, node, given)
        except ConfigError as error:
            plans[name] = None
            refusals.append(error)
    is_given = "rollout.max_staleness" in given
    fitting = [each for name, each in plans.items() if each and (is_given or name != "ahead")]
    if not fitting:
        raise refusals[-1]
    best = min(fitting, key=lambda each: each.total_s)
    return Row(best, {name: each.total_s if each else None for name, each in plans.items()})


def measured_row(run_dir: Path, model: Architecture, workload: Workload, node: Node) -> Row:
    """Return the times of a run beside the plan of its own layout and mean completion length.

    Times are medians over all steps but the first, in which servers and learner warm up.

    Raises:
        ConfigError: the run has another model, or its layout cannot be planned.
    """
    run = read_run(run_dir)
    architecture = Architecture.from_directory(run.config.model)
    if num_parameters(architecture) != num_parameters(model):
        raise ConfigError(
            f"--measured {run_dir}: {run.config.model} is not the model that is planned; it has "
            f"{num_parameters(architecture):,} parameters, not {num_parameters(model):,}"
        )
    steps = run.steps[1:] or run.steps
    sampled = fmean(step["completion_length_mean"] for step in steps)
    observed = fmean(step.get("observed_length_mean") or 0.0 for step in steps)
    completion = sampled + observed
    lengths = dataclasses.replace(
        workload, mean_completion=completion, observed=observed / completion if completion else 0.0
    )
    measured_s = {phase: median(step[f"time_{phase}_s"] for step in steps) for phase in PHASES}
    try:
        planned = plan_run(architecture, run.config, lengths, node)
    except ConfigError as error:
        raise ConfigError(f"--measured {run_dir}: {error}") from None
    return Row(planned, run=run.name, measured_s=measured_s)


def check_outputs(files: Iterable[Path]) -> None:
    """Check that the files can be written, before anything is planned.

    Raises:
        ConfigError, OSError: a file's ending is unknown, its directory is missing, or something
            other than a file is there.
    """
    for file in files:
        if file.suffix not in (".csv", *PICTURES):
            raise ConfigError(f"--output {file}: must end in .csv, {' or '.join(PICTURES)}")
        if not file.parent.is_dir():
            raise ConfigError(f"--output {file}: there is no directory {file.parent}; make it")
        check_output(file)


def write(rows: list[Row], file: Path) -> None:
    """Write the rows as CSV or as a picture, by the ending of `file`."""
    if file.suffix != ".csv":
        return _draw(rows, file)
    lines = [_values(rows, row) for row in rows]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(lines[0]))
    writer.writeheader()
    writer.writerows(lines)
    write_whole(file, stream.getvalue())


def print_rows(rows: list[Row], refusals: Mapping[int, ConfigError]) -> None:
    """Print a line for each row, and one for each number of GPUs on which nothing fits."""
    console, has_runs = table_console(), any(row.run for row in rows)
    table = Table(box=box.SIMPLE_HEAD)
    measured = ["measured, s", "measured / planned", "run"] if has_runs else []
    compared = max((row.placements_s for row in rows), key=len)
    columns = [*compared] if len(compared) > 1 else []
    for name in ("GPUs", *columns, "step, s", "of ideal", "GPU-hours", "limit", *measured):
        table.add_column(name, justify="left" if name in ("limit", "run") else "right")
    for row in rows:
        values = _values(rows, row)
        cells = [
            f"{row.plan.gpus}",
            *(_seconds(row.placements_s.get(name)) for name in columns),
            f"{row.plan.total_s:.0f}",
            f"{values['of_ideal']:.0%}",
            f"{values['gpu_hours']:,.0f}",
            f"{values['limit']}",
        ]
        if row.run:
            ratio = row.measured_step_s / row.plan.total_s
            cells += [f"{row.measured_step_s:.1f}", f"{ratio:.2f}", row.run]
        table.add_row(*cells)
    console.print(table)
    for row in rows:
        print_layout(console, row.plan)
    for line in describe_workload(rows[0].plan):
        console.print(line, soft_wrap=True)
    for gpus, refusal in refusals.items():
        console.print(f"{gpus}: {refusal}", soft_wrap=True)


def _seconds(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s:.0f}"


def _values(rows: list[Row], row: Row) -> dict[str, str | float]:
    """Return a row's values in the CSV, by column."""
    plan, first = row.plan, rows[0].plan
    hours = plan.config.steps * plan.total_s / 3600
    parts = plan.parts_s
    return {
        "gpus": plan.gpus,
        "gpu": plan.node.gpu.name,
        "step_s": plan.total_s,
        "of_ideal": first.total_s * first.gpus / (plan.total_s * plan.gpus),
        "hours": hours,
        "gpu_hours": hours * plan.gpus,
        "limit": max(parts, key=lambda part: parts[part]),
        **{f"{phase}_s": time_s for phase, time_s in plan.step_s.items() if phase != "copies"},
        **{f"part_{part.replace(' ', '_')}_s": parts.get(part, 0.0) for part in REMEDIES},
        "run": row.run,
        "measured_step_s": row.measured_step_s if row.run else "",
        **{f"measured_{phase}_s": row.measured_s.get(phase, "") for phase in PHASES},
        "layout": " ".join(layout_overrides(plan.config)),
    }


def _draw(rows: list[Row], file: Path) -> None:
    """Draw the time of a step, and below it the parts that make it up."""
    import matplotlib
    from matplotlib.figure import Figure

    plans = [row.plan for row in rows if not row.run] or [row.plan for row in rows]
    runs = [row for row in rows if row.run]
    gpus = [plan.gpus for plan in plans]
    figure = Figure(figsize=(7, 7), layout="constrained")
    times, shares = figure.subplots(2, 1)
    ideal = [plans[0].total_s * plans[0].gpus / number for number in gpus]
    times.plot(gpus, [plan.total_s for plan in plans], COLOURS[0], marker="s", label="planned")
    times.plot(gpus, ideal, "#777777", linestyle=":", label="twice the GPUs, half the time")
    if runs:
        measured = [row.measured_step_s for row in runs]
        of_runs = [row.plan.gpus for row in runs]
        times.plot(of_runs, measured, COLOURS[2], marker="o", linestyle="", label="measured")
    times.set(xscale="log", yscale="log", ylabel="seconds a step")
    times.grid(alpha=0.3, which="both")
    times.legend(fontsize=8)
    names = [name for name in REMEDIES if any(plan.parts_s.get(name) for plan in plans)]
    parts = [[100 * plan.parts_s.get(name, 0.0) / plan.total_s for plan in plans] for name in names]
    places = range(len(plans))
    bottom = [0.0] * len(plans)
    for name, part, colour in zip(names, parts, COLOURS, strict=False):
        shares.bar(places, part, bottom=bottom, label=name, color=colour)
        bottom = [low + height for low, height in zip(bottom, part, strict=True)]
    shares.set(xlabel=f"{plans[0].node.gpu.name}, learner and servers", ylabel="% of a step")
    shares.set_xticks(places, [str(number) for number in gpus])
    shares.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    numbers = sorted({*gpus, *(row.plan.gpus for row in runs)})
    times.set_xticks(numbers, [str(number) for number in numbers])
    times.set_xticks([], minor=True)
    times.yaxis.set_major_formatter("{x:g}")
    times.yaxis.set_minor_formatter("{x:g}")
    times.tick_params(axis="y", which="minor", labelsize=7)
    config = plans[0].config
    figure.suptitle(
        f"{Path(config.model).name} in {config.quantization.format}: "
        f"{config.rollout.prompts_per_step} x {config.rollout.completions_per_prompt} completions "
        f"of {plans[0].workload.mean_completion:,.0f} tokens",
        fontsize=11,
    )
    # The salt makes the file reproducible. Text in place of outlines makes it a tenth as large.
    with matplotlib.rc_context({"svg.hashsalt": "plan", "svg.fonttype": "none"}):
        kind = file.suffix.removeprefix(".")
        date = {"Date": None} if kind == "svg" else None
        write_whole(file, lambda path: figure.savefig(path, format=kind, metadata=date))
