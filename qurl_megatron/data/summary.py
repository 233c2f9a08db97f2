"""What a run is about to train on, as text.

    data: problems.jsonl
      7,500 entries: 6,726 to train on, 747 held out, 27 dropped
      dropped 20: repeats an earlier problem; the first is problems.jsonl line 31
      dropped 7: has more than 100 tokens (rollout.max_prompt_length); the first is ...
    prompt lengths: 12 to 98 tokens, median 61
             0-15  ##                                        205
            16-31  ########                                  1,031
            ...
    chat template: yes
    the first prompt, 61 tokens:
      | <|im_start|>user
      | ...

It is printed before anything starts, and kept in the run's directory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import Config
from qurl_megatron.data.problems import Source
from qurl_megatron.data.prompts import PromptSet

BINS = 8
BAR_WIDTH = 40  # characters of the longest bar
SHOWN_CHARACTERS = 2000  # of a prompt; the middle of a longer one is left out


def summarize(config: Config, prompts: PromptSet, tokenizer: Any) -> str:
    """Return the summary of a run's data, which ends with a line break."""
    read = [*prompts.train, *prompts.held_out]
    uses = {"to train on": prompts.train, "held out": prompts.held_out}
    lines = source_lines("data", prompts.sources["data"], uses)
    for name, file in prompts.files.items():
        field = f"evaluation.data.{name}"
        lines += source_lines(field, prompts.sources[field], {"to evaluate on": file})
    lines += length_lines([len(prompt.token_ids) for prompt in read])
    has_template = bool(getattr(tokenizer, "chat_template", None))
    lines.append(
        f"chat template: {'yes' if has_template else 'none, a prompt is the text of its question'}"
    )
    if config.system_prompt:
        own = sum(source.own_system_prompts for source in prompts.sources.values())
        num_prompts = len(read) + sum(map(len, prompts.files.values()))
        lines.append(
            f"system_prompt: given to {num_prompts - own:,} prompts; {own:,} have their own"
        )
    first = prompts.train[0].token_ids
    lines.append(f"the first prompt, {len(first):,} tokens:")
    lines += [f"  | {line}" for line in _readable(tokenizer.decode(first)).split("\n")]
    return "\n".join(lines) + "\n"


def source_lines(name: str, source: Source, uses: Mapping[str, Sequence[Prompt]]) -> list[str]:
    """Return what became of the entries of a source: its uses, what was dropped and why."""
    dropped = sum(map(len, source.dropped.values()))
    counts = [f"{len(prompts):,} {use}" for use, prompts in uses.items()]
    lines = [
        f"{name}: {source.data}",
        f"  {source.entries:,} entries: {', '.join(counts)}, {dropped:,} dropped",
    ]
    for reason, locations in source.dropped.items():
        where = f"; the first is {locations[0]}" if locations[0] else ""
        lines.append(f"  dropped {len(locations):,}: {reason}{where}")
    lines += [f"  {note}" for note in source.notes]
    answers = Counter(prompt.question for prompts in uses.values() for prompt in prompts)
    several = sum(count > 1 for count in answers.values())
    if several:
        lines.append(f"  questions with different answers, each kept as a problem: {several:,}")
    return lines


def length_lines(lengths: list[int]) -> list[str]:
    """Return a histogram of prompt lengths, in at most `BINS` + 1 bins of equal width."""
    low, high = min(lengths), max(lengths)
    if low == high:
        return [f"prompt lengths: {low:,} tokens each"]
    width = 1
    while width * BINS < high - low + 1:
        width *= 2
    counts = Counter(length // width for length in lengths)
    lines = [f"prompt lengths: {low:,} to {high:,} tokens, median {median(lengths):,.0f}"]
    for number in range(low // width, high // width + 1):
        first, last = number * width, (number + 1) * width - 1
        bounds = f"{first:,}-{last:,}" if width > 1 else f"{first:,}"
        bar = "#" * -(-counts[number] * BAR_WIDTH // max(counts.values()))
        lines.append(f"  {bounds:>15}  {bar:<{BAR_WIDTH}}  {counts[number]:,}")
    return lines


def _readable(text: str) -> str:
    """Return text without its middle if it is long, and with control characters as escapes."""
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[{left_out:,} characters not shown]\n{text[-half:]}"
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )
