"""Plot runs as SVG.

The plots answer whether quantized rollouts are safe for a run: QuRL's Figures 2 (reward), 3 and 4b
(divergence and ratios of the quantized policy) and 9 (weight updates and quantization error), the
measures of Figure 9 in every layer, evaluations, and the time of each phase.
"""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from qurl_megatron.report.metrics import MAX_REWARDS, PHASES
from qurl_megatron.report.record import RunRecord

COLOURS = (  # legible on light and on dark paper
    "#2b8cd6", "#e69f00", "#009e73", "#cc79a7", "#8c6fd1", "#d55e00", "#8a8a8a", "#a3a500",
)  # fmt: skip
INK = "#010203"  # placeholder for the page's text colour, light or dark
# Metrics whose axis is logarithmic.
LOGARITHMIC = {"kl_behaviour_proximal_k3", "weight_update_norm", "weight_quant_error", "grad_norm"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LINEAR_PROJECTIONS = (  # of linear attention
    *(f"in_proj_qkv:{part}" for part in ("query", "key", "value")), "in_proj_z", "out_proj",
)  # fmt: skip
WINDOWS_PER_RUN = 20  # the window of a running mean is this part of the steps: a twentieth

matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.formatter.limits": (-3, 5),  # so that the labels of ticks fit in the margin
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        **dict.fromkeys(
            ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
        ),
    }
)


Plot = Callable[[Axes, list[RunRecord]], None]
"""A function that draws runs into the axes of one plot."""


def svg(title: str, plot: Plot, runs: list[RunRecord]) -> str:
    """Return a plot as an SVG element that takes the page's text colour.

    The title is not drawn. It must be unique on a page, because element ids are derived from it.
    """
    figure = Figure(figsize=(4.6, 2.9))
    # Margins that all plots fit in: to fit each, matplotlib would draw it once more.
    figure.subplots_adjust(left=0.2, right=0.97, bottom=0.17, top=0.9)
    plot(figure.add_subplot(xlabel="step"), runs)
    output = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(output, format="svg", transparent=True, metadata={"Date": None})
    text = output.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def run_colour(number: int) -> str:
    """Return the colour of the run with this index on the page."""
    return COLOURS[number % len(COLOURS)]


def curves(axes: Axes, runs: list[RunRecord], metrics: Sequence[str], ylabel: str) -> None:
    """Draw metrics over steps: one line for each run and metric."""
    for number, metric, style in _lines(axes, metrics, runs):
        _draw(axes, runs[number], metric, runs[number].series(metric), **style)
    axes.set_ylabel(ylabel)


def _draw(axes: Axes, run: RunRecord, metric: str, values: list[float], **style: Any) -> None:
    """Draw each step's value as a thin line, the running mean of known values as a thick one."""
    steps = run.series("step")
    axes.plot(steps, values, **(style | {"label": None}), alpha=0.35, linewidth=0.8)
    known = {step: value for step, value in zip(steps, values, strict=True) if value == value}
    means = _running_mean(list(known.values()))
    axes.plot(list(known), means, **style, linewidth=1.6)
    if metric in LOGARITHMIC and any(value > 0 for value in values):
        axes.set_yscale("log")
    if axes.dataLim.y0 == axes.dataLim.y1 == 0:
        axes.set_ylim(0, 1)  # of zeros only; the default would show 0 amid -0.05 to 0.05
    else:
        axes.autoscale(axis="y")


def reward(axes: Axes, runs: list[RunRecord]) -> None:
    """Draw the mean reward as a line, and held-out accuracy as dots with standard errors."""
    curves(axes, runs, ["reward_mean"], "reward, held-out accuracy")
    for number, run in enumerate(runs):
        points = {0: _held_out(run.before)}
        points |= {step["step"]: _held_out(step) for step in run.steps}
        if run.summary:
            points[run.steps[-1]["step"]] = _held_out(run.summary, "_after")
        accuracies, errors = zip(*points.values(), strict=True)
        axes.errorbar(list(points), accuracies, errors, fmt="o", color=run_colour(number))


def _held_out(measured: dict[str, Any], when: str = "") -> tuple[float, float]:
    """Return a held-out accuracy and its standard error; NaN and 0 if they were not measured."""
    accuracy = measured.get(f"held_out_accuracy{when}")
    error = measured.get(f"held_out_standard_error{when}")
    return math.nan if accuracy is None else accuracy, error or 0.0


