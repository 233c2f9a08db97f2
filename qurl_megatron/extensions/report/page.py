"""Write the report: one self-contained HTML page on one run, or on several side by side.

Text that a model has written is always escaped, and cannot change the direction of the page.
"""

import html
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from qurl_megatron.extensions.report import plots
from qurl_megatron.files import check_output, write_whole
from qurl_megatron.report.console import KL, LARGE, WINDOW, Watch, rules
from qurl_megatron.report.metrics import KINDS, PHASES, accuracy_and_error, mean_and_error
from qurl_megatron.report.record import RunRecord, change_line, read_run

NOT_MEASURED = "not measured"
VISIBLE_LOG_RATIO = 0.02  # a token whose ratio is closer to 1 has no colour
FAINTEST, STRONGEST = 0.15, 0.8  # opacities of a colour; the strongest from C on
LOWER, HIGHER = "43, 140, 214", "213, 94, 0"  # colours: blue below 1, orange above


def write_report(run_dirs: Sequence[Path], destination: Path) -> None:
    """Write the page on `run_dirs` to `destination`, making its directory.

    Raises:
        ConfigError: a directory is not that of a run, or no step is complete.
        OSError: the page cannot be written there.
    """
    check_output(destination)
    runs = [read_run(run_dir) for run_dir in run_dirs]
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_whole(destination, _page(runs))


def _page(runs: list[RunRecord]) -> str:
    training = [_figure(title, plot, runs) for title, plot in plots.TRAINING_PLOTS.items()]
    training += [
        _figure(f"Evaluation: {name}", partial(plots.evaluation, name=name), runs)
        for name in dict.fromkeys(name for run in runs for name, _ in run.scores())
    ]
    with_rewards = [run for run in runs if any(step.get("reward_counts") for step in run.steps)]
    training += _figures_of_each({"Time per step": plots.phase_times}, runs)
    training += _figures_of_each(
        {"Rewards of completions": plots.reward_distribution}, with_rewards
    )
    stale = [run for run in runs if run.has_stale_tokens]
    staleness = _figures_of_each(plots.STALENESS_PLOTS, stale)
    drift = f"<h2>Drift and quantization</h2><p>{_STALENESS}</p><main>{''.join(staleness)}</main>"
    layers = _figures_of_each(plots.LAYER_PLOTS, [run for run in runs if run.weights])
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
        f"{''.join(samples_section(run) for run in runs)}</html>\n"
    )


def advice(run: RunRecord) -> list[str]:
    """Return the warnings that are not over at the end of a run, or one line that none is left."""
    watch = Watch(run.config)
    for step in run.steps:
        watch.update(step)
    raised = watch.raised
    if len(run.steps) < WINDOW:  # in a short run a rule counts that holds at every step
        held = [dict(rules(run.config, [], step)) for step in run.steps]
        raised = [text for name, text in held[-1].items() if all(name in each for each in held)]
    if any("accepted" in each for each in run.mismatch.values()):
        raised.insert(
            0, "servers failed their proof, and rollout.accept_mismatch let the run go on"
        )
    kind = "quantized" if run.config.quantization.format != "bf16" else "BF16"
    verdict = f"No sign that {kind} rollouts harm this run"
    if run.late(KL) > LARGE:
        objective = run.config.objective.objective
        corrects = "does not correct" if objective in ("naive", "on_policy") else "corrects"
        verdict = f"The {kind} rollouts are far from the policy, which {objective} {corrects} for"
    predicted = run.mismatch.get("rollout", {}).get(f"predicted_{KL}")
    expected = f" ({predicted:.1e} was expected before training)" if predicted else ""
    return [f"{line[0].upper()}{line[1:]}." for line in raised] or [
        f"{verdict}: no warning stands at its last step. "
        f"KL(behaviour, proximal) went from {run.early(KL):.1e} to {run.late(KL):.1e}{expected}, "
        f"and {run.late('tis_truncated_fraction'):.2%} of tokens have a ratio proximal / behaviour "
        "above C."
    ]


