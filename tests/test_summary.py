"""The summary of a run's data, which is printed before anything starts."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from problem_files import CHAT_TEMPLATE, VERL, character_tokenizer, numbered, write_lines
from qurl_megatron.config.schema import Config
from qurl_megatron.data.prompts import load_prompts
from qurl_megatron.data.summary import BAR_WIDTH, BINS, length_lines, summarize


def summary(config: Config, chat_template: str | None = None) -> str:
    config.reward = "exact"
    config.evaluation.held_out_fraction = 0.0
    tokenizer = character_tokenizer(chat_template)
    return summarize(config, load_prompts(config, tokenizer), tokenizer)


def test_summary_accounts_for_every_entry_and_shows_a_prompt(tmp_path: Path) -> None:
    entries = [{"question": "x" * 12, "answer": "1"}, {"question": "x" * 40, "answer": "1"}]
    entries += numbered(*range(10), 3, 4)  # questions of 6 characters; 3 and 4 are repeated
    entries += [{"question": "3 + 1?", "answer": "four"}]
    config = Config(data=write_lines(tmp_path / "a.jsonl", *entries))
    config.rollout.max_prompt_length = 20
    config.evaluation.data = {"b": write_lines(tmp_path / "b.jsonl", *numbered(7, 99, 99))}
    assert (
        summary(config, CHAT_TEMPLATE)
        == f"""\
data: {tmp_path}/a.jsonl
  15 entries: 11 to train on, 0 held out, 4 dropped
  dropped 2: repeats an earlier problem; the first is {tmp_path}/a.jsonl line 13
  dropped 1: has more than 20 tokens (rollout.max_prompt_length); the first is \
{tmp_path}/a.jsonl line 2
  dropped 1: is in evaluation.data too
  questions with different answers, each kept as a problem: 1
evaluation.data.b: {tmp_path}/b.jsonl
  3 entries: 2 to evaluate on, 1 dropped
  dropped 1: repeats an earlier problem; the first is {tmp_path}/b.jsonl line 3
prompt lengths: 8 to 14 tokens, median 8
                8  ########################################  10
                9                                            0
               10                                            0
               11                                            0
               12                                            0
               13                                            0
               14  ####                                      1
chat template: yes
the first prompt, 14 tokens:
  | <user>{"x" * 12}<assistant>
"""
    )


def test_summary_says_what_the_tokenizer_lacks_and_escapes_control_characters(
    tmp_path: Path,
) -> None:
    question = "Red: \x1b[31m" + "\nSay it." + "y" * 3000 + "."
    data = write_lines(tmp_path / "a.jsonl", {"question": question, "answer": "5"})
    config = Config(data=data)
    config.rollout.max_prompt_length = 4000
    *_, lengths, template, title, first, second, left_out, last = summary(config).splitlines()
    assert lengths == "prompt lengths: 3,019 tokens each"
    assert template == "chat template: none, a prompt is the text of its question"
    assert title == "the first prompt, 3,019 tokens:"
    assert (first, second[:12]) == ("  | Red: \\x1b[31m", "  | Say it.y")
    assert left_out == "  | [1,019 characters not shown]"
    assert last == f"  | {'y' * 999}."


def test_summary_counts_the_prompts_with_a_system_message_of_their_own(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Own."}, {"role": "user", "content": "5?"}]
    data = write_lines(tmp_path / "a.jsonl", *numbered(1, 2), {**VERL, "prompt": chat})
    shown = summary(Config(data=data, system_prompt="Be brief."), CHAT_TEMPLATE)
    assert "\nsystem_prompt: given to 2 prompts; 1 have their own\n" in shown


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=60))
def test_histogram_counts_every_length_once(lengths: list[int]) -> None:
    title, *bins = length_lines(lengths)
    if len(set(lengths)) == 1:
        assert (title, bins) == (f"prompt lengths: {lengths[0]:,} tokens each", [])
        return
    assert 2 <= len(bins) <= BINS + 1
    counted = 0
    for line in bins:
        bounds, bar, count = line[:17], line[19 : 19 + BAR_WIDTH], line[19 + BAR_WIDTH :]
        low, *end = (int(bound.replace(",", "")) for bound in bounds.split("-"))
        high = end[0] if end else low
        number = int(count.replace(",", ""))
        assert number == sum(low <= length <= high for length in lengths)
        assert bar.strip() == "#" * len(bar.strip()) and bool(bar.strip()) == bool(number)
        counted += number
    assert counted == len(lengths)


def test_histogram_shows_a_single_prompt_among_many() -> None:
    assert length_lines([1] * 1000 + [2])[2].split() == ["2", "#", "1"]