def divergence(axes: Axes, runs: list[RunRecord]) -> None:
    """Draw KL(behaviour, proximal); that of the evaluation servers before training is a dot."""
    metric = "kl_behaviour_proximal_k3"
    curves(axes, runs, [metric], "nats")
    with_mismatch = [number for number, run in enumerate(runs) if "evaluation" in run.mismatch]
    for number in with_mismatch:
        axes.axhline(
            runs[number].mismatch["evaluation"][metric],
            linestyle=":",
            color=run_colour(number),
            label="evaluation servers before training" if number == with_mismatch[-1] else None,
        )
    if with_mismatch:
        axes.legend(fontsize=7)


def by_staleness(axes: Axes, runs: list[RunRecord], metric: str) -> None:
    """Draw a metric of `by_staleness` for a single run: a line for each, with gaps if no tokens."""
    (run,) = runs
    tables = [step.get("by_staleness") or {} for step in run.steps]
    for number, staleness in enumerate(
        sorted({staleness for table in tables for staleness in table})
    ):
        values = [table.get(staleness, {}).get(metric, math.nan) for table in tables]
        _draw(axes, run, metric, values, color=run_colour(number), label=f"staleness {staleness}")
    axes.set_ylabel("nats" if metric in LOGARITHMIC else "fraction of tokens")
    axes.legend(fontsize=7)


def evaluation(axes: Axes, runs: list[RunRecord], name: str) -> None:
    """Draw one file's averages over steps, with their standard errors."""
    scores = [run.scores() for run in runs]
    keys = dict.fromkeys(key for of_run in scores for key in of_run)
    measures = [measure for each, measure in keys if each == name]
    for number, measure, style in _lines(axes, measures, runs):
        averages = scores[number].get((name, measure), {})
        means = [average["mean"] for average in averages.values()]
        errors = [average["standard_error"] for average in averages.values()]
        axes.errorbar(list(averages), means, yerr=errors, **style, marker="o", markersize=3)
    axes.set_ylabel("fraction of answers correct")


def phase_times(axes: Axes, runs: list[RunRecord]) -> None:
    """Draw the seconds of each phase of a step, stacked, for a single run."""
    (run,) = runs
    times = {phase: run.series(f"time_{phase}_s") for phase in PHASES}
    if run.config.objective.advantage_estimator != "gae":
        del times["critic"]
    times = {phase: _running_mean(series) for phase, series in times.items()}
    axes.stackplot(run.series("step"), *times.values(), labels=list(times), colors=COLOURS)
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    # Above the axes, because a legend over the stacked areas would hide their colours.
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=len(times), handlelength=1, fontsize=7
    )


def reward_distribution(axes: Axes, runs: list[RunRecord]) -> None:
    """Draw the share of each reward among the sampled completions over steps, for a single run."""
    (run,) = runs
    points = [
        (step["step"], reward, count / sum(count for _, count in step["reward_counts"]))
        for step in run.steps
        for reward, count in step.get("reward_counts") or []
    ]
    steps, rewards, weights = zip(*points, strict=True)
    low, high = min(rewards), max(rewards)
    rows = min(len(set(rewards)), MAX_REWARDS)
    width = (high - low) / max(1, rows - 1) or 1.0  # of a row; rows are centred on their rewards
    first, last = run.steps[0]["step"], run.steps[-1]["step"]
    *_, image = axes.hist2d(
        steps,
        rewards,
        weights=weights,
        bins=(last - first + 1, rows),
        range=((first - 0.5, last + 0.5), (low - width / 2, high + width / 2)),
        vmin=0.0,
        vmax=1.0,
        rasterized=True,
    )
    axes.set_ylabel("reward")
    if rows <= 5:
        axes.set_yticks(sorted(set(rewards)))
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label="share of completions")


