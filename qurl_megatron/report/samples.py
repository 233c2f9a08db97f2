"""Completions of a run that are kept to be read: the lines of samples.jsonl, and tables of them."""

from __future__ import annotations

import dataclasses
import html

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


def ends(items: list[int]) -> list[int]:
    """Return the first and the last of more than `SHOWN_TOKENS` items."""
    half = SHOWN_TOKENS // 2
    return items if len(items) <= SHOWN_TOKENS else items[:half] + items[-half:]


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
