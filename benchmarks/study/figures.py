"""Draw the study's picture: what each objective learns in each cell."""

from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.figure import Figure

from benchmarks.machine import standard_error
from benchmarks.study.train import GAP_NAMES, Arm

COLUMNS = 4


def draw_map(outcomes: dict[Arm, dict[str, Any]], path: Path) -> None:
    """Draw one panel per gap and number of minibatches: score after training against staleness.

    Bars are standard errors of the mean over seeds.
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
            scores = [[100 * score for score in outcomes[arm]["after"]] for arm in arms]
            panel.errorbar(
                [ages.index(arm.staleness) for arm in arms],
                [fmean(of_seeds) for of_seeds in scores],
                [standard_error(of_seeds) for of_seeds in scores],
                label=objective,
                marker=".",
                capsize=2,
                linewidth=1,
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


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, and close it. Equal figures give equal files."""
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
