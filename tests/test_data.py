"""Prompts: reading, refusing, splitting, tokenizing and serving them."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reasoning_gym
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import Config
from qurl_megatron.data.prompts import (
    DataError,
    PromptStream,
    load_prompts,
    read_problems,
    split,
    tokenize,
)
from qurl_megatron.data.rewards import score

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def character_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token an ASCII character; the three roles are tokens of their own."""
    vocabulary = {chr(code): code for code in range(127)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0)))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    tokenizer.add_tokens(["<user>", "<assistant>"], special_tokens=True)
    tokenizer.chat_template = chat_template
    return tokenizer


def write(path: Path, *lines: Any) -> str:
    """A file of these lines: bytes as they are, everything else as JSON."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return str(path)


GOOD = {"question": "1 + 1?", "answer": "2"}


def test_jsonl_is_read_with_each_name_of_the_question(tmp_path: Path) -> None:
    data = write(
        tmp_path / "a.jsonl",
        GOOD,
        b"",
        {"prompt": "2 + 2?", "answer": 4, "level": "easy"},
        {"problem": "caf\u00e9\u2028au lait?", "answer": "yes", "metadata": {"source": "menu"}},
    )
    problems = read_problems(data, {}, "exact")
    assert [(p.question, p.answer, p.metadata) for p in problems] == [
        ("1 + 1?", "2", {}),
        ("2 + 2?", "4", {}),
        ("caf\u00e9\u2028au lait?", "yes", {"source": "menu"}),
    ]
    assert problems[1].where == f"{data} line 3"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"question": "1 + 1?", ', "line 3: not JSON"),
        (b'{"question": "\xff", "answer": "2"}', "line 3: not JSON"),
        ([1, 2], "line 3: a JSON list; an object is wanted"),
        ({"question": "3 + 3?"}, "line 3: answer is missing or empty"),
        ({"question": "3 + 3?", "answer": " "}, "line 3: answer is missing or empty"),
        ({"question": "3 + 3?", "answer": None}, "line 3: answer is missing or empty"),
        ({"question": "3 + 3?", "answer": ["6"]}, "line 3: answer is a list; a string is wanted"),
        ({"answer": "6"}, "line 3: question is missing or empty"),
        ({"prompt": "", "answer": "6"}, "line 3: prompt is missing or empty"),
        ({"prompt": [{"role": "user"}], "answer": "6"}, "line 3: prompt[0].content is missing"),
        ({"prompt": [], "answer": "6"}, "line 3: prompt is a list, but not one of chat messages"),
        ({"prompt": ["3 + 3?"], "answer": "6"}, "line 3: prompt is a list, but not one of chat"),
        (
            {"prompt": "3 + 3?", "reward_model": {"style": "rule"}},
            "line 3: reward_model.ground_truth is missing or empty",
        ),
        ({"question": "3 + 3?", "answer": "6", "metadata": "x"}, "line 3: metadata is a str"),
    ],
)
def test_broken_line_is_refused_with_its_number(tmp_path: Path, bad: Any, message: str) -> None:
    data = write(tmp_path / "a.jsonl", GOOD, {"question": "2 + 2?", "answer": "4"}, bad)
    with pytest.raises(DataError, match=re.escape(message)) as refusal:
        read_problems(data, {}, "exact")
    assert "a.jsonl" in str(refusal.value) and "\n" not in str(refusal.value)


def test_file_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing.jsonl", tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    for data, options, message in [
        (str(missing), {}, "missing.jsonl: no such file"),
        (str(empty), {}, "empty.jsonl: no problems"),
        (write(tmp_path / "a.csv", GOOD), {}, "a.csv: unsupported; a .jsonl, .json, .parquet file"),
        (str(tmp_path / "none"), {}, "none: no such file or directory"),
        (str(tmp_path / "none:test"), {}, "none:test: no such file or directory"),
        (write(tmp_path / "a.jsonl", GOOD), {"size": 3}, "data_options.size"),
    ]:
        with pytest.raises(DataError, match=re.escape(message)):
            read_problems(data, options, "exact")


CHAT = [{"role": "user", "content": "3 + 3?"}]
VERL = {
    "data_source": "math_dapo",
    "prompt": CHAT,
    "ability": "MATH",
    "reward_model": {"ground_truth": "6", "style": "rule"},
    "extra_info": {"index": "a"},
}
GSM8K = {"question": "48 and half of it?", "answer": "48/2 = <<48/2=24>>24\n48+24 = 72\n#### 72"}
DEEPSCALER = {"problem": "What is $x$?", "answer": "\\frac{1}{2}", "solution": "It is a half."}


def write_parquet(path: Path, *rows: Any) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


@pytest.mark.parametrize(
    ("row", "question", "right", "wrong"),
    [
        (VERL, "3 + 3?", "It is \\boxed{6}", "\\boxed{7}"),
        (GSM8K, "48 and half of it?", "She has #### 72", "She has #### 24"),
        (DEEPSCALER, "What is $x$?", "\\boxed{0.5}", "\\boxed{2}"),
    ],
    ids=["verl", "gsm8k", "deepscaler"],
)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_files_as_they_are_published_are_read_and_scored(
    row: dict[str, Any], question: str, right: str, wrong: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a{suffix}"
    data = {
        ".parquet": lambda: write_parquet(path, row, row),
        ".jsonl": lambda: write(path, row, row),
        ".json": lambda: write(path, [row, row]),
    }[suffix]()
    (problem,) = read_problems(data, {}, "math")
    assert (problem.question, problem.messages[-1]["content"]) == (question, question)
    assert score("math", right, problem) == (1.0, False)
    assert score("math", wrong, problem) == (0.0, False)


def test_broken_row_of_a_parquet_file_is_refused_with_its_number(tmp_path: Path) -> None:
    data = write_parquet(tmp_path / "a.parquet", GOOD, {"question": "2 + 2?"}, GOOD)
    with pytest.raises(DataError, match=r"a\.parquet row 2: answer is missing or empty"):
        read_problems(data, {}, "exact")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"a\.parquet: not readable as parquet") as refusal:
        read_problems(data, {}, "exact")
    assert "\n" not in str(refusal.value)


def questions(data: str) -> list[str]:
    return [problem.question for problem in read_problems(data, {}, "exact")]


def numbered(*numbers: int) -> list[dict[str, str]]:
    return [{"question": f"{n} + 1?", "answer": f"{n + 1}"} for n in numbers]


def test_dataset_directory_is_read_by_its_splits(tmp_path: Path) -> None:
    shards, saved = tmp_path / "shards", tmp_path / "saved"
    (shards / "data").mkdir(parents=True)
    write_parquet(shards / "data" / "train-00000-of-00002.parquet", *numbered(0, 1))
    write_parquet(shards / "data" / "train-00001-of-00002.parquet", *numbered(2))
    write_parquet(shards / "data" / "test-00000-of-00001.parquet", *numbered(3))
    splits = {"train": numbered(0, 1, 2), "test": numbered(3)}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    ).save_to_disk(saved)
    for directory in (shards, saved):
        assert questions(str(directory)) == ["0 + 1?", "1 + 1?", "2 + 1?"]
        assert questions(f"{directory}:test") == ["3 + 1?"]
        with pytest.raises(DataError, match="no split 'tset'; name one of train, test"):
            questions(f"{directory}:tset")


def test_only_split_of_a_directory_needs_no_name(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", *numbered(1, 2))
    assert questions(str(tmp_path)) == ["1 + 1?", "2 + 1?"]
    datasets.Dataset.from_list(numbered(5)).save_to_disk(tmp_path / "saved")
    assert questions(str(tmp_path / "saved")) == ["5 + 1?"]


def test_directory_of_several_datasets_is_refused_with_their_names(tmp_path: Path) -> None:
    """As GSM8K comes from the Hub."""
    configs = []
    for number, name in enumerate(("main", "socratic")):
        (tmp_path / name).mkdir()
        write_parquet(tmp_path / name / "train-00000-of-00001.parquet", *numbered(number))
        configs.append({"config_name": name, "data_files": f"{name}/train-*"})
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    with pytest.raises(DataError, match=r"\['main', 'socratic'\].*give one that is"):
        questions(str(tmp_path))
    assert questions(str(tmp_path / "socratic")) == ["1 + 1?"]


def test_broken_shard_is_named_with_its_line(tmp_path: Path) -> None:
    write(tmp_path / "train-0.jsonl", *numbered(1))
    write(tmp_path / "train-1.jsonl", *numbered(2), b"{broken")
    with pytest.raises(DataError, match=r"train-1\.jsonl line 2: not JSON"):
        questions(str(tmp_path))
    datasets.Dataset.from_list([GOOD, {"question": "2?"}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="saved split train row 2: answer is missing"):
        questions(str(tmp_path / "saved"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: not the directory of one dataset") as refusal:
        questions(str(tmp_path / "empty"))
    assert "\n" not in str(refusal.value)


def test_reading_a_directory_leaves_nothing_behind_and_asks_no_network(tmp_path: Path) -> None:
    """In a process of its own, as the library reads its environment when it is imported."""
    data, home, scratch = tmp_path / "data", tmp_path / "home", tmp_path / "scratch"
    for directory in (data, home, scratch):
        directory.mkdir()
    write(data / "train.jsonl", GOOD)
    script = (
        "import socket, sys\n"
        "def refuse(*_): raise AssertionError('a connection was made')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from qurl_megatron.data.prompts import read_problems\n"
        f"print(len(read_problems({str(data)!r}, {{}}, 'exact')))\n"
    )
    environment = {"HOME": str(home), "HF_HOME": str(home / "hf"), "TMPDIR": str(scratch)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "1\n", done.stderr
    assert list(scratch.iterdir()) == [] and list(home.iterdir()) == []
    assert [path.name for path in data.iterdir()] == ["train.jsonl"]


def test_line_that_reasoning_gym_cannot_score_is_refused_with_its_number(tmp_path: Path) -> None:
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=0)[0]
    data = write(tmp_path / "a.jsonl", entry, GOOD)
    with pytest.raises(DataError, match="line 2: no metadata.source_dataset"):
        read_problems(data, {}, "reasoning_gym")
    stripped = {**entry, "metadata": {"source_dataset": "countdown"}}
    data = write(tmp_path / "b.jsonl", stripped)
    with pytest.raises(DataError, match="line 1: .*does not accept the problem's own answer"):
        read_problems(data, {}, "reasoning_gym")


def test_500_generated_problems_load_and_score_with_their_own_verifier(tmp_path: Path) -> None:
    entries = list(reasoning_gym.create_dataset("chain_sum", size=520, seed=3))
    data = write(tmp_path / "chain_sum.jsonl", *entries)
    config = Config(data=str(data), reward="reasoning_gym")
    config.rollout.max_prompt_length = 256
    prompts, held_out, _ = load_prompts(config, character_tokenizer())
    assert len(prompts) + len(held_out) == len({entry["question"] for entry in entries}) >= 500
    for prompt in prompts + held_out:
        right = f"I add.\n<answer>{prompt.answer}</answer>"
        assert score("reasoning_gym", right, prompt) == (1.0, False)
        assert score("reasoning_gym", f"{prompt.answer}1", prompt) == (0.0, False)


SPELL_BACKWARD = "reasoning_gym:spell_backward"
SHORT_WORDS = {"min_word_len": 3, "max_word_len": 8}


def test_task_is_generated_with_its_options_and_without_repeated_questions() -> None:
    problems = read_problems(SPELL_BACKWARD, {**SHORT_WORDS, "size": 3000}, "reasoning_gym")
    assert len({problem.question for problem in problems}) == len(problems)
    assert 2900 < len(problems) < 3000  # 3,000 draws out of 88,186 words repeat about 50
    for problem in problems:
        assert problem.question.endswith(f": {problem.answer[::-1]}")
        assert 3 <= len(problem.answer) <= 8


def test_same_seed_gives_the_same_problems_and_another_one_others() -> None:
    def generated(seed: int, options: dict[str, int]) -> list[str]:
        options = {"size": 50, **options}
        return [p.question for p in read_problems(SPELL_BACKWARD, options, "exact", seed=seed)]

    assert generated(0, {}) == generated(0, {}) != generated(1, {})
    assert generated(1, {"seed": 0}) == generated(0, {})  # the task's own option wins


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("reasoning_gym:spel_backward", {}, "no such task; did you mean spell_backward"),
        (SPELL_BACKWARD, {"max_word_length": 8}, "data_options.max_word_length.*max_word_len"),
        (SPELL_BACKWARD, {"min_word_len": 9, "max_word_len": 8}, "max_word_len must be >="),
        ("reasoning_gym:rubiks_cube", {"size": 2}, "entry 0: answer is missing"),
    ],
)
def test_wrong_task_or_option_is_refused_in_one_line(
    data: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message) as refusal:
        read_problems(data, options, "reasoning_gym")
    assert "\n" not in str(refusal.value)


def prompts(*questions: str) -> list[Prompt]:
    return [Prompt(question, question, "answer", [1]) for question in questions]


def test_no_question_is_on_both_sides_whatever_else_is_in_the_data() -> None:
    everything = prompts(*(f"What is {n}?" for n in range(2000)))
    train, held_out = split(everything, 0.1)
    assert len(train) + len(held_out) == 2000
    assert 150 < len(held_out) < 250  # 0.1 of 2000, standard deviation 13
    held_out_questions = {prompt.question for prompt in held_out}
    again = split(everything[::-3], 0.1).held_out
    assert {p.question for p in again} <= held_out_questions
    wider = {p.question for p in split(everything, 0.2).held_out}
    assert held_out_questions < wider


def test_questions_that_differ_in_case_or_spacing_are_on_the_same_side() -> None:
    for n in range(100):
        sides = split(prompts("anchor", f"Spell  POLISH {n}", f"spell polish\n{n}"), 0.0)
        assert len(sides.train) == 3
    both = prompts(*(f"Spell POLISH {n}" for n in range(200)))
    lower = prompts(*(f" spell  polish {n}" for n in range(200)))
    upper_held_out = [p.question.casefold().split() for p in split(both, 0.5).held_out]
    lower_held_out = [p.question.split() for p in split(lower, 0.5).held_out]
    assert upper_held_out == lower_held_out


def test_split_is_the_same_on_every_machine() -> None:
    """Written down once: a different hash would move questions over to the other side."""
    held_out = split(prompts(*(f"What is {n}?" for n in range(20))), 0.2).held_out
    assert [p.question for p in held_out] == ["What is 15?", "What is 16?", "What is 18?"]


def test_split_that_leaves_a_side_empty_is_refused() -> None:
    with pytest.raises(DataError, match="leaves none to hold out"):
        split(prompts("What is 1?"), 1e-9)
    with pytest.raises(DataError, match="leaves none to train on"):
        split(prompts("What is 1?"), 1.0)
    assert split(prompts("What is 1?"), 0.0).held_out == []


def test_no_question_of_a_file_to_evaluate_on_is_trained_on(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", *numbered(*range(60)))
    seen = [{"question": f" {n}  +\t1?", "answer": f"{n + 1}"} for n in range(50)]
    tests = write(tmp_path / "b.jsonl", *seen, *numbered(1000))
    config = Config(data=data, reward="exact")
    config.evaluation.data = {"b": tests}
    train, held_out, files = load_prompts(config, character_tokenizer())
    assert len(files["b"]) == 51
    assert 0 < len(train) < 10 and held_out
    assert not {p.question for p in train} & {f"{n} + 1?" for n in range(50)}
    config.evaluation.data = {"b": data}
    with pytest.raises(DataError, match="every problem to train on is in evaluation.data too"):
        load_prompts(config, character_tokenizer())


def test_nothing_is_held_out_of_a_run_that_asks_for_nothing(tmp_path: Path) -> None:
    config = Config(data=write(tmp_path / "a.jsonl", *numbered(*range(60))), reward="exact")
    config.evaluation.held_out_fraction = 0.0
    assert [len(part) for part in load_prompts(config, character_tokenizer())] == [60, 0, 0]


def test_question_is_tokenized_as_it_stands_without_a_chat_template(tmp_path: Path) -> None:
    problems = read_problems(write(tmp_path / "a.jsonl", GOOD), {}, "exact")
    [prompt] = tokenize(problems, character_tokenizer(), max_prompt_length=6)
    assert prompt.token_ids == [ord(character) for character in "1 + 1?"]
    assert (prompt.question, prompt.answer, prompt.metadata) == ("1 + 1?", "2", {})


def test_chat_template_makes_it_the_users_turn_and_opens_the_assistants(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(CHAT_TEMPLATE)
    user = tokenizer.convert_tokens_to_ids("<user>")
    assistant = tokenizer.convert_tokens_to_ids("<assistant>")
    problems = read_problems(write(tmp_path / "a.jsonl", GOOD), {}, "exact")
    [prompt] = tokenize(problems, tokenizer, max_prompt_length=8)
    assert prompt.token_ids == [user, *(ord(character) for character in "1 + 1?"), assistant]


def test_chat_goes_through_the_chat_template_as_it_is(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(CHAT_TEMPLATE)
    tokenizer.add_tokens(["<system>"], special_tokens=True)
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    problems = read_problems(
        write(tmp_path / "a.jsonl", VERL, {**VERL, "prompt": chat}), {}, "math"
    )
    alone, after_system = tokenize(problems, tokenizer, max_prompt_length=100)
    assert tokenizer.decode(alone.token_ids).replace(" ", "") == "<user>3+3?<assistant>"
    shown = tokenizer.decode(after_system.token_ids).replace(" ", "")
    assert shown == "<system>Bebrief.<user>3+3?<assistant>"
    assert alone.id != after_system.id


def test_chat_that_needs_a_template_is_refused_without_one(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    data = write(tmp_path / "a.jsonl", VERL, {**VERL, "prompt": chat})
    problems = read_problems(data, {}, "math")
    with pytest.raises(DataError, match="line 2: a chat of 2 messages, and .* no chat template"):
        tokenize(problems, character_tokenizer(), max_prompt_length=100)
    (alone,) = tokenize(problems[:1], character_tokenizer(), max_prompt_length=100)
    assert len(alone.token_ids) == len("3 + 3?")
    strict = character_tokenizer("{{ raise_exception('system messages are not supported') }}")
    with pytest.raises(DataError, match="line 1: the chat template refuses it.*not supported"):
        tokenize(problems, strict, max_prompt_length=100)


def test_prompt_that_is_too_long_is_refused_with_its_line_and_length(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", GOOD, {"question": "x" * 40, "answer": "2"})
    problems = read_problems(data, {}, "exact")
    with pytest.raises(DataError, match="line 2: the prompt has 40 tokens.*max_prompt_length 39"):
        tokenize(problems, character_tokenizer(), max_prompt_length=39)
    assert len(tokenize(problems, character_tokenizer(), max_prompt_length=40)) == 2


def test_stream_serves_each_prompt_once_an_epoch_in_a_new_order() -> None:
    stream = PromptStream(prompts(*"abcdefghijklm"), seed=0)
    served = [prompt.question for _ in range(13) for prompt in stream.next(3)]
    epochs = ["".join(served[start : start + 13]) for start in (0, 13, 26)]
    assert all(sorted(epoch) == list("abcdefghijklm") for epoch in epochs)
    assert len(set(epochs)) == 3


def test_stream_serves_more_than_an_epoch_at_once() -> None:
    served = PromptStream(prompts(*"abc"), seed=0).next(8)
    counts = Counter(prompt.question for prompt in served)
    assert set(counts) == set("abc") and max(counts.values()) == 3


def test_stream_goes_on_where_it_was_saved() -> None:
    def fresh(seed: int) -> PromptStream:
        return PromptStream(prompts(*"abcdefghij"), seed)

    stream = fresh(0)
    stream.next(17)
    state = json.loads(json.dumps(stream.state()))
    resumed = fresh(5)
    resumed.restore(state)
    assert resumed.next(40) == stream.next(40)
    assert fresh(5).next(10) != fresh(0).next(10)


def test_stream_refuses_a_cursor_over_other_prompts() -> None:
    state = PromptStream(prompts(*"abc"), seed=0).state()
    with pytest.raises(DataError, match="other prompts"):
        PromptStream(prompts(*"abd"), seed=0).restore(state)
    with pytest.raises(DataError, match="at least one"):
        PromptStream([], seed=0)
