"""One run, or several to compare, as one HTML page that needs no network.

Read from what a run leaves: config.yaml, metrics.jsonl, weights.jsonl, summary.json. The pictures
are those a person asks whether quantized rollout is safe for a run: QuRL's Figures 2 (reward), 3
and 4b (divergence and ratios of the quantized policy) and 9 (updates against quantization error),
what every layer shows of the last, and where a step's time goes.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.yaml_file import load
from qurl_megatron.files import read_json_lines, write_whole
from qurl_megatron.report.metrics import Averages

COLOURS = (  # on light and dark
    "#2b8cd6", "#e69f00", "#009e73", "#cc79a7", "#8c6fd1", "#d55e00", "#8a8a8a", "#a3a500",
)  # fmt: skip
INK = "#010203"  # stands for the page's own text colour, light or dark
PHASES = ("rollout", "proximal", "critic", "update", "publish")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SMOOTHED_OVER = 20  # parts of a run: a thick line is the mean over one of them

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


Draw = Callable[[Axes, list["RunRecord"]], None]
"""Draws some runs into a picture's axes."""


class ReportError(ConfigError):
    """A directory there is nothing to report of; the text says why."""


@dataclass(frozen=True)
class RunRecord:
    """What a run's directory says."""

    name: str
    config: Config
    steps: list[dict[str, Any]]  # metrics.jsonl
    weights: dict[str, dict[str, float]]  # of the last publish, by weight; weights.jsonl
    summary: dict[str, Any]  # empty until the run is complete
    noise: dict[str, dict[str, float]]  # before any training, by server set; noise.json

    def series(self, metric: str) -> list[float]:
        return [step[metric] for step in self.steps]

    def evaluations(self) -> dict[str, dict[int, Averages]]:
        """What evaluation on each file came to, by its name and by the steps it was made after."""
        measured = {0: self.summary.get("evaluation_before")}
        measured |= {step["step"]: step.get("evaluation") for step in self.steps}
        if after := self.summary.get("evaluation_after"):
            measured[self.steps[-1]["step"]] = after
        found: dict[str, dict[int, Averages]] = {}
        for step, files in measured.items():
            for name, averages in (files or {}).items():
                found.setdefault(name, {})[step] = averages
        return found

    def early(self, metric: str) -> float:
        """Mean over the first tenth of the steps."""
        return fmean(self.series(metric)[: self._tenth])

    def late(self, metric: str) -> float:
        """Mean over the last tenth of the steps."""
        return fmean(self.series(metric)[-self._tenth :])

    @property
    def _tenth(self) -> int:
        return -(-len(self.steps) // 10)


def read_run(run_dir: Path) -> RunRecord:
    """Raises ReportError if the directory is not a run's, or no step is done."""
    if not (run_dir / "config.yaml").is_file():
        raise ReportError(f"{run_dir}: not a run's directory, it has no config.yaml")
    steps = read_json_lines(run_dir / "metrics.jsonl")
    if not steps:
        raise ReportError(f"{run_dir}: no step is done yet, metrics.jsonl is empty")
    publishes = read_json_lines(run_dir / "weights.jsonl")
    summary, noise = run_dir / "summary.json", run_dir / "noise.json"
    return RunRecord(
        run_dir.name,
        load(run_dir / "config.yaml"),
        steps,
        publishes[-1]["weights"] if publishes else {},
        json.loads(summary.read_text()) if summary.exists() else {},
        json.loads(noise.read_text()) if noise.exists() else {},
    )


def write_report(run_dirs: Sequence[Path], destination: Path) -> None:
    """Write the page on `run_dirs` to `destination`. Raises ReportError."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_whole(destination, _page(runs))


def advice(run: RunRecord) -> list[str]:
    """What the curves suggest, each sentence with the rule behind it."""
    kl, truncated = "kl_behaviour_proximal_k3", "tis_truncated_fraction"
    grown = run.late(kl) / run.early(kl) if run.early(kl) > 0 else 1.0
    flips, failures = run.late("code_flip_fraction"), run.late("verifier_failures")
    completions = run.config.rollout.prompts_per_step * run.config.rollout.completions_per_prompt
    cut = run.late("response_truncated_fraction")
    quantized = run.config.quantization.format != "bf16"
    sentences = []
    if grown > 10 and run.late(truncated) > 0.01:
        sentences.append(
            f"KL(behaviour, proximal) grew {grown:.0f}-fold and {run.late(truncated):.1%} of "
            "tokens have a ratio above C: lower the learning rate, or use fp8. (Rule: tenfold, and "
            "1 %.)"
        )
    if run.late(kl) > 5e-3 and run.config.objective.objective == "naive":
        sentences.append(
            f"KL(behaviour, proximal) is {run.late(kl):.1e} and naive ignores it: use "
            "objective.objective=acr, or fp8. (Rule: above 5e-3.)"
        )
    if quantized and flips < 1e-4:
        sentences.append(
            f"A publish changes {flips:.2%} of the codes: the served policy hardly follows the "
            "learner; raise quantization.uaq.scale. (Rule: below 0.01 %.)"
        )
    if cut > 0.2:
        sentences.append(
            f"{cut:.0%} of completions are cut off: raise rollout.max_response_length, or reward "
            "is that of brevity. (Rule: a fifth.)"
        )
    if failures > 0.01 * completions:
        sentences.append(
            f"{failures / completions:.1%} of verifier calls fail and score 0: look at the data. "
            "(Rule: 1 %.)"
        )
    return sentences or [
        f"Nothing here speaks against {'quantized' if quantized else 'BF16'} rollout: "
        f"KL(behaviour, proximal) went from {run.early(kl):.1e} to {run.late(kl):.1e} and "
        f"{run.late(truncated):.2%} of tokens have a ratio above C. (Rule: less than tenfold, or "
        "less than 1 %.)"
    ]


def _page(runs: list[RunRecord]) -> str:
    shown = [_panel(title, draw, runs) for title, draw in _PANELS]
    files = dict.fromkeys(name for run in runs for name in run.evaluations())
    shown += [_panel(f"Evaluation: {name}", _evaluation(name), runs) for name in files]
    shown += [_panel(f"Where a step's time goes: {run.name}", _times, [run]) for run in runs]
    layers = [
        _panel(f"{title}: {run.name}", _layers(metric), [run])
        for run in runs
        if run.weights
        for title, metric in _LAYER_PICTURES
    ]
    sentences = "".join(
        f"<li><b>{html.escape(run.name)}</b>: {html.escape(sentence)}</li>"
        for run in runs
        for sentence in advice(run)
    )
    names = " / ".join(run.name for run in runs)
    title = html.escape(names if len(runs) < 4 else f"{len(runs)} runs")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{title}</h1>{_table(runs)}<h2>Advice</h2><ul>{sentences}</ul>"
        f"<h2>Training</h2>{_key(runs)}<main>{''.join(shown)}</main>"
        f"<h2>Layer by layer, at the last publish</h2><main>{''.join(layers)}</main></html>\n"
    )


_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #d5d5d5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; --line: #3a3d44; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; color: var(--ink); }
div { overflow-x: auto; } table { border-collapse: collapse; }
td, th { padding: .2rem .8rem; text-align: left; border-bottom: 1px solid var(--line); }
#key { position: sticky; top: 0; padding: .4rem 0; background: var(--paper);
       display: flex; flex-wrap: wrap; gap: 0 1.2rem; }
"""


def _key(runs: list[RunRecord]) -> str:
    """Whose colour is which, in sight of every picture; nothing to tell of a single run."""
    if len(runs) == 1:
        return ""
    marks = "".join(
        f'<span><b style="color: {_colour(number)}">\N{BLACK SQUARE}</b> {html.escape(run.name)}'
        "</span>"
        for number, run in enumerate(runs)
    )
    return f'<p id="key">{marks}</p>'


def _table(runs: list[RunRecord]) -> str:
    def accuracy(run: RunRecord, when: str) -> str:
        value = run.summary.get(f"held_out_accuracy_{when}")
        return "not measured" if value is None else f"{value:.1%}"

    def score(run: RunRecord, name: str, what: str) -> str:
        averages = [
            found[what] for found in run.evaluations().get(name, {}).values() if what in found
        ]
        shown = [f"{a['mean']:.1%} \N{PLUS-MINUS SIGN} {a['standard_error']:.1%}" for a in averages]
        return f"{shown[0]} \N{RIGHTWARDS ARROW} {shown[-1]}" if shown else "not measured"

    def noise(run: RunRecord, servers: str) -> str:
        measured = run.noise.get(servers)
        return f"{measured['kl_behaviour_proximal_k3']:.1e}" if measured else "not measured"

    measures = dict.fromkeys(
        (name, what)
        for run in runs
        for name, found in run.evaluations().items()
        for averages in found.values()
        for what in averages
    )
    rows: list[tuple[str, Callable[[RunRecord], str]]] = [
        ("objective", lambda run: run.config.objective.objective),
        ("rollout weights", lambda run: run.config.quantization.format),
        ("UAQ s", lambda run: f"{run.config.quantization.uaq.scale:g}"),
        ("steps", lambda run: f"{len(run.steps)} of {run.config.steps}"),
        ("held-out accuracy before RL", lambda run: accuracy(run, "before")),
        ("held-out accuracy after", lambda run: accuracy(run, "after")),
        ("reward, last tenth of steps", lambda run: f"{run.late('reward_mean'):.3f}"),
        ("KL before training, engine alone (BF16)", lambda run: noise(run, "evaluation")),
        ("KL before training, as rolled out", lambda run: noise(run, "rollout")),
        ("largest ratio proximal / behaviour",
         lambda run: f"{max(run.series('ratio_proximal_behaviour_max')):.2f}"),
        ("seconds a step", lambda run: f"{sum(run.late(f'time_{p}_s') for p in PHASES):.2f}"),
        ("seconds a publish", lambda run: f"{fmean(run.series('time_publish_s')):.3f}"),
        ("bytes a publish", lambda run: f"{run.steps[-1]['publish_bytes']:,}"),
    ]  # fmt: skip
    rows += [
        (f"{name} {what}, first and last measured", partial(score, name=name, what=what))
        for name, what in measures
    ]
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    body = "".join(
        f"<tr><th>{what}</th>{''.join(f'<td>{html.escape(of(run))}</td>' for run in runs)}</tr>"
        for what, of in rows
    )
    return f"<div><table><tr><th></th>{head}</tr>{body}</table></div>"


def _panel(title: str, draw: Draw, runs: list[RunRecord]) -> str:
    """A picture with its caption."""
    figure = Figure(figsize=(4.6, 2.9), layout="constrained")
    axes = figure.add_subplot()
    draw(axes, runs)
    written = io.StringIO()
    # Identifiers of one picture must not be those of another on the same page.
    with matplotlib.rc_context({"svg.hashsalt": title}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    caption = html.escape(title)
    return (
        f'<figure role="img" aria-label="{caption}"><figcaption>{caption}</figcaption>{svg}'
        "</figure>"
    )


def _curves(*metrics: str, ylabel: str, log: bool = False) -> Draw:
    """One line a run and metric, over steps."""

    def draw(axes: Axes, runs: list[RunRecord]) -> None:
        for number, run in enumerate(runs):
            steps = run.series("step")
            for metric, look in _looks(metrics, number, runs).items():
                values = run.series(metric)
                axes.plot(steps, values, **look, alpha=0.35, linewidth=0.8)
                axes.plot(steps, _smooth(values), **look, linewidth=1.6)
        if log and any(v > 0 for run in runs for metric in metrics for v in run.series(metric)):
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        _name(axes, metrics, runs)

    return draw


def _looks(metrics: Iterable[str], number: int, runs: list[RunRecord]) -> dict[str, dict[str, Any]]:
    """Metrics are told apart by colour where there is one run, by dashes where colours are runs."""
    several = len(runs) > 1
    return {
        metric: {
            "color": _colour(number if several else style),
            "linestyle": ("-", "--")[style % 2 if several else 0],
        }
        for style, metric in enumerate(metrics)
    }


def _name(axes: Axes, metrics: Iterable[str], runs: list[RunRecord]) -> None:
    """A legend of metrics, if there are several; the page's key has the runs."""
    looks = _looks(metrics, 0, runs)
    if len(looks) > 1:
        own = {"color": INK} if len(runs) > 1 else {}
        lines = [
            Line2D([], [], **(look | own), label=metric.replace("_", " "))
            for metric, look in looks.items()
        ]
        axes.legend(handles=lines, fontsize=7, handlelength=3)


def _reward(axes: Axes, runs: list[RunRecord]) -> None:
    _curves("reward_mean", ylabel="reward, held-out accuracy")(axes, runs)
    for number, run in enumerate(runs):
        measured = [
            (step["step"], step["held_out_accuracy"])
            for step in run.steps
            if step["held_out_accuracy"] is not None
        ]
        ends = [(0, "before"), (run.steps[-1]["step"], "after")]
        for at, when in ends:
            value = run.summary.get(f"held_out_accuracy_{when}")
            if value is not None:
                measured.append((at, value))
        if measured:
            axes.plot(*zip(*sorted(measured), strict=True), "o", color=_colour(number))


def _divergence(axes: Axes, runs: list[RunRecord]) -> None:
    metric = "kl_behaviour_proximal_k3"
    _curves(metric, ylabel="nats", log=True)(axes, runs)
    measured = [number for number, run in enumerate(runs) if "evaluation" in run.noise]
    for number in measured:
        axes.axhline(
            runs[number].noise["evaluation"][metric],
            linestyle=":",
            color=_colour(number),
            label="engine alone, before training" if number == measured[-1] else None,
        )
    if measured:
        axes.legend(fontsize=7)


def _evaluation(name: str) -> Draw:
    """Averages on one file with their standard errors, one line a run and measure, over steps."""

    def draw(axes: Axes, runs: list[RunRecord]) -> None:
        measures = list(
            dict.fromkeys(
                what
                for run in runs
                for averages in run.evaluations().get(name, {}).values()
                for what in averages
            )
        )
        for number, run in enumerate(runs):
            found = run.evaluations().get(name, {})
            for what, look in _looks(measures, number, runs).items():
                steps = [step for step, averages in found.items() if what in averages]
                axes.errorbar(
                    steps,
                    [found[step][what]["mean"] for step in steps],
                    yerr=[found[step][what]["standard_error"] for step in steps],
                    **look,
                    marker="o",
                    markersize=3,
                )
        axes.set_xlabel("step")
        axes.set_ylabel("share of answers that are right")
        _name(axes, measures, runs)

    return draw


def _times(axes: Axes, runs: list[RunRecord]) -> None:
    (run,) = runs
    times = {phase: run.series(f"time_{phase}_s") for phase in PHASES}
    if run.config.advantage_estimator != "gae":
        del times["critic"]
    times = {phase: _smooth(series) for phase, series in times.items()}
    axes.stackplot(run.series("step"), *times.values(), labels=list(times), colors=COLOURS)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    # Above: whatever lies on an area hides the colour it names.
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        ncols=len(times),
        handlelength=1,
        fontsize=7,
    )


def _layers(metric: str) -> Draw:
    """A layer a row, a projection a column."""

    def draw(axes: Axes, runs: list[RunRecord]) -> None:
        (run,) = runs
        layers: dict[int, dict[str, float]] = {}
        for name, measured in run.weights.items():
            _, _, layer, _, projection, _ = name.split(".")
            layers.setdefault(int(layer), {})[projection] = measured[metric]
        grid = [[layers[layer][p] for p in PROJECTIONS] for layer in sorted(layers)]
        positive = [value for row in grid for value in row if value > 0]
        norm = LogNorm(min(positive), max(positive)) if positive else None
        image = axes.imshow(grid, aspect="auto", cmap="viridis", norm=norm, interpolation="nearest")
        axes.set_xticks(range(len(PROJECTIONS)), [p.removesuffix("_proj") for p in PROJECTIONS])
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("layer")
        assert axes.figure is not None
        axes.figure.colorbar(image, ax=axes)

    return draw


_LAYER_PICTURES = (
    ("Quantization error (Eq. 14)", "weight_quant_error"),
    ("Update (Eq. 13)", "weight_update_norm"),
    ("Codes that changed", "code_flip_fraction"),
)
_PANELS = (
    ("Reward, and held-out accuracy as dots", _reward),
    ("KL(behaviour, proximal), k3", _divergence),
    (
        "Largest ratio proximal / behaviour",
        _curves("ratio_proximal_behaviour_max", ylabel="ratio"),
    ),
    (
        "Tokens truncated at C, and admitted by ACR",
        _curves("tis_truncated_fraction", "acr_widened_fraction", ylabel="fraction of tokens"),
    ),
    ("Tokens clipped", _curves("clip_fraction", ylabel="fraction of tokens")),
    (
        "Update (Eq. 13) against quantization error (Eq. 14)",
        _curves("weight_update_norm", "weight_quant_error", ylabel="relative to weights", log=True),
    ),
    ("Codes that changed", _curves("code_flip_fraction", ylabel="fraction of codes")),
    ("Entropy", _curves("entropy", ylabel="nats")),
    ("Response length", _curves("response_length_mean", ylabel="tokens")),
)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _smooth(values: list[float]) -> list[float]:
    """Each value's mean with those before it, over a twentieth of all."""
    window = max(1, len(values) // SMOOTHED_OVER)
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
