"""Completions of a run that are kept to be read: lines of samples.jsonl, tables, and in the report.

Text that a model has written is always escaped, and on the page set apart from its direction.
"""

from __future__ import annotations

import dataclasses
import html
import math
from typing import Any

from qurl_megatron.report.record import RunRecord

VISIBLE_LOG_RATIO = 0.02  # a token whose ratio is closer to 1 has no colour
FAINTEST, STRONGEST = 0.15, 0.8  # opacities of a colour; the strongest from C on
LOWER, HIGHER = "43, 140, 214", "213, 94, 0"  # colours: blue below 1, orange above
SHOWN_CHARACTERS = 4096  # of a prompt or a completion; the middle of a longer one is left out
SHOWN_TOKENS = 512  # with their ratios; likewise
KINDS = ("highest reward", "lowest reward", "cut off", "largest ratio")
"""Why a completion was chosen."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One line of samples.jsonl."""

    step: int
    """Step that trained it."""

    kind: str
    """Why it was chosen, of `KINDS`. The largest ratio is that of a single token, in either
    direction."""

    prompt: str
    """The question, at most `SHOWN_CHARACTERS` of it."""

    text: str
    """The completion, at most `SHOWN_CHARACTERS` of it."""

    reward: float
    """Reward it was trained with, after the penalty for overlong responses."""

    parts: dict[str, float]
    """Named parts of the reward, from a verifier that gives them."""

    length: int
    """Number of tokens."""

    truncated: bool
    """Whether it was cut off at `rollout.max_response_length`."""

    weight_versions: list[int]
    """Versions of the weights that sampled its tokens, ascending."""

    tokens: list[str]
    """Text of each token; of more than `SHOWN_TOKENS`, the first and the last."""

    ratios: list[float]
    """Ratio proximal / behaviour of each token in `tokens`."""


def shorten(text: str) -> str:
    """Return a text without the middle, if it is longer than `SHOWN_CHARACTERS`."""
    omitted = len(text) - SHOWN_CHARACTERS
    half = SHOWN_CHARACTERS // 2
    if omitted <= 0:
        return text
    return f"{text[:half]} [... {omitted} characters left out ...] {text[-half:]}"


COLUMNS = ("step", "kind", "reward", "length", "truncated", "weight_versions", "prompt", "text")


def table_rows(samples: list[Sample]) -> list[list[object]]:
    """Return the rows of a table of samples, with `COLUMNS`."""
    rows = []
    for sample in samples:
        row: dict[str, object] = dataclasses.asdict(sample)
        row["weight_versions"] = ", ".join(map(str, sample.weight_versions))
        rows.append([row[column] for column in COLUMNS])
    return rows


def markdown_table(samples: list[Sample]) -> str:
    """Return a table of samples for TensorBoard, which renders Markdown and HTML."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *table_rows(samples)]
    return "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)


def _markdown_cell(value: object) -> str:
    """Return a value as one cell: none of its characters is a mark of Markdown or of HTML."""
    text = html.escape(f"{value:.3g}" if isinstance(value, float) else str(value))
    marks = {ord(mark): f"&#{ord(mark)};" for mark in "|\\`*_{}[]()#+!~$"}
    return text.translate(marks).replace("\n", "<br>")


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
        log_ratio = math.log(ratio) if ratio > 0 else -math.inf
        piece = _escape(token)
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
