"""Draw the study's map: what each objective learns, by gap, staleness and minibatches."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from benchmarks.study.train import Arm


def draw_map(outcomes: dict[Arm, dict[str, Any]], path: Path) -> None:
    """Draw one panel per gap and number of minibatches: score after training against staleness.

    Bars are 95 % intervals of the mean over seeds.
    """
    gaps = list(dict.fromkeys(arm.gap for arm in outcomes))
    counts = sorted({arm.minibatches for arm in outcomes})
    figure, panels = pyplot.subplots(
        len(counts), len(gaps), figsize=(3 * len(gaps), 2.4 * len(counts)),
        sharex=True, sharey=True, squeeze=False,
    )  # fmt: skip
    for row, count in enumerate(counts):
        for column, gap in enumerate(gaps):
            panel = panels[row][column]
            panel.set_title(f"{gap}, {count} minibatch{'es' if count > 1 else ''}", fontsize=9)
            cell = [arm for arm in outcomes if arm.gap == gap and arm.minibatches == count]
            for objective in dict.fromkeys(arm.objective for arm in cell):
                arms = sorted(
                    (arm for arm in cell if arm.objective == objective),
                    key=lambda arm: arm.staleness,
                )
                scores = [[100 * score for score in outcomes[arm]["after"]] for arm in arms]
                panel.errorbar(
                    [str(arm.staleness) for arm in arms],
                    [fmean(score) for score in scores],
                    [1.96 * stdev(score) / sqrt(len(score)) for score in scores],
                    label=objective,
                    capsize=2,
                    linewidth=1,
                )
            panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("staleness, steps")
    for row_of_panels in panels:
        row_of_panels[0].set_ylabel("score, %")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
