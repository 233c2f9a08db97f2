"""Reading problems: every source and format, and what is refused."""

import csv
import gzip
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reasoning_gym

from problem_files import CHAT, GOOD, VERL, numbered, write_lines
from qurl_megatron.config.schema import Config
from qurl_megatron.data.entries import MAX_DEPTH, DataError
from qurl_megatron.data.problems import RECOGNIZED, Fields, Problem, keep_verifiable, read_problems
from qurl_megatron.model.hub import local_model
from qurl_megatron.model.repository import HubError


def read(tmp_path: Path, *entries: Any, fields: Fields = RECOGNIZED) -> list[Problem]:
    """Write entries to the lines of a.jsonl, and return the problems that are read from it."""
    return read_problems(write_lines(tmp_path / "a.jsonl", *entries), {}, fields=fields).problems


def write_parquet(path: Path, *rows: Any) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def refusal(data: str, message: str, options: Mapping[str, Any] | None = None) -> None:
    """Check that data is refused in one line with this text in it."""
    with pytest.raises(DataError, match=re.escape(message)) as refused:
        read_problems(data, options or {})
    assert "\n" not in str(refused.value)


def test_a_reward_function_gets_the_prompt_of_a_conversation_without_the_answer(
    tmp_path: Path,
) -> None:
    asked = [{"role": "user", "content": "1 + 1?"}]
    chat = [*asked, {"role": "assistant", "content": "2"}]
    kept = Fields(for_function=True)
    (problem,) = read(tmp_path, {"messages": chat, "level": 3}, fields=kept)
    assert problem.columns == {"prompt": asked, "messages": chat, "level": 3}
    (problem,) = read(tmp_path, GOOD, fields=kept)
    assert problem.columns == GOOD
    with pytest.raises(DataError, match="line 1: has no field level, .* question, answer"):
        read(tmp_path, GOOD, fields=kept._replace(columns=["answer", "level"]))


