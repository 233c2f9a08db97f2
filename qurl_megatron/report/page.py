"""Write the report: one HTML page on one run, or comparing several, that loads nothing else."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from qurl_megatron.files import write_whole
from qurl_megatron.report import completions, plots
from qurl_megatron.report.advice import advice
from qurl_megatron.report.metrics import PHASES
from qurl_megatron.report.record import RunRecord, evaluation_measures, read_run

NOT_MEASURED = "not measured"


def write_report(run_dirs: Sequence[Path], destination: Path) -> None:
    """Write the page on `run_dirs` to `destination`, making its directory.

    Raises:
        ReportError: a directory is not that of a run, or no step is complete.
    """
    runs = [read_run(run_dir) for run_dir in run_dirs]
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_whole(destination, _page(runs))


def _page(runs: list[RunRecord]) -> str:
    training = [_figure(title, plot, runs) for title, plot in plots.TRAINING_PLOTS.items()]
    training += [
        _figure(f"Evaluation: {name}", plots.evaluation(name), runs)
        for name in evaluation_measures(runs)
    ]
    training += [_figure(f"Time per step: {run.name}", plots.phase_times, [run]) for run in runs]
    stale = [run for run in runs if run.has_stale_tokens]
    lags = [
        _figure(f"{title}: {run.name}", plot, [run])
        for run in stale
        for title, plot in plots.LAG_PLOTS.items()
    ]
    drift = f"<h2>Drift and quantization</h2><p>{_LAGS}</p><main>{''.join(lags)}</main>"
    training += [
        _figure(f"Rewards of completions: {run.name}", plots.reward_distribution, [run])
        for run in runs
        if any(step.get("reward_counts") for step in run.steps)
    ]
    layers = [
        _figure(f"{title}: {run.name}", plot, [run])
        for run in runs
        if run.weights
        for title, plot in plots.LAYER_PLOTS.items()
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
        f"<h2>Training</h2><p>{_GLOSSARY}</p>{_key(runs)}<main>{''.join(training)}</main>"
        f"{drift if stale else ''}"
        f"<h2>Layer by layer, at the last publish</h2><main>{''.join(layers)}</main>"
        f"{''.join(completions.section(run) for run in runs)}</html>\n"
    )


_GLOSSARY = (
    "Behaviour is the policy on the rollout servers, proximal the learner before its update. Their "
    "KL divergence is the train-inference mismatch, and C is the cap on the ratio proximal / "
    "behaviour. Thin lines show every step, thick lines a running mean over a twentieth of the "
    "steps."
)
_LAGS = (
    "The lag of a token is the number of weight versions published between its sampling and the "
    "training on it. At lag 0 the mismatch comes from quantization and the engine alone; what a "
    "larger lag adds is the drift of the policy."
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
.cards { display: grid; grid-template-columns: repeat(3, minmax(260px, 1fr)); gap: 1rem; }
.card { border: 1px solid var(--line); padding: .6rem; min-width: 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 24rem; overflow-y: auto;
      margin: .4rem 0; unicode-bidi: isolate; font: 13px/1.5 ui-monospace, monospace; }
#key { position: sticky; top: 0; padding: .4rem 0; background: var(--paper);
       display: flex; flex-wrap: wrap; gap: 0 1.2rem; }
"""


def _key(runs: list[RunRecord]) -> str:
    """Return the legend of the runs' colours, which stays visible; empty for a single run."""
    if len(runs) == 1:
        return ""
    marks = "".join(
        f'<span><b style="color: {plots.run_colour(number)}">\N{BLACK SQUARE}</b> '
        f"{html.escape(run.name)}</span>"
        for number, run in enumerate(runs)
    )
    return f'<p id="key">{marks}</p>'


def _figure(title: str, plot: plots.Plot, runs: list[RunRecord]) -> str:
    """Return a plot with its caption."""
    caption = html.escape(title)
    return (
        f'<figure role="img" aria-label="{caption}"><figcaption>{caption}</figcaption>'
        f"{plots.svg(title, plot, runs)}</figure>"
    )


