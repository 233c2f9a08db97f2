"""The plots of the report, as SVG: what each shows, and how lines and colours tell runs apart.

They answer whether quantized rollouts are safe for a run: QuRL's Figures 2 (reward), 3 and 4b
(divergence and ratios of the quantized policy) and 9 (weight updates and quantization error), the
measures of Figure 9 in every layer, evaluations, and the time of each phase.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from qurl_megatron.report.metrics import MAX_REWARDS, PHASES
from qurl_megatron.report.record import RunRecord, evaluation_measures

COLOURS = (  # legible on light and on dark paper
    "#2b8cd6", "#e69f00", "#009e73", "#cc79a7", "#8c6fd1", "#d55e00", "#8a8a8a", "#a3a500",
)  # fmt: skip
INK = "#010203"  # placeholder for the page's text colour, light or dark
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WINDOWS_PER_RUN = 20  # the window of a running mean is this part of the steps: a twentieth

matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "font.size": 9,
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
    """Return a plot as an SVG element that scales with the page and takes its text colour.

    The title is not drawn. It must be unique on a page, because element ids are derived from it.
    """
    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    axes = figure.add_subplot()
    plot(axes, runs)
    output = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(output, format="svg", transparent=True, metadata={"Date": None})
    text = output.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)


def run_colour(number: int) -> str:
    """Return the colour of the run with this index on the page."""
    return COLOURS[number % len(COLOURS)]


def curves(*metrics: str, ylabel: str, log: bool = False) -> Plot:
    """Return a plot of metrics over steps: one line for each run and metric."""

    def plot(axes: Axes, runs: list[RunRecord]) -> None:
        for number, run in enumerate(runs):
            steps = run.series("step")
            for metric, style in _line_styles(metrics, number, runs).items():
                values = run.series(metric)
                axes.plot(steps, values, **style, alpha=0.35, linewidth=0.8)
                axes.plot(steps, _running_mean(values), **style, linewidth=1.6)
        if log and any(v > 0 for run in runs for metric in metrics for v in run.series(metric)):
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        _add_legend(axes, metrics, runs)

    return plot


def reward(axes: Axes, runs: list[RunRecord]) -> None:
    """Draw the mean reward as a line, and held-out accuracy as dots where it was measured."""
    curves("reward_mean", ylabel="reward, held-out accuracy")(axes, runs)
    for number, run in enumerate(runs):
        accuracies = [
            (step["step"], step["held_out_accuracy"])
            for step in run.steps
            if step["held_out_accuracy"] is not None
        ]
        for step, when in [(0, "before"), (run.steps[-1]["step"], "after")]:
            accuracy = run.summary.get(f"held_out_accuracy_{when}")
            if accuracy is not None:
                accuracies.append((step, accuracy))
        if accuracies:
            axes.plot(*zip(*sorted(accuracies), strict=True), "o", color=run_colour(number))


def divergence(axes: Axes, runs: list[RunRecord]) -> None:
    """Draw KL(behaviour, proximal), and as dots that of the BF16 servers before training."""
    metric = "kl_behaviour_proximal_k3"
    curves(metric, ylabel="nats", log=True)(axes, runs)
    with_mismatch = [number for number, run in enumerate(runs) if "evaluation" in run.mismatch]
    for number in with_mismatch:
        axes.axhline(
            runs[number].mismatch["evaluation"][metric],
            linestyle=":",
            color=run_colour(number),
            label="BF16 servers before training" if number == with_mismatch[-1] else None,
        )
    if with_mismatch:
        axes.legend(fontsize=7)


def by_lag(metric: str, ylabel: str, log: bool = False) -> Plot:
    """Return a plot of a metric of `by_lag` for one run: one line for each lag."""

    def plot(axes: Axes, runs: list[RunRecord]) -> None:
        (run,) = runs
        series = run.series_by_lag(metric)
        for number, (lag, values) in enumerate(series.items()):
            colour = run_colour(number)
            axes.plot(run.series("step"), values, color=colour, alpha=0.35, linewidth=0.8)
            measured = [(s, v) for s, v in zip(run.series("step"), values, strict=True) if v == v]
            steps, known = zip(*measured, strict=True)
            axes.plot(steps, _running_mean(known), color=colour, linewidth=1.6, label=f"lag {lag}")
        if log and any(value > 0 for values in series.values() for value in values):
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        axes.legend(fontsize=7)

    return plot


def evaluation(name: str) -> Plot:
    """Return a plot of one file's averages over steps, with their standard errors."""

    def plot(axes: Axes, runs: list[RunRecord]) -> None:
        measures = evaluation_measures(runs)[name]
        for number, run in enumerate(runs):
            by_step = run.evaluations().get(name, {})
            for measure, style in _line_styles(measures, number, runs).items():
                steps = [step for step, averages in by_step.items() if measure in averages]
                axes.errorbar(
                    steps,
                    [by_step[step][measure]["mean"] for step in steps],
                    yerr=[by_step[step][measure]["standard_error"] for step in steps],
                    **style,
                    marker="o",
                    markersize=3,
                )
        axes.set_xlabel("step")
        axes.set_ylabel("fraction of answers correct")
        _add_legend(axes, measures, runs)

    return plot


def phase_times(axes: Axes, runs: list[RunRecord]) -> None:
    """Draw the seconds of each phase of a step, stacked, for a single run."""
    (run,) = runs
    times = {phase: run.series(f"time_{phase}_s") for phase in PHASES}
    if run.config.advantage_estimator != "gae":
        del times["critic"]
    times = {phase: _running_mean(series) for phase, series in times.items()}
    axes.stackplot(run.series("step"), *times.values(), labels=list(times), colors=COLOURS)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    # Above the axes, because a legend over the stacked areas would hide their colours.
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        ncols=len(times),
        handlelength=1,
        fontsize=7,
    )