_GLOSSARY = (
    "Behaviour is the policy on the rollout servers, proximal the learner before its update. Their "
    "KL divergence is the train-inference mismatch, and C is the cap on the ratio proximal / "
    "behaviour. Thin lines show every step, thick lines a running mean over a twentieth of the "
    "steps."
)
_STALENESS = (
    "The staleness of a token is the number of weight versions published between its sampling and "
    "the training on it. At 0 the mismatch comes from quantization and the engine alone; what a "
    "larger staleness adds is the drift of the policy."
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
.read { color: #888; }
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


def _figures_of_each(titled: dict[str, plots.Plot], runs: list[RunRecord]) -> list[str]:
    """Return plots that each show a single run."""
    return [
        _figure(f"{title}: {run.name}", plot, [run])
        for run in runs
        for title, plot in titled.items()
    ]


def _table(runs: list[RunRecord]) -> str:
    """Return the table of settings and results: one row per quantity, one column per run."""
    has_stale = any(run.has_stale_tokens for run in runs)
    columns = [_quantities(run, has_stale) for run in runs]
    head = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    rows = []
    for label in dict.fromkeys(label for column in columns for label in column):
        cells = [html.escape(column.get(label, NOT_MEASURED)) for column in columns]
        rows.append(f"<tr><th>{html.escape(label)}</th><td>{'</td><td>'.join(cells)}</td></tr>")
    return f"<div><table><tr><th></th>{head}</tr>{''.join(rows)}</table></div>"


def _quantities(run: RunRecord, has_stale: bool) -> dict[str, str]:
    """Return a run's settings and results, by their labels.

    With `has_stale` there are those of stale tokens, which a run of the page has.
    """
    late = "last tenth of steps"
    sent, full = fmean(run.series("publish_bytes")), run.steps[-1].get("publish_full_bytes")
    rollout, quantization = run.config.rollout, run.config.quantization
    quantities = {
        "model": run.config.model,
        "data": run.config.data,
        "learning rate": f"{run.config.optimizer.learning_rate:g}",
        "completions per step": (
            f"{rollout.prompts_per_step} prompts x {rollout.completions_per_prompt}, in "
            f"{run.config.optimizer.minibatches_per_step} minibatches"
        ),
        "longest completion": f"{rollout.longest_completion} tokens",
        "objective": run.config.objective.objective,
        "rollout format": quantization.format,
        "learner dtype": run.config.learner.dtype,
        "UAQ scale s": f"{quantization.uaq.scale:g}",
        "steps": f"{len(run.steps)} of {run.config.steps}",
        "held-out accuracy before RL": _held_out(run.before),
        "held-out accuracy after RL": _held_out(run.summary, "_after"),
        f"reward, {late}": f"{run.late('reward_mean'):.3f}",
        "KL before training, evaluation servers": _if_measured(
            run.mismatch.get("evaluation"), KL, ".1e"
        ),
        "KL before training, rollout servers": _if_measured(run.mismatch.get("rollout"), KL, ".1e"),
        "KL expected of rollout servers": _if_measured(
            run.mismatch.get("rollout"), f"predicted_{KL}", ".1e"
        ),
        "largest ratio proximal / behaviour": (
            f"{max(run.series('ratio_proximal_behaviour_max')):.2f}"
        ),
        f"seconds per step, {late}": (
            f"{sum(run.late(f'time_{phase}_s') for phase in PHASES):.2f}"
        ),
        "seconds per publish": f"{fmean(run.series('time_publish_s')):.3f}",
        "bytes per publish": f"{sent:,.0f} of {full:,}" if full else f"{sent:,.0f}",
    }
    if run.changes:
        quantities["changed by resumes"] = "; ".join(map(change_line, run.changes))
    if has_stale:
        stale = f"{run.late('stale_token_fraction'):.1%}" if run.has_stale_tokens else "none"
        quantities[f"stale tokens, {late}"] = stale
        quantities[f"KL at staleness 0, above staleness 0, {late}"] = _kl_by_staleness(run)
    for (name, measure), averages in run.scores().items():
        scores = [mean_and_error(average) for average in averages.values()]
        change = f"{scores[0]} \N{RIGHTWARDS ARROW} {scores[-1]}"
        quantities[f"{name} {measure}, first \N{RIGHTWARDS ARROW} last"] = change
    return quantities


def _held_out(measured: dict[str, Any], when: str = "") -> str:
    accuracy = measured.get(f"held_out_accuracy{when}")
    if accuracy is None:
        return NOT_MEASURED
    return accuracy_and_error(accuracy, measured.get(f"held_out_standard_error{when}"))


def _if_measured(measured: dict[str, Any] | None, name: str, form: str) -> str:
    """Return a number of `measured` in the Python format `form`, or that it was not measured."""
    value = (measured or {}).get(name)
    return NOT_MEASURED if value is None else f"{value:{form}}"


def _kl_by_staleness(run: RunRecord) -> str:
    """Return two means over tokens of the late steps: of fresh tokens, and of stale ones."""
    means = []
    for is_fresh in (True, False):
        by_bucket = [
            measured
            for step in run.late_steps
            for staleness, measured in (step.get("by_staleness") or {}).items()
            if (staleness == "0") == is_fresh
        ]
        weights = [measured.get("token_fraction", 0.0) for measured in by_bucket]
        weight = sum(weights)
        kl = sum(
            of_staleness * measured.get(KL, math.nan)
            for of_staleness, measured in zip(weights, by_bucket, strict=True)
        )
        means.append(f"{kl / weight:.1e}" if weight else NOT_MEASURED)
    return ", ".join(means)


def samples_section(run: RunRecord) -> str:
    """Return the completions of a run as a grid: a row for each kind; empty if none were kept."""
    rows = []
    for kind in KINDS:
        samples = [sample for sample in run.samples if sample["kind"] == kind]
        if not samples:
            continue
        places = dict.fromkeys([0, (len(samples) - 1) // 2, len(samples) - 1])
        cards = "".join(_card(samples[place], run.config.objective.ratio_cap) for place in places)
        rows.append(f'<h3>{html.escape(kind.capitalize())}</h3><div class="cards">{cards}</div>')
    if not rows:
        return ""
    name = html.escape(run.name)
    return f"<h2>Completions: {name}</h2><p>{_legend(run)}</p>{''.join(rows)}"


def _legend(run: RunRecord) -> str:
    cap = run.config.objective.ratio_cap
    lower = f'<span style="background: rgba({LOWER}, {STRONGEST})">1/{cap:g} or less</span>'
    higher = f'<span style="background: rgba({HIGHER}, {STRONGEST})">{cap:g} or more</span>'
    return (
        "The first, the middle and the last of each kind. A colour shows the ratio proximal / "
        f"behaviour of a token: {lower} is more likely under the quantized policy than under the "
        f"learner, {higher} is less likely. Tokens without a colour are within 2% of 1. Point at a "
        "token to see its ratio. Grey tokens were read, not sampled: an agent's tools and "
        "environments wrote them."
    )


def _card(sample: dict[str, Any], ratio_cap: float) -> str:
    versions = ", ".join(str(version) for version in sample["weight_versions"])
    facts = [
        f"step {sample['step']}",
        f"reward {sample['reward']:.3g}",
        *(f"{html.escape(name)} {value:.3g}" for name, value in sample["parts"].items()),
        f"{sample['length']} tokens",
        *(["cut off"] if sample["truncated"] else []),
        *([f"ended: {sample['end']}"] if sample.get("end") else []),
        f"weights {versions}",
    ]
    pieces = _coloured(sample, ratio_cap)
    if omitted := sample["length"] - len(pieces):
        pieces.insert(len(pieces) // 2, f"<i>[{omitted} tokens left out]</i>")
    return (
        f'<section class="card"><b>{", ".join(facts)}</b>'
        f'<details><summary>prompt</summary><pre dir="auto">{_escape(sample["prompt"])}</pre>'
        f'</details><pre dir="auto">{"".join(pieces)}</pre></section>'
    )


def _coloured(sample: dict[str, Any], ratio_cap: float) -> list[str]:
    """Return the tokens of a sample, with the colours of their ratios."""
    pieces = []
    for token, ratio in zip(sample["tokens"], sample["ratios"], strict=True):
        piece = _escape(token)
        if ratio is None:
            pieces.append(f'<span class="read">{piece}</span>')
            continue
        log_ratio = math.log(ratio) if ratio > 0 else -math.inf
        if abs(log_ratio) >= VISIBLE_LOG_RATIO:
            share = min(1.0, abs(log_ratio) / math.log(ratio_cap)) if ratio_cap > 1 else 1.0
            strength = FAINTEST + (STRONGEST - FAINTEST) * share
            colour = f"rgba({HIGHER if log_ratio > 0 else LOWER}, {strength:.2f})"
            piece = f'<span style="background: {colour}" title="{ratio:g}">{piece}</span>'
        pieces.append(piece)
    return pieces


def _escape(text: str) -> str:
    """Return text as HTML that shows it; control characters become visible and harmless."""
    return html.escape("".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text))
