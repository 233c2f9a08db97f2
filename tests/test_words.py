"""Plain English: phrases that nobody would say aloud stay out of the program and its pages."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROGRAM = ("qurl_megatron", "launch", "recipes", "benchmarks")
FILES = [
    *(path for folder in PROGRAM for path in (REPOSITORY / folder).rglob("*.py")),
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(REPOSITORY / "docs").rglob("*.md"),
]
PHRASES = {
    r"\bthose (that|which|who)\b": "name the thing again",
    r"\b(server|rank|process|learner|machine|node|job|run)(s|es)? who\b": "which, not who",
    r"\b(is|are) none of\b": "is not a",
    r"\bthat each of\b": "one clause for each thought",
    r"\bin order to\b": "to",
    r"\bquantis": "quantize",
    r'"""Have \w+': "let it, or a verb of its own",
    r"@@|TODO|FIXME": "finish it",
}


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_text_has_the_phrase(phrase: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}: {match[0]!r}; {PHRASES[phrase]}"
        for path in FILES
        for match in re.finditer(phrase, re.sub(r"\s+", " ", path.read_text()))
    ]
    assert not found, "\n".join(found)