def test_a_function_of_the_users_own_gets_any_answer_as_it_is(tmp_path: Path) -> None:
    own = Fields(for_function=True)
    target = {"target": 98, "numbers": [44, 19, 35]}
    for answer in (target, [target], True, [["6"]], {"target": ["n1", "N"]}, '["6"]'):
        entry = {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": answer}}
        for data in (
            write_lines(tmp_path / "a.jsonl", entry, entry),
            write_parquet(tmp_path / "a.parquet", entry, entry),
        ):
            (problem,) = read_problems(data, {}, fields=own).problems
            assert problem.answer == answer and not problem.answers
    for value, text, texts in ((2.0, "2", ()), ([1, 2], "1", ("1", "2")), ("2", "2", ())):
        (number,) = read(tmp_path, {**GOOD, "answer": value}, fields=own)
        assert (number.answer, number.answers, number.asked.given) == (text, texts, value)
    refusal(
        write_lines(tmp_path / "a.jsonl", {**GOOD, "answer": target}),
        "answer is a dict; expected a string or a number, such as answer.target, answer.numbers",
    )
    with pytest.raises(DataError, match=r"answer\[0\] is a dict; expected a string or a number$"):
        read(tmp_path, {**GOOD, "answer": [target]})  # no key names a field of an element


def test_a_function_of_the_users_own_may_do_without_answers(tmp_path: Path) -> None:
    own = Fields(for_function=True)
    prompts = [{"prompt": f"A tweet on topic {number}."} for number in (0, 1, 1)]
    data = write_lines(tmp_path / "a.jsonl", *prompts)
    source = read_problems(data, {}, fields=own)
    assert [(p.question, p.answer) for p in source.problems] == [
        ("A tweet on topic 0.", None),
        ("A tweet on topic 1.", None),
    ]
    assert source.notes == ["no entry has an answer, and the function gets None"]
    assert source.dropped == {"repeats an earlier problem": [f"{data} line 3"]}
    refusal(data, "line 1: answer is missing or empty")  # a built-in verifier needs them
    with pytest.raises(DataError, match="line 1: gold is missing"):
        read_problems(data, {}, fields=own._replace(answer="gold"))
    with pytest.raises(DataError, match="line 2: .*; 1 of 2 entries have no answer; prompts"):
        read(tmp_path, GOOD, prompts[0], fields=own)


DATA_AS_TEXT = ['{"target": 5}', "{'target': 5}", '["1", ["2"]]', '[{"target": 5}]', '["1", ""]']


@pytest.mark.parametrize("reward", ["math", "dapo", "deepscaler", "gsm8k"])
def test_an_answer_that_is_the_text_of_an_object_is_no_mathematics(
    reward: str, tmp_path: Path
) -> None:
    """As the object itself it is refused; a set, an interval and a matrix are mathematics."""
    answers = [*DATA_AS_TEXT, '["7", 8]', "#### 9"]
    if reward == "math":
        answers += ["[0, 1]", "{1, 2}", "[[1, 2], [3, 4]]"]
    rows = [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(answers)]
    data = write_lines(tmp_path / "a.jsonl", *rows)
    source = read_problems(data, {})
    keep_verifiable({"": source}, Config(reward=reward))
    assert [each.answer for each in source.problems] == answers[len(DATA_AS_TEXT) :]
    (reasons,) = source.dropped.values()
    assert len(reasons) == len(DATA_AS_TEXT)
    assert reasons[0] == (
        f"{data} line 1: the answer {DATA_AS_TEXT[0]!r} is an object or a nested list, not one "
        "answer"
    )


@pytest.mark.parametrize("reward", ["math", "dapo", "deepscaler", "exact"])
def test_an_answer_that_says_that_there_is_none_is_no_answer(reward: str, tmp_path: Path) -> None:
    answers = ["proof", "2", " NotFound", "proof by cases"]
    rows = [{"problem": f"{n}?", "answer": answer} for n, answer in enumerate(answers)]
    source = read_problems(write_lines(tmp_path / "a.jsonl", *rows), {})
    keep_verifiable({"": source}, Config(reward=reward))
    if reward == "exact":  # which compares any text
        assert len(source.problems) == 4
        return
    assert {"2"} <= {problem.answer for problem in source.problems} <= {"2", "proof by cases"}
    (reasons,) = source.dropped.values()
    assert reasons[0].endswith("line 1: the answer 'proof' says that there is none to compare")


def test_answers_among_words_are_counted(tmp_path: Path) -> None:
    answers = ["18 wolves", "5 dollars", "The answer is 5", "6", "x", "5 (five)"]
    rows = [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(answers)]
    data = write_lines(tmp_path / "a.jsonl", *rows)
    for reward, noted in {"math": True, "deepscaler": True, "dapo": True, "exact": False}.items():
        source = read_problems(data, {})
        keep_verifiable({"a": source}, Config(reward=reward))
        note = f"2 answers are a number among words, .* reward {reward}; .* line 1: '18 wolves'"
        assert len(source.notes) == noted
        assert not noted or re.search(note, source.notes[0])
        assert len(source.problems) == len(answers)


def test_jsonl_accepts_every_name_of_the_question_field(tmp_path: Path) -> None:
    problems = read(
        tmp_path,
        GOOD,
        b"",
        {"prompt": "2 + 2?", "answer": 4, "level": "easy"},
        {"problem": "caf\u00e9\u2028au lait?", "answer": "yes", "metadata": {"source": "menu"}},
    )
    assert [(p.question, p.answer, p.metadata) for p in problems] == [
        ("1 + 1?", "2", {}),
        ("2 + 2?", "4", {}),
        ("caf\u00e9\u2028au lait?", "yes", {"source": "menu"}),
    ]
    assert problems[1].location == f"{tmp_path}/a.jsonl line 3"


def test_metadata_is_an_object_or_its_text_and_anything_else_is_ignored(tmp_path: Path) -> None:
    for metadata, read_as in (('{"level": 3}', {"level": 3}), ("menu", {}), ("[1]", {}), (7, {})):
        (problem,) = read(tmp_path, {**GOOD, "metadata": metadata})
        assert problem.metadata == read_as


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"question": "1 + 1?", ', "not JSON"),
        (
            b'{"question": "1 + 1?", "answer": "1", "answer": "2"}',
            "not JSON (the field answer is given twice)",
        ),
        (
            {"question": "1?", "prompt": "2?", "answer": "2"},
            "has question and prompt, which differ; ask one with prompts.question_key=question or",
        ),
        (
            {"prompt": [{"role": "assistant", "content": "2"}], "answer": "2"},
            "the last message of prompt is the",
        ),
        (b'{"question": "\xff", "answer": "2"}', "not JSON"),
        ([1, 2], "a JSON list; expected an object"),
        ({"question": "3 + 3?", "answer": " "}, "answer is missing or empty"),
        (
            {"question": "3 + 3?", "answer": {"x": 6}},
            "answer is a dict; expected a string or a number, such as answer.x",
        ),
        ({"question": "3 + 3?", "answer": True}, "answer is a bool; expected a string or a number"),
        ({"question": "3 + 3?", "answer": [["6"]]}, "answer[0] is a list; expected a string or"),
        ({"question": "3 + 3?", "answer": ["6", ""]}, "answer[1] is missing or empty"),
        (
            {"question": "3 + 3?", "answer": []},
            "answer is an empty list; expected at least one answer; 1 of 3 entries have no answer; "
            "prompts.incomplete=drop leaves such entries out",
        ),
        ({"prompt": "", "answer": "6"}, "prompt is missing or empty"),
        ({"prompt": [{"role": "user"}], "answer": "6"}, "prompt[0].content is missing"),
        ({"prompt": [], "answer": "6"}, "prompt is a list, but not of chat messages"),
        ({"prompt": ["3 + 3?"], "answer": "6"}, "prompt is a list, but not of chat"),
        (
            {"text": "3 + 3?", "answer": "6"},
            "question is missing or empty; the entry has text, answer (name another field with "
            "prompts.question_key=)",
        ),
        (
            {"question": "3 + 3?", "label": "6"},
            "answer is missing or empty; the entry has question, label (name another field with "
            "prompts.answer_key=)",
        ),
        (b'{"question": "\\ud800", "answer": "6"}', "question is not Unicode text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content has an image, audio or video; the policy reads text; prompts",
        ),
        ({"messages": CHAT}, "answer is missing or empty"),
        (
            {"question": "3 + 3?", "answer": float("nan")},
            "answer is missing or empty; the entry has question, answer (name another field with "
            "prompts.answer_key=); 1 of 3 entries have no answer; prompts.incomplete=drop leaves",
        ),
        ({"question": "3 + 3?", "answer": float("inf")}, "answer is inf; expected text or a fin"),
        ({"prompt": json.dumps(CHAT), "answer": "6"}, "prompt is a text with a list of chat messa"),
        (
            {"question": f" {CHAT}", "answer": "6"},
            "question is a text with a list of chat messages",
        ),
        (
            {"messages": json.dumps(CHAT[0]), "answer": "6"},
            "messages is a text with a list of chat",
        ),
        ({"question": float("inf"), "answer": "6"}, "question is inf; expected text or a finite"),
        (
            {"instruction": "Add.", "input": "3 + 3", "output": "6"},
            "has Alpaca's fields; give prompts.",
        ),
        ({"prompt": "1?", "chosen": "1", "rejected": "2"}, "has chosen and rejected, a preference"),
        ({"prompt": "3?", "reward_model": {}}, "reward_model.ground_truth is missing or empty"),
    ],
)
def test_broken_line_is_refused_and_its_number_is_named(
    tmp_path: Path, bad: Any, message: str
) -> None:
    data = write_lines(tmp_path / "a.jsonl", GOOD, {"question": "2 + 2?", "answer": "4"}, bad)
    refusal(data, f"{data} line 3: {message}")


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_entry_that_is_nested_too_deeply_is_refused_in_one_line(
    suffix: str, tmp_path: Path
) -> None:
    path, where = tmp_path / f"a{suffix}", "" if suffix == ".json" else " line 1"
    # To the limit it may be, with the entry and its metadata; Python's own limit is about 1,000.
    for depth in (MAX_DEPTH - 2, MAX_DEPTH - 1, 600, 100_000):
        nested = b"[" * depth + b"]" * depth
        line = b'{"question": "1 + 1?", "answer": "2", "metadata": {"x": %s}}' % nested
        path.write_bytes(b"[" + line + b"]" if suffix == ".json" else line)
        if depth == MAX_DEPTH - 2 and suffix == ".jsonl":
            [problem] = read_problems(str(path), {}).problems
            assert pickle.loads(pickle.dumps(problem)) == problem  # so it reaches the workers
        else:
            refusal(str(path), f"a{suffix}{where}: nested more than {MAX_DEPTH} deep; expected")