def reward_distribution(axes: Axes, runs: list[RunRecord]) -> None:
    """Draw the share of each reward among the sampled completions over steps, for a single run."""
    (run,) = runs
    by_step = [dict(map(tuple, step.get("reward_counts") or [])) for step in run.steps]
    rewards = sorted({reward for counts in by_step for reward in counts})
    low, high = rewards[0], rewards[-1]
    rows = min(len(rewards), MAX_REWARDS)
    width = (high - low) / max(1, rows - 1) or 1.0  # of a row; rows are centred on their rewards
    shares = [[0.0 if counts else math.nan for counts in by_step] for _ in range(rows)]
    for column, counts in enumerate(by_step):
        for reward, count in counts.items():
            shares[round((reward - low) / width)][column] += count / sum(counts.values())
    steps = run.series("step")
    image = axes.imshow(
        shares,
        aspect="auto",
        cmap="viridis",
        vmin=0.0,
        vmax=1.0,
        origin="lower",
        interpolation="nearest",
        extent=(steps[0] - 0.5, steps[-1] + 0.5, low - width / 2, high + width / 2),
    )
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    if len(rewards) <= 5:
        axes.set_yticks(rewards)
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label="share of completions")


def layer_grid(metric: str) -> Plot:
    """Return a heat map of a measure for one run: one row per layer, one column per projection.

    Experts count as one projection, with the mean of their measures. A layer that stays in BF16 is
    left empty.
    """

    def plot(axes: Axes, runs: list[RunRecord]) -> None:
        (run,) = runs
        layers: dict[int, dict[str, list[float]]] = {}
        for name, measures in run.weights.items():
            _, _, layer, *_, projection, _ = name.split(".")
            values = layers.setdefault(int(layer), {}).setdefault(projection, [])
            values.append(measures[metric])
        grid = [
            [fmean(layers[layer].get(projection, [math.nan])) for projection in PROJECTIONS]
            for layer in sorted(layers)
        ]
        positive = [value for row in grid for value in row if value > 0]
        norm = LogNorm(min(positive), max(positive)) if positive else None
        image = axes.imshow(grid, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
        axes.set_xticks(range(len(PROJECTIONS)), [p.removesuffix("_proj") for p in PROJECTIONS])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("layer")
        assert axes.figure is not None
        axes.figure.colorbar(image, ax=axes)

    return plot


TRAINING_PLOTS: dict[str, Plot] = {
    "Reward (line) and held-out accuracy (dots)": reward,
    "KL(behaviour, proximal), k3 estimate": divergence,
    "Largest ratio proximal / behaviour": curves("ratio_proximal_behaviour_max", ylabel="ratio"),
    "Tokens truncated at C, tokens kept by ACR": curves(
        "tis_truncated_fraction", "acr_widened_fraction", ylabel="fraction of tokens"
    ),
    "Clipped tokens": curves("clip_fraction", ylabel="fraction of tokens"),
    "Weight update (Eq. 13), error (Eq. 14)": curves(
        "weight_update_norm", "weight_quant_error", ylabel="relative to weights", log=True
    ),
    "Quantized codes changed by each publish": curves(
        "code_flip_fraction", ylabel="fraction of codes"
    ),
    "Entropy": curves("entropy", ylabel="nats"),
    "Mean response length": curves("response_length_mean", ylabel="tokens"),
    "Cut-off completions, equal rewards": curves(
        "response_truncated_fraction", "equal_reward_fraction", ylabel="fraction"
    ),
    "Verifier failures": curves("verifier_failures", ylabel="completions per step"),
    "Loss": curves("loss", ylabel="loss"),
    "Gradient norm, before clipping": curves("grad_norm", ylabel="norm", log=True),
    "Learning rate": curves("learning_rate", ylabel="learning rate"),
}
LAG_PLOTS: dict[str, Plot] = {
    "KL(behaviour, proximal) by token lag": by_lag("kl_behaviour_proximal_k3", "nats", log=True),
    "Tokens truncated at C, by lag": by_lag("tis_truncated_fraction", "fraction of tokens"),
    "Clipped tokens, by lag": by_lag("clip_fraction", "fraction of tokens"),
    "Trained tokens, by lag": by_lag("token_fraction", "fraction of tokens"),
}
LAYER_PLOTS: dict[str, Plot] = {
    "Quantization error (Eq. 14)": layer_grid("weight_quant_error"),
    "Weight update (Eq. 13)": layer_grid("weight_update_norm"),
    "Fraction of codes changed": layer_grid("code_flip_fraction"),
}


def _line_styles(
    metrics: Iterable[str], number: int, runs: list[RunRecord]
) -> dict[str, dict[str, Any]]:
    """Return the style of each metric's line in the run with this index.

    With one run, colours tell metrics apart. With several, colours tell runs apart and dashes
    metrics.
    """
    several = len(runs) > 1
    return {
        metric: {
            "color": run_colour(number if several else index),
            "linestyle": ("-", "--")[index % 2 if several else 0],
        }
        for index, metric in enumerate(metrics)
    }


def _add_legend(axes: Axes, metrics: Iterable[str], runs: list[RunRecord]) -> None:
    """Add a legend of the metrics, if there are several; the page itself has one of the runs."""
    styles = _line_styles(metrics, 0, runs)
    if len(styles) > 1:
        ink = {"color": INK} if len(runs) > 1 else {}
        lines = [
            Line2D([], [], **(style | ink), label=metric.replace("_", " "))
            for metric, style in styles.items()
        ]
        axes.legend(handles=lines, fontsize=7, handlelength=3)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and those before it, over a window of 1/20 of all values."""
    window = max(1, len(values) // WINDOWS_PER_RUN)
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