def layer_grid(axes: Axes, runs: list[RunRecord], metric: str) -> None:
    """Draw a heat map of a measure for a single run: a row per layer, a column per projection.

    Experts count as one projection, with the mean of their measures. A layer that stays in BF16 is
    left empty.
    """
    (run,) = runs
    layers: dict[int, dict[str, list[float]]] = {}
    for name, measures in run.weights.items():
        # A name is such as model.layers.0.mlp.up_proj.weight.
        _, _, layer, *_, projection, _ = name.split(".")
        layers.setdefault(int(layer), {}).setdefault(projection, []).append(measures[metric])
    columns: tuple[str, ...] = PROJECTIONS
    if any("out_proj" in measured for measured in layers.values()):
        columns += LINEAR_PROJECTIONS
    grid = [
        [fmean(layers[layer].get(projection, [math.nan])) for projection in columns]
        for layer in sorted(layers)
    ]
    positive = [value for row in grid for value in row if value > 0]
    norm = LogNorm(min(positive), max(positive)) if positive else None
    image = axes.imshow(grid, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
    names = [p.rpartition(":")[2].removesuffix("_proj").removeprefix("in_proj_") for p in columns]
    axes.set_xticks(range(len(columns)), names, rotation=0 if columns == PROJECTIONS else 45)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="", ylabel="layer")
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes)


_CURVES: dict[str, tuple[str, ...]] = {  # title -> label of the y axis, metrics
    "Largest ratio proximal / behaviour": ("ratio", "ratio_proximal_behaviour_max"),
    "Tokens truncated at C, tokens kept by ACR": (
        "fraction of tokens",
        "tis_truncated_fraction",
        "acr_widened_fraction",
    ),
    "Clipped tokens": ("fraction of tokens", "clip_fraction"),
    "Weight update (Eq. 13), error (Eq. 14)": (
        "relative to weights",
        "weight_update_norm",
        "weight_quant_error",
    ),
    "Quantized codes changed by each publish": ("fraction of codes", "code_flip_fraction"),
    "Entropy": ("nats", "entropy"),
    "Mean completion length": ("tokens", "completion_length_mean"),
    "Cut-off completions, equal rewards": (
        "fraction",
        "completion_truncated_fraction",
        "equal_reward_fraction",
    ),
    "Verifier failures": ("completions per step", "verifier_failures"),
    "Loss": ("loss", "loss"),
    "Gradient norm, before clipping": ("norm", "grad_norm"),
    "Learning rate": ("learning rate", "learning_rate"),
}
TRAINING_PLOTS: dict[str, Plot] = {
    "Reward (line) and held-out accuracy (dots)": reward,
    "KL(behaviour, proximal), k3 estimate": divergence,
    **{
        title: partial(curves, metrics=metrics, ylabel=ylabel)
        for title, (ylabel, *metrics) in _CURVES.items()
    },
}
STALENESS_PLOTS: dict[str, Plot] = {
    "KL(behaviour, proximal) by token staleness": partial(
        by_staleness, metric="kl_behaviour_proximal_k3"
    ),
    "Tokens truncated at C, by staleness": partial(by_staleness, metric="tis_truncated_fraction"),
    "Clipped tokens, by staleness": partial(by_staleness, metric="clip_fraction"),
    "Trained tokens, by staleness": partial(by_staleness, metric="token_fraction"),
}
LAYER_PLOTS: dict[str, Plot] = {
    "Quantization error (Eq. 14)": partial(layer_grid, metric="weight_quant_error"),
    "Weight update (Eq. 13)": partial(layer_grid, metric="weight_update_norm"),
    "Fraction of codes changed": partial(layer_grid, metric="code_flip_fraction"),
}


def _lines(
    axes: Axes, metrics: Sequence[str], runs: list[RunRecord]
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the run's index, metric and style of each line; add a legend of several metrics.

    With one run, colours tell metrics apart. With several, colours tell runs apart, as the page's
    own legend says, and dashes tell metrics apart.
    """
    several = len(runs) > 1
    legend = []
    for number in range(len(runs)):
        for index, metric in enumerate(metrics):
            style: dict[str, Any] = {
                "color": run_colour(number if several else index),
                "linestyle": ("-", "--")[index % 2 if several else 0],
            }
            yield number, metric, style
            if number == 0:
                ink = {"color": INK} if several else {}
                legend.append(Line2D([], [], **(style | ink), label=metric.replace("_", " ")))
    if len(legend) > 1:
        axes.legend(handles=legend, fontsize=7, handlelength=3)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and those before it, over a window of 1/20 of all values."""
    window = max(1, len(values) // WINDOWS_PER_RUN)
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