def test_unusable_source_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    write_lines(tmp_path / "a.txt", GOOD)
    for name, message in {
        "missing.jsonl": "no such file or directory",
        "none": "no such file or directory",
        "none:test": "no such file or directory",
        "empty.jsonl": "contains no problems",
        "a.txt": "unsupported; expected a .jsonl, .json, .parquet, .csv, .tsv or .jsonl.gz file",
    }.items():
        refusal(f"{tmp_path}/{name}", f"{name}: {message}")
    refusal(write_lines(tmp_path / "a.jsonl", GOOD), "prompts.options.size", {"size": 3})


def test_published_file_formats_are_read(tmp_path: Path) -> None:
    gsm8k = {"question": "48 and half of it?", "answer": "48/2 = <<48/2=24>>24\n#### 72"}
    deepscaler = {"problem": "What is $x$?", "answer": "\\frac{1}{2}", "solution": "A half."}
    for row, question, answer in [
        (VERL, "3 + 3?", "6"),
        (gsm8k, "48 and half of it?", gsm8k["answer"]),
        (deepscaler, "What is $x$?", "\\frac{1}{2}"),
    ]:
        for data in (
            write_parquet(tmp_path / "a.parquet", row, row),
            write_lines(tmp_path / "a.jsonl", row, row),
            write_lines(tmp_path / "a.json", [row, row]),
        ):
            (problem,) = read_problems(data, {}).problems
            assert (problem.question, problem.answer) == (question, answer)
            assert problem.messages[-1]["content"] == question


NUMBERS: dict[str, Any] = {
    "27": 27.0,
    "-3": -3,
    "0": -0.0,
    "0.1": 0.1,
    "0.00001": 1e-5,
    "10000000000000000000000": 1e22,
    "12345678901234567890": 12345678901234567890,
    "2.5": Decimal("2.50"),
    "1234567890123456789012345678.12345": Decimal("1234567890123456789012345678.12345"),
    "16777216": np.float32(16777216),
    "0.3": np.float32(0.3),
    "0.0000001": np.float32(1e-7),
    "0.7": np.float16(0.7),
    "2047": np.float16(2047),
    "100000000000": np.float32(1e11),
}


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_has_the_same_text_in_every_file(text: str, tmp_path: Path) -> None:
    """Also in a struct and in a list, and the shortest decimal is that of its own type."""
    number = NUMBERS[text]
    if isinstance(number, int) and number > 2**63:  # no Arrow type of so many bits
        assert [problem.answer for problem in read(tmp_path, {**GOOD, "answer": number})] == [text]
        return
    column = pa.array([number])
    structs = pa.StructArray.from_arrays([column], names=["ground_truth"])
    lists = pa.array([[number]], pa.list_(column.type))
    question = pa.array(["How many?"])
    for name, values in {"answer": column, "reward_model": structs, "list": lists}.items():
        table = pa.table({"question": question, "answer" if name == "list" else name: values})
        pq.write_table(table, tmp_path / "a.parquet")
        datasets.Dataset(table).save_to_disk(tmp_path / name)
        for data in (f"{tmp_path}/a.parquet", f"{tmp_path}/{name}"):
            (problem,) = read_problems(data, {}).problems
            assert (problem.answer, problem.answers) == (text, (text,) if name == "list" else ())
    if isinstance(number, int | float) and not isinstance(number, np.generic):
        assert [problem.answer for problem in read(tmp_path, {**GOOD, "answer": number})] == [text]


