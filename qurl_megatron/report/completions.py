"""The report's section of completions: early, in the middle and late in a run, side by side.

Text that a model has written is always escaped, and set apart from the direction of the page.
"""

from __future__ import annotations

import html
import math
from typing import Any

from qurl_megatron.report.record import RunRecord
from qurl_megatron.report.samples import KINDS

VISIBLE_LOG_RATIO = 0.02  # a token whose ratio is closer to 1 has no colour
FAINTEST, STRONGEST = 0.15, 0.8  # opacities of a colour; the strongest from C on
LOWER, HIGHER = "43, 140, 214", "213, 94, 0"  # colours: blue below 1, orange above


def section(run: RunRecord) -> str:
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
        f"behaviour of a token: {lower}, what the quantized policy finds more likely than the "
        f"learner, and {higher}, what it finds less likely. Tokens without a colour are within 2%. "
        "The pointer over a token shows its ratio."
    )


def _card(sample: dict[str, Any], ratio_cap: float) -> str:
    versions = ", ".join(str(version) for version in sample["weight_versions"])
    facts = [
        f"step {sample['step']}",
        f"reward {sample['reward']:.3g}",
        *(f"{html.escape(name)} {value:.3g}" for name, value in sample["parts"].items()),
        f"{sample['length']} tokens",
        *(["cut off"] if sample["truncated"] else []),
        f"weights {versions}",
    ]
    omitted = sample["length"] - len(sample["tokens"])
    half = len(sample["tokens"]) // 2
    parts = [_coloured(sample, 0, half if omitted else len(sample["tokens"]), ratio_cap)]
    if omitted:
        parts.append(f"<i>[{omitted} tokens left out]</i>")
        parts.append(_coloured(sample, half, len(sample["tokens"]), ratio_cap))
    return (
        f'<section class="card"><b>{", ".join(facts)}</b>'
        f'<details><summary>prompt</summary><pre dir="auto">{_escape(sample["prompt"])}</pre>'
        f'</details><pre dir="auto">{"".join(parts)}</pre></section>'
    )


def _coloured(sample: dict[str, Any], start: int, end: int, ratio_cap: float) -> str:
    """Return some tokens of a sample, with the colours of their ratios."""
    pieces = []
    for token, ratio in zip(sample["tokens"][start:end], sample["ratios"][start:end], strict=True):
        log_ratio = math.log(ratio) if ratio > 0 else -math.inf
        if abs(log_ratio) < VISIBLE_LOG_RATIO:
            pieces.append(_escape(token))
            continue
        share = min(1.0, abs(log_ratio) / math.log(ratio_cap)) if ratio_cap > 1 else 1.0
        strength = FAINTEST + (STRONGEST - FAINTEST) * share
        colour = HIGHER if log_ratio > 0 else LOWER
        pieces.append(
            f'<span style="background: rgba({colour}, {strength:.2f})" title="{ratio:g}">'
            f"{_escape(token)}</span>"
        )
    return "".join(pieces)


def _escape(text: str) -> str:
    """Return text as HTML that shows it; control characters become visible and harmless."""
    return html.escape("".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text))
