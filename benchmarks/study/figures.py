"""Draw the study's pictures: what each objective learns in each cell, and by length of answers."""

from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.study.train import GAP_NAMES, Arm

COLUMNS = 4


def draw_map(outcomes: dict[Arm, dict[str, Any]], path: Path) -> None:
    """Draw one panel per gap and number of minibatches: score after training against staleness.

    Bars are 95 % intervals of the mean over seeds.
    """
    cells = list(dict.fromkeys((arm.gap, arm.minibatches) for arm in outcomes))
    figure, panels = pyplot.subplots(
        -(-len(cells) // COLUMNS), COLUMNS, figsize=(11, 2.4 * -(-len(cells) // COLUMNS)),
        sharex=True, sharey=True, squeeze=False,
    )  # fmt: skip
    ages = sorted({arm.staleness for arm in outcomes})
    for panel, (gap, minibatches) in zip(panels.flat, cells, strict=False):
        plural = "es" * (minibatches > 1)
        panel.set_title(f"{GAP_NAMES[gap]}, {minibatches} minibatch{plural}", fontsize=9)
        cell = [arm for arm in outcomes if (arm.gap, arm.minibatches) == (gap, minibatches)]
        for objective in dict.fromkeys(arm.objective for arm in cell):
            arms = sorted(
                (arm for arm in cell if arm.objective == objective), key=lambda arm: arm.staleness
            )
            draw_means(
                panel,
                [ages.index(arm.staleness) for arm in arms],
                [[100 * score for score in outcomes[arm]["after"]] for arm in arms],
                objective,
            )
        panel.set_xticks(range(len(ages)), map(str, ages))
        panel.set_xlabel("staleness, steps", fontsize=8)
        panel.grid(alpha=0.3)
    for unused in panels.flat[len(cells) :]:
        unused.axis("off")
    for row in panels:
        row[0].set_ylabel("score, %")
    panels[0][0].legend(fontsize=7)
    save(figure, path)


def draw_lengths(
    outcomes: dict[Arm, dict[str, Any]], by_length: dict[int, list[Arm]], path: Path
) -> None:
    """Draw the gain over the first arm of each length of answers against the length.

    The arms of all lengths have the same objectives. One panel has the trained policies, the other
    their quantized copies. Bars are 95 % intervals of the mean over seeds.
    """
    scores = {"after": "the policy", "after_quantized": "its quantized copy"}
    figure, panels = pyplot.subplots(1, len(scores), figsize=(8, 2.8), sharey=True)
    for panel, (score, title) in zip(panels, scores.items(), strict=True):
        (first, *_), *others = zip(*by_length.values(), strict=True)
        for shift, arms in enumerate(others):
            gains = []
            for arm, (base, *_) in zip(arms, by_length.values(), strict=True):
                pairs = zip(outcomes[arm][score], outcomes[base][score], strict=True)
                gains.append([100 * (own - other) for own, other in pairs])
            places = [length * 1.04**shift for length in by_length]  # side by side
            draw_means(panel, places, gains, arms[0].objective)
        panel.set_title(title, fontsize=9)
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(by_length), map(str, by_length))
        panel.set_xlabel("tokens of an answer", fontsize=8)
        panel.axhline(0, color="black", linewidth=0.6)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel(f"points over {first.objective}")
    panels[0].legend(fontsize=7)
    save(figure, path)


def draw_means(
    panel: Axes, places: Sequence[float], samples: list[list[float]], label: str
) -> None:
    """Draw a line of means, one of the seeds at each place, with their 95 % intervals."""
    panel.errorbar(
        places,
        [fmean(values) for values in samples],
        [1.96 * stdev(values) / sqrt(len(values)) for values in samples],
        label=label,
        marker=".",
        capsize=2,
        linewidth=1,
    )


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, and close it. Equal figures give equal files."""
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