def test_every_answer_of_a_list_is_kept_and_the_first_is_the_answer(tmp_path: Path) -> None:
    several = {"question": "x^2 = 4?", "answer": ["2", -2.0]}
    for data in (
        write_lines(tmp_path / "a.jsonl", several, several, {**several, "answer": ["2"]}),
        write_lines(tmp_path / "a.json", [several, {**several, "answer": "2"}]),
    ):
        problems = read_problems(data, {}).problems
        assert [(p.answer, p.answers) for p in problems][0] == ("2", ("2", "-2"))
        assert len(problems) == 2
    alone = read(tmp_path, {**several, "answer": ["2"]}, {**several, "answer": "2"})
    assert [(p.answer, p.answers) for p in alone] == [("2", ("2",))]  # the second repeats it


def test_entries_without_an_answer_are_refused_with_their_number_or_dropped(
    tmp_path: Path,
) -> None:
    gaps: list[Any] = [None, "", " ", float("nan"), []]
    entries = [GOOD, *({"question": f"{n}?", "answer": gap} for n, gap in enumerate(gaps))]
    data = write_lines(tmp_path / "a.jsonl", *entries, {"question": "no field"})
    refusal(data, "a.jsonl line 2: answer is missing or empty; the entry has question, answer (")
    refusal(data, "; 6 of 7 entries have no answer; prompts.incomplete=drop leaves such entries o")
    source = read_problems(data, {}, fields=Fields(incomplete="drop"))
    assert [problem.question for problem in source.problems] == ["1 + 1?"]
    assert source.dropped == {"has no answer": [f"{data} line {n}" for n in range(2, 8)]}
    column = pa.table({"question": ["1?", "2?"], "answer": pa.array([1.0, float("nan")])})
    pq.write_table(column, tmp_path / "a.parquet")
    source = read_problems(f"{tmp_path}/a.parquet", {}, fields=Fields(incomplete="drop"))
    assert [problem.answer for problem in source.problems] == ["1"]
    data = write_lines(tmp_path / "b.jsonl", {"question": "1?", "answer": None})
    with pytest.raises(
        DataError, match="line 1: answer is missing.*1 of 1 entries have no answer$"
    ):
        read_problems(data, {}, fields=Fields(incomplete="drop"))


@pytest.mark.parametrize(
    "encoding",
    ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "BOM utf-16-be", "utf-32"],
)
def test_a_byte_order_mark_and_utf_16_are_read_in_every_form(encoding: str, tmp_path: Path) -> None:
    entries = [
        {"question": f"caf\u00e9 \u2028\u4e2d \U0001f600 {n}?", "answer": n} for n in range(9)
    ]
    lines = "\r\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    mark = "\ufeff" if encoding.startswith("BOM") else ""
    for name, text in {
        "a.jsonl": lines,
        "b.json": f"\n{lines}\n",
        "c.json": json.dumps(entries, ensure_ascii=False),
        "d.json": "\n" + json.dumps(entries, ensure_ascii=False, indent=2),
    }.items():
        (tmp_path / name).write_bytes((mark + text).encode(encoding.removeprefix("BOM ")))
        problems = read_problems(f"{tmp_path}/{name}", {}).problems
        assert [problem.question for problem in problems] == [each["question"] for each in entries]


ROWS = [["question", "answer"], ['Say "a, b"\nor c?', "0.50"], ["café?", "#### 1,200"]]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tables_and_compressed_files_are_read(encoding: str, tmp_path: Path) -> None:
    for name, delimiter in {"a.csv": ",", "a.tsv": "\t", "b.csv.gz": ","}.items():
        opened = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / name, "wt", encoding=encoding, newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows(ROWS)
        problems = read_problems(f"{tmp_path}/{name}", {}).problems
        assert [[each.question, each.answer] for each in problems] == ROWS[1:]
        assert problems[1].location == f"{tmp_path}/{name} line 4"
    lines = "".join(json.dumps(dict(zip(ROWS[0], row, strict=True))) + "\n" for row in ROWS[1:])
    (tmp_path / "dir").mkdir()
    for path in (tmp_path / "c.jsonl.gz", tmp_path / "c.json.gz", tmp_path / "dir/train.jsonl.gz"):
        path.write_bytes(gzip.compress(lines.encode(encoding)))
        assert questions(str(path)) == [row[0] for row in ROWS[1:]]
    assert questions(f"{tmp_path}/dir") == [row[0] for row in ROWS[1:]]
    cut = tmp_path / "c.jsonl.gz"
    cut.write_bytes(cut.read_bytes()[:-9])
    refusal(str(cut), "c.jsonl.gz: not a whole gzip file")
    cut.write_text("{}")
    refusal(str(cut), "copy it again, or without .gz if it is text")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question,answer\n1 + 1?,2\n2, or 3?,1\n", "line 3: has 3 cells, and the first line 2"),
        ('question,answer\n1 + 1?,2\n"2?,1\n', "line 3: not readable as CSV"),
        ("question,question\n1,2\n", "its first line must name each column, and no two alike"),
        ("1 + 1?,2\n", "contains no problems"),
        ("question;answer\n1 + 1?;2\n", "its first line has ';' between names; expected a comma"),
        ("question,answer\n1?,1\nOù?,2\n", "line 3: not UTF-8; save the file in it"),
        ("question,réponse\n1?,1\n", "line 1: not UTF-8; save the file in it"),
        ("text,label\n1 + 1?,2\n", "question is missing or empty; the entry has text, label"),
        ("prompt,answer\n\"[{'role': 'user'}]\",2\n", "prompt is a text with a list of chat"),
        ("conversations\n\"[{'from': 'gpt'}]\"\n", "conversations is a text with a list of chat"),
    ],
)
def test_a_table_that_is_broken_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="latin-1")
    refusal(f"{tmp_path}/a.csv", message)