def _table(runs: list[RunRecord]) -> str:
    """Return the table of settings and results: one row per quantity, one column per run."""
    rows: list[tuple[str, Callable[[RunRecord], str]]] = [
        ("objective", lambda run: run.config.objective.objective),
        ("rollout format", lambda run: run.config.quantization.format),
        ("UAQ scale s", lambda run: f"{run.config.quantization.uaq.scale:g}"),
        ("steps", lambda run: f"{len(run.steps)} of {run.config.steps}"),
        ("held-out accuracy before RL", partial(_accuracy, when="before")),
        ("held-out accuracy after RL", partial(_accuracy, when="after")),
        ("reward, last tenth of steps", lambda run: f"{run.late('reward_mean'):.3f}"),
        ("KL before training, BF16 servers", partial(_mismatch, server_set="evaluation")),
        ("KL before training, rollout servers", partial(_mismatch, server_set="rollout")),
        ("largest ratio proximal / behaviour",
         lambda run: f"{max(run.series('ratio_proximal_behaviour_max')):.2f}"),
        ("seconds per step, last tenth of steps",
         lambda run: f"{sum(run.late(f'time_{phase}_s') for phase in PHASES):.2f}"),
        ("seconds per publish", lambda run: f"{fmean(run.series('time_publish_s')):.3f}"),
        ("bytes per publish", _publish_bytes),
    ]  # fmt: skip
    if any(run.has_stale_tokens for run in runs):
        rows += [
            ("stale tokens, last tenth of steps", _stale_fraction),
            ("KL at lag 0, above lag 0, last tenth of steps", _kl_by_lag),
        ]
    rows += [
        (f"{name} {measure}, first \N{RIGHTWARDS ARROW} last", partial(_score, name, measure))
        for name, measures in evaluation_measures(runs).items()
        for measure in measures
    ]
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    body = "".join(
        f"<tr><th>{html.escape(label)}</th>"
        f"{''.join(f'<td>{html.escape(cell(run))}</td>' for run in runs)}</tr>"
        for label, cell in rows
    )
    return f"<div><table><tr><th></th>{head}</tr>{body}</table></div>"


def _accuracy(run: RunRecord, when: str) -> str:
    accuracy = run.summary.get(f"held_out_accuracy_{when}")
    return NOT_MEASURED if accuracy is None else f"{accuracy:.1%}"


def _mismatch(run: RunRecord, server_set: str) -> str:
    mismatch = run.mismatch.get(server_set)
    return f"{mismatch['kl_behaviour_proximal_k3']:.1e}" if mismatch else NOT_MEASURED


def _publish_bytes(run: RunRecord) -> str:
    """Return the mean bytes of a publish, and those of all tensors."""
    sent = f"{fmean(run.series('publish_bytes')):,.0f}"
    full = run.steps[-1].get("publish_full_bytes")
    return f"{sent} of {full:,}" if full else sent


def _stale_fraction(run: RunRecord) -> str:
    return f"{run.late('stale_token_fraction'):.1%}" if run.has_stale_tokens else "none"


def _kl_by_lag(run: RunRecord) -> str:
    """Return two means over tokens of the late steps: of fresh tokens, and of stale ones."""
    kl = {True: 0.0, False: 0.0}
    weight = {True: 0.0, False: 0.0}
    for step in run.late_steps:
        for lag, measured in (step.get("by_lag") or {}).items():
            kl[lag == "0"] += measured["token_fraction"] * measured["kl_behaviour_proximal_k3"]
            weight[lag == "0"] += measured["token_fraction"]
    return ", ".join(
        f"{kl[is_fresh] / weight[is_fresh]:.1e}" if weight[is_fresh] else NOT_MEASURED
        for is_fresh in (True, False)
    )


def _score(name: str, measure: str, run: RunRecord) -> str:
    scores = [
        f"{averages[measure]['mean']:.1%} \N{PLUS-MINUS SIGN} "
        f"{averages[measure]['standard_error']:.1%}"
        for averages in run.evaluations().get(name, {}).values()
        if measure in averages
    ]
    return f"{scores[0]} \N{RIGHTWARDS ARROW} {scores[-1]}" if scores else NOT_MEASURED