def test_several_sources_are_one(tmp_path: Path) -> None:
    for number, name in enumerate(("b-0.jsonl", "b-1.jsonl", "a,b.jsonl", "[c].jsonl")):
        write_lines(tmp_path / name, *numbered(number))
    (tmp_path / "b-dir").mkdir()
    first, second = "0 + 1?", "1 + 1?"
    assert questions(f"{tmp_path}/b-*") == [first, second]
    assert questions(f"{tmp_path}/b-1.jsonl, {tmp_path}/b-0.jsonl") == [second, first]
    assert questions(f"{tmp_path}/b-*.jsonl,{tmp_path}/b-0.jsonl") == [first, second]
    assert questions(f"{tmp_path}/a,b.jsonl") == ["2 + 1?"]
    assert questions(f"{tmp_path}/[c].jsonl") == ["3 + 1?"]
    both = read_problems(f"{SPELL_BACKWARD},{tmp_path}/b-0.jsonl", {"size": 5})
    assert (both.entries, len(both.problems)) == (6, 6)
    refusal(f"{tmp_path}/b-0.jsonl,{tmp_path}/none.jsonl", "none.jsonl: no such file or directory")
    refusal(f"{tmp_path}/d-*.jsonl", "d-*.jsonl: no file's name matches")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("https://huggingface.co/datasets/openai/gsm8k/blob/main/x", "give the name openai/gsm8k"),
        ("hf://datasets/openai/gsm8k", "give the name openai/gsm8k"),
        ("https://example.com/a.jsonl", "an address is not downloaded; give the path of what you"),
    ],
)
def test_an_address_says_what_to_give(address: str, message: str) -> None:
    with pytest.raises(HubError, match=message):
        read_problems(address, {})
    with pytest.raises(HubError, match=message.replace("datasets/", "")):
        local_model(address.replace("datasets/", ""))


def test_text_that_is_cut_or_of_two_encodings_is_refused(tmp_path: Path) -> None:
    line = json.dumps(GOOD) + "\n"
    cut, mixed = tmp_path / "cut.jsonl", tmp_path / "mixed.jsonl"
    cut.write_bytes(line.encode("utf-16")[:-1])
    refusal(str(cut), "cut.jsonl line 1: not text ('utf-16-le' codec can't decode")
    mixed.write_bytes(line.encode() + line.encode("utf-16"))
    refusal(str(mixed), "mixed.jsonl line 2: not JSON")
    mixed.write_bytes(line.encode("utf-8-sig") * 2)  # two files, one behind the other
    assert len(read_problems(str(mixed), {}).problems) == 1


def test_broken_parquet_row_is_refused_and_its_number_is_named(tmp_path: Path) -> None:
    data = write_parquet(tmp_path / "a.parquet", GOOD, {"question": "2 + 2?"}, GOOD)
    refusal(data, "a.parquet row 2: answer is missing or empty")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    refusal(data, "a.parquet: not readable as parquet")


def questions(data: str) -> list[str]:
    return [problem.question for problem in read_problems(data, {}).problems]


def test_data_set_directory_is_read_by_split(tmp_path: Path) -> None:
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
        assert questions(f"{directory}:test,{shards}:train")[:2] == ["3 + 1?", "0 + 1?"]
        refusal(f"{directory}:tset", "no split 'tset'; name one of train, test")


def test_only_split_of_a_directory_is_the_default(tmp_path: Path) -> None:
    write_lines(tmp_path / "test.jsonl", *numbered(1, 2))
    assert questions(str(tmp_path)) == ["1 + 1?", "2 + 1?"]
    datasets.Dataset.from_list(numbered(5)).save_to_disk(tmp_path / "saved")
    assert questions(str(tmp_path / "saved")) == ["5 + 1?"]


def write_configs(directory: Path, *names: str, default: str | None = None) -> Path:
    """Write a directory of several data sets, each with two splits, as GSM8K has on the Hub."""
    configs = []
    for number, name in enumerate(names):
        (directory / name).mkdir(parents=True)
        splits = {"train": 2 * number, "test": 2 * number + 1}
        for split, n in splits.items():
            write_parquet(directory / name / f"{split}-00000-of-00001.parquet", *numbered(n))
        files = [{"split": split, "path": f"{name}/{split}-*"} for split in splits]
        is_default = {"default": True} if name == default else {}
        configs.append({"config_name": name, "data_files": files, **is_default})
    (directory / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    return directory


def test_config_of_a_directory_is_chosen_by_name(tmp_path: Path) -> None:
    hub = write_configs(tmp_path / "hub", "main", "socratic")
    assert questions(f"{hub}:main") == ["0 + 1?"]
    assert questions(f"{hub}:main:test") == ["1 + 1?"]
    assert questions(f"{hub}:socratic") == ["2 + 1?"]
    assert questions(f"{hub}:socratic:test") == ["3 + 1?"]
    assert questions(str(hub / "socratic")) == ["2 + 1?"]
    for data, message in {
        str(hub): f"{hub}: has several configs; name one of main, socratic as {hub}:main",
        f"{hub}:test": f"{hub}: has no config 'test'; name one of main, socratic as {hub}:main",
        f"{hub}:mian:test": "has no config 'mian'; name one of main, socratic",
        f"{hub}:main:dev": f"{hub}:main: has no split 'dev'; name one of train, test as {hub}:main",
    }.items():
        refusal(data, message)


def test_directory_with_a_default_config_needs_no_name(tmp_path: Path) -> None:
    hub = write_configs(tmp_path / "hub:2", "main", "socratic", default="socratic")
    assert questions(str(hub)) == ["2 + 1?"]
    assert questions(f"{hub}:test") == ["3 + 1?"]
    assert questions(f"{hub}:main:test") == ["1 + 1?"]


def test_broken_shard_is_named_with_its_line_number(tmp_path: Path) -> None:
    write_lines(tmp_path / "train-0.jsonl", *numbered(1))
    write_lines(tmp_path / "train-1.jsonl", *numbered(2), b"{broken")
    refusal(str(tmp_path), "train-1.jsonl line 2: not JSON")
    datasets.Dataset.from_list([GOOD, {"question": "2?"}]).save_to_disk(tmp_path / "saved")
    refusal(f"{tmp_path}/saved", "saved split train row 2: answer is missing")
    (tmp_path / "empty").mkdir()
    refusal(f"{tmp_path}/empty", "empty: not the directory of one dataset")


def test_reading_a_directory_leaves_no_files_and_uses_no_network(tmp_path: Path) -> None:
    """Run in its own process, because the library reads its environment when it is imported."""
    data, home, scratch = tmp_path / "data", tmp_path / "home", tmp_path / "scratch"
    for directory in (data, home, scratch):
        directory.mkdir()
    write_lines(data / "train.jsonl", GOOD)
    script = (
        "import socket, sys\n"
        "def refuse(*_): raise AssertionError('a connection was made')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from qurl_megatron.data.problems import read_problems\n"
        f"print(len(read_problems({str(data)!r}, {{}}).problems))\n"
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


def test_line_that_reasoning_gym_cannot_score_is_refused_and_its_number_is_named(
    tmp_path: Path,
) -> None:
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=0)[0]
    source = read_problems(write_lines(tmp_path / "a.jsonl", entry, GOOD), {})
    with pytest.raises(DataError, match="line 2: no metadata.source_dataset"):
        keep_verifiable({"a": source}, Config(reward="reasoning_gym"))


SPELL_BACKWARD = "reasoning_gym:spell_backward"
SHORT_WORDS = {"min_word_len": 3, "max_word_len": 8}


def test_task_is_generated_with_its_options_and_without_repeated_questions() -> None:
    problems = read_problems(SPELL_BACKWARD, {**SHORT_WORDS, "size": 3000}).problems
    assert len({problem.question for problem in problems}) == len(problems)
    assert 2900 < len(problems) < 3000  # 3,000 draws out of 88,186 words repeat about 50
    for problem in problems:
        assert problem.question.endswith(f": {problem.answer[::-1]}")
        assert 3 <= len(problem.answer) <= 8


def test_seed_alone_decides_which_problems_are_generated() -> None:
    def generated(seed: int, options: dict[str, int]) -> list[str]:
        options = {"size": 50, **options}
        return [p.question for p in read_problems(SPELL_BACKWARD, options, seed=seed).problems]

    assert generated(0, {}) == generated(0, {}) != generated(1, {})
    assert generated(1, {"seed": 0}) == generated(0, {})  # options override the seed


@pytest.mark.parametrize("task", ["list_functions", "ransom_note"])
def test_a_task_that_draws_from_its_process_has_the_same_problems_in_each(task: str) -> None:
    options = {"size": 40}
    program = "import sys; from qurl_megatron.data.problems import read_problems\n"
    program += f"print(read_problems('reasoning_gym:{task}', {options}).problems)"
    command = ["env", "PYTHONHASHSEED=1", sys.executable, "-c", program]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == f"{read_problems(f'reasoning_gym:{task}', options).problems}\n"
    refusal(f"reasoning_gym:{task}", "no such option", {"sise": 40})


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("spel_backward", {}, "no such task; did you mean spell_backward"),
        ("spell_backward", {"max_word_length": 8}, "no such option; did you mean max_word_len"),
        ("spell_backward", {"min_word_len": 9, "max_word_len": 8}, "max_word_len must be >="),
        ("rubiks_cube", {"size": 2}, "entry 0: answer is missing"),
        ("spell_backward", {"size": "1e4"}, "prompts.options.size=1e4: must be a whole number"),
        ("spell_backward", {"size": -1}, "prompts.options.size=-1: must be a whole number from 1"),
        ("spell_backward", {"size": None}, "prompts.options.size=None: must be a whole number"),
        (
            "spell_backward",
            {"seed": "a"},
            "prompts.options.seed=a: must be a whole number, such as",
        ),
        ("spell_backward", {"seed": None}, "prompts.options.seed=None: must be a whole number"),
        ("chain_sum", {"min_digits": "1"}, "chain_sum with {'size': 5000, 'seed': 0, 'min_digits'"),
    ],
)
def test_unknown_task_or_option_is_refused_in_one_line(
    task: str, options: dict[str, Any], message: str
) -> None:
    refusal(f"reasoning_gym:{task}", message, options)


def test_task_that_refuses_its_options_only_when_it_generates_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Entries(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OverflowError("no\nsuch word")

    monkeypatch.setattr(reasoning_gym, "create_dataset", lambda task, **_: Entries([GOOD]))
    refusal(SPELL_BACKWARD, "'max_word_len': 8}: no such word", SHORT_WORDS)


def read_in_both_formats(tmp_path: Path, entry: dict[str, Any]) -> list[Problem]:
    data = write_parquet(tmp_path / "a.parquet", entry)
    return read(tmp_path, entry) + read_problems(data, {}).problems


(USER,) = CHAT
ASSISTANT = {"role": "assistant", "content": "It is 6."}
SIX = {"role": "assistant", "content": "6"}
HUMAN, GPT = {"from": "human", "value": "3 + 3?"}, {"from": "gpt", "value": "It is 6."}
ADD = {"role": "system", "content": "Add."}
PARTS = [{"type": "text", "text": "3 + "}, {"type": "text", "text": "3?"}]


@pytest.mark.parametrize(
    ("entry", "messages", "answer"),
    [
        ({"messages": [USER, ASSISTANT]}, [USER], "It is 6."),
        ({"messages": [USER, ASSISTANT], "answer": "6"}, [USER], "6"),
        ({"messages": [USER], "answer": "6"}, [USER], "6"),
        ({"messages": [USER, ASSISTANT, USER], "answer": "6"}, [USER, ASSISTANT, USER], "6"),
        ({"messages": [USER, ASSISTANT, USER, SIX]}, [USER, ASSISTANT, USER], "6"),
        ({"messages": [USER, ASSISTANT], "reward_model": {"ground_truth": "6"}}, [USER], "6"),
        # TRL's prompts, and an older field beside a conversation
        ({"prompt": [USER], "answer": "6"}, [USER], "6"),
        ({"prompt": "3 + 3?", "messages": [USER, ASSISTANT], "answer": "6"}, [USER], "6"),
        # ShareGPT's
        ({"conversations": [HUMAN, GPT]}, [USER], "It is 6."),
        ({"system": "Add.", "conversations": [HUMAN, GPT], "answer": "6"}, [ADD, USER], "6"),
        ({"system": "Add.", "messages": [USER, ASSISTANT]}, [ADD, USER], "It is 6."),
        ({"system": "Add.", "messages": [ADD, USER, ASSISTANT]}, [ADD, USER], "It is 6."),
        # OpenAI's content parts
        ({"messages": [{"role": "user", "content": PARTS}], "answer": "6"}, [USER], "6"),
    ],
)
def test_conversation_is_a_question_and_its_last_answer(
    entry: dict[str, Any], messages: list[dict[str, str]], answer: str, tmp_path: Path
) -> None:
    for problem in read_in_both_formats(tmp_path, entry):
        assert (problem.messages, problem.answer) == (messages, answer)
        assert problem.question == "\n\n".join(message["content"] for message in messages)


CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
RESULT = {"role": "tool", "content": "6", "name": "add"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_calls_and_their_results_are_read_in_the_form_of_templates(tmp_path: Path) -> None:
    function = {"name": "add", "arguments": {}}
    calls = [{"type": "function", "function": function}]
    read_call = {"role": "assistant", "content": "", "tool_calls": calls}
    with pytest.raises(DataError, match="line 1: has functions; give them as tools"):
        read(tmp_path, {**GOOD, "functions": [TOOL["function"]]})
    for tools in ([TOOL], json.dumps([TOOL]), TOOL):
        entry = {"messages": [USER, CALL, RESULT, ASSISTANT], "tools": tools}
        for problem in read_in_both_formats(tmp_path, entry):
            assert problem.messages == [USER, read_call, RESULT]
            assert problem.tools == [TOOL]
            assert (problem.question, problem.answer) == ("3 + 3?\n\n6", "It is 6.")


FILE = {"bytes": b"\x89PNG", "path": None}
IMAGE = {"type": "image", "image": "a.png"}
AUDIO = {"type": "input_audio", "input_audio": {"data": "x"}}


@pytest.mark.parametrize(
    ("entry", "where"),
    [
        ({"question": "3 + 3?", "images": [FILE]}, "has the field images"),
        ({"question": "3 + 3?", "frames": ["a.png"]}, "has the field frames"),
        ({"question": "3 + 3?", "drawing": FILE}, "has the field drawing"),
        ({"question": "3 + 3?", "jpg": b"\xff\xd8"}, "has the field jpg"),
        ({"question": "3 + 3?", "image_url": "https://a.b/c.png"}, "has the field image_url"),
        ({"messages": [{**USER, "images": ["a.png"]}]}, r"messages\[0\] has the field images"),
        ({"messages": [{**USER, "content": [*PARTS, IMAGE]}]}, r"messages\[0\].content has an im"),
        (
            {"messages": [{**USER, "content": [*PARTS, AUDIO]}]},
            r"messages\[0\].content has an image, audio or video",
        ),
    ],
)
def test_images_audio_and_video_are_refused_until_they_are_ignored(
    entry: dict[str, Any], where: str, tmp_path: Path
) -> None:
    data = write_parquet(tmp_path / "a.parquet", {**entry, "answer": "6"})
    with pytest.raises(DataError, match=f"row 1: {where}.*prompts.ignore_media=true"):
        read_problems(data, {})
    (problem,) = read_problems(data, {}, fields=Fields(ignores_media=True)).problems
    assert problem.question == "3 + 3?"
    nothing: Any = {
        "question": "3 + 3?",
        "answer": "6",
        "images": [],
        "video": None,
        "type": "image",
    }
    assert read(tmp_path, nothing)


def test_field_that_only_has_the_name_of_tools_is_ignored(tmp_path: Path) -> None:
    for tools in ([], "a hammer", ["hammer"], None, "[" * 2000 + "]" * 2000):
        [problem] = read(tmp_path, {**GOOD, "tools": tools})
        assert problem.tools is None


def test_question_and_answer_are_read_from_the_fields_that_are_named(tmp_path: Path) -> None:
    entry = {"question": "no", "answer": "no", "a.b": "1 + 1?", "info": {"gold": {"value": 2}}}
    chat = {"a.b": [USER, ASSISTANT], "info": {"gold": {"value": 6}}}
    fields = Fields(question="a.b", answer="info.gold.value")
    plain, conversation = read(tmp_path, entry, chat, fields=fields)
    assert (plain.question, plain.answer) == ("1 + 1?", "2")
    assert (conversation.messages, conversation.answer) == ([USER], "6")
    # Unless the fields are required, an entry without them is read as usual.
    with pytest.raises(DataError, match=r"line 1: a.b is missing.*has question, answer \(name"):
        read(tmp_path, GOOD, fields=fields)
    with pytest.raises(DataError, match="line 1: info.gold.value is missing"):
        read(tmp_path, {"a.b": [USER, ASSISTANT]}, fields=fields)
    [usual] = read(tmp_path, GOOD, fields=fields._replace(required=False))
    assert (usual.question, usual.answer) == ("1 + 1?", "2")


def test_an_input_beside_an_instruction_is_not_dropped_silently(tmp_path: Path) -> None:
    entry = {"instruction": "Add.", "input": "", "output": "6"}
    fields = Fields("instruction", "output")
    (plain,) = read(tmp_path, entry, fields=fields)
    assert (plain.question, plain.answer) == ("Add.", "6")
    for also in ("input", "context"):
        with pytest.raises(DataError, match=f"line 2: has instruction and {also}; join them in"):
            read(tmp_path, entry, {**entry, also: "3 + 3"}, fields=fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("choices", ["3", "5"]),
        ("choices", {"text": ["a half", "a third"], "label": ["1", "?"]}),
        ("options", {"A": 1, "B": 5}),
        ("context", "Ada adds."),
        ("passage", "Ada adds."),
        ("system", "Be brief."),
        ("system_prompt", "Be brief."),
    ],
)
@pytest.mark.parametrize("name", ["question", "problem", "prompt"])
def test_what_a_question_needs_is_not_dropped_silently(
    name: str, field: str, value: Any, tmp_path: Path
) -> None:
    entry = {name: "1 + 1?", "answer": "2", field: value}
    if name == "prompt" and not field.startswith("system"):  # it is whole, but for a system's
        assert len(read(tmp_path, entry)) == 1
        return
    told = f"line 1: has {name} and {field}; join them in one field, or ask without: prompts."
    for fields in (RECOGNIZED, Fields("text", required=False), Fields(for_function=True)):
        with pytest.raises(DataError, match=f"{told}question_key={name}$"):
            read(tmp_path, entry, fields=fields)
    said = f"{entry[name]} {value}"
    others: list[dict[str, Any]] = [{field: None}, {field: []}, {field: {"A": " "}}, {name: said}]
    for other in others:
        (problem,) = read(tmp_path, {**entry, **other})
        assert problem.answer == "2"
    chat = [{"role": "system", "content": f"{value}\n"}, {"role": "user", "content": "1 + 1?"}]
    assert len(read(tmp_path, {**entry, name: chat})) == 1
    assert len(read(tmp_path, entry, fields=Fields(name))) == 1


def test_repeated_problem_is_dropped_and_counted_and_other_answers_are_kept(
    tmp_path: Path,
) -> None:
    other = {**GOOD, "answer": "two"}
    data = write_lines(tmp_path / "a.jsonl", GOOD, other, GOOD, *numbered(4), other, GOOD)
    source = read_problems(data, {})
    assert [(problem.question, problem.answer) for problem in source.problems] == [
        ("1 + 1?", "2"),
        ("1 + 1?", "two"),
        ("4 + 1?", "5"),
    ]
    dropped = {"repeats an earlier problem": [f"{data} line {number}" for number in (3, 5, 6)]}
    assert (source.entries, source.dropped) == (6, dropped)


def test_examples_of_the_documentation_are_problems(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "own-model.md").read_text()
    *usual, named = re.findall(r"^    (\{.+\})$", page, re.MULTILINE)
    problems = read(tmp_path, *map(str.encode, usual))
    # The first, the third and the fourth are one problem.
    assert [(problem.question, problem.answer) for problem in problems] == [
        ("What is 3 + 3?", "6"),
        ("Find $x$ if $2x = 7$.", "\\frac{7}{2}"),
    ]
    given = r"^    prompts.question_key=(\S+) prompts.answer_key=(\S+)$"
    (words,) = re.findall(given, page, re.MULTILINE)
    assert read(tmp_path, named.encode(), fields=Fields(*words))[0].answer == "6"
