"""Prompts: tokenizing, splitting and serving them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from problem_files import (
    CHAT,
    CHAT_TEMPLATE,
    GOOD,
    VERL,
    character_tokenizer,
    numbered,
    write_lines,
)
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.algorithm.score import Question
from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.config.schema import Config
from qurl_megatron.data.problems import DataError, read_problems
from qurl_megatron.data.prompts import PromptStream, load_prompts, split_held_out, tokenize
from qurl_megatron.data.verifiers import VERIFIERS


def prompts(*questions: str) -> list[Prompt]:
    return [Prompt(question, question, "answer", [1]) for question in questions]


def test_split_of_a_question_does_not_depend_on_other_questions() -> None:
    everything = prompts(*(f"What is {n}?" for n in range(2000)))
    train, held_out = split_held_out(everything, 0.1)
    assert len(train) + len(held_out) == 2000
    assert 150 < len(held_out) < 250  # 0.1 of 2000, standard deviation 13
    held_out_questions = {prompt.question for prompt in held_out}
    assert not held_out_questions & {prompt.question for prompt in train}
    _, of_a_third = split_held_out(everything[::-3], 0.1)
    assert {prompt.question for prompt in of_a_third} <= held_out_questions
    _, of_a_larger_fraction = split_held_out(everything, 0.2)
    assert held_out_questions < {prompt.question for prompt in of_a_larger_fraction}


def test_questions_that_differ_in_case_or_spacing_are_on_the_same_side() -> None:
    upper = prompts(*(f"Spell POLISH {n}" for n in range(200)))
    lower = prompts(*(f" spell  polish\n{n}" for n in range(200)))
    upper_held_out, lower_held_out = (split_held_out(side, 0.5)[1] for side in (upper, lower))
    assert 50 < len(upper_held_out) < 150
    assert [prompt.question.casefold().split() for prompt in upper_held_out] == [
        prompt.question.split() for prompt in lower_held_out
    ]


def test_split_is_the_same_on_every_machine() -> None:
    """The expected questions are constants: another hash would change the split."""
    _, held_out = split_held_out(prompts(*(f"What is {n}?" for n in range(20))), 0.2)
    assert [p.question for p in held_out] == ["What is 15?", "What is 16?", "What is 18?"]


def test_split_that_leaves_a_side_empty_is_refused() -> None:
    with pytest.raises(DataError, match="leaves none to hold out"):
        split_held_out(prompts("What is 1?"), 1e-9)
    with pytest.raises(DataError, match="leaves none to train on"):
        split_held_out(prompts("What is 1?"), 1.0)
    assert split_held_out(prompts("What is 1?"), 0.0) == (prompts("What is 1?"), [])


def test_no_question_of_an_evaluation_file_is_trained_on(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", *numbered(*range(60)))
    seen = [{"question": f" {n}  +\t1?", "answer": f"{n + 1}"} for n in range(50)]
    tests = write_lines(tmp_path / "b.jsonl", *seen, *numbered(1000))
    config = Config(data=data, reward="exact")
    config.evaluation.data = {"b": tests}
    train, held_out, files, sources = load_prompts(config, character_tokenizer())
    assert len(files["b"]) == 51
    dropped = sources["data"].dropped["is in evaluation.data too"]
    assert len(train) + len(held_out) + len(dropped) == 60
    assert 0 < len(train) < 10 and held_out
    assert not {p.question for p in train} & {f"{n} + 1?" for n in range(50)}
    config.evaluation.data = {"b": data}
    with pytest.raises(DataError, match="every problem to train on is in evaluation.data too"):
        load_prompts(config, character_tokenizer())


def test_500_generated_problems_load_and_score_with_their_own_verifier(tmp_path: Path) -> None:
    entries = list(reasoning_gym.create_dataset("chain_sum", size=520, seed=3))
    data = write_lines(tmp_path / "chain_sum.jsonl", *entries)
    config = Config(data=data, reward="reasoning_gym")
    config.rollout.max_prompt_length = 256
    prompts, held_out, *_ = load_prompts(config, character_tokenizer())
    assert len(prompts) + len(held_out) == len({entry["question"] for entry in entries}) >= 500
    credit = VERIFIERS["reasoning_gym"]().credit
    for prompt in prompts + held_out:
        right = f"I add.\n<answer>{prompt.answer}</answer>"
        assert credit(right, Question("", prompt.answer, prompt.metadata)) == 1
        assert credit(f"{prompt.answer}1", Question("", prompt.answer, prompt.metadata)) < 1


@pytest.mark.parametrize("word", ["held_out_fraction", "problems"])
def test_a_run_without_held_out_problems_to_measure_on_trains_on_everything(
    word: str, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "a.jsonl", *numbered(*range(60)))
    config = with_overrides(Config(data=data, reward="exact"), [f"evaluation.{word}=0"])
    assert [len(part) for part in load_prompts(config, character_tokenizer())[:3]] == [60, 0, 0]


def test_problems_whose_answer_cannot_be_read_are_left_out_of_training_and_named(
    tmp_path: Path,
) -> None:
    bad = [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(("\\int", "2x+3y="))]
    data = write_lines(tmp_path / "a.jsonl", *numbered(*range(50)), *bad)
    tests = write_lines(tmp_path / "b.jsonl", {"question": "b?", "answer": "1"}, bad[0])
    config = Config(data=data, reward="math")
    config.evaluation.held_out_fraction = 0.0
    config.evaluation.data = {"b": tests}
    train, _, files, sources = load_prompts(config, character_tokenizer())
    assert len(train) == 50 and len(files["b"]) == 2
    unreadable = "the answer '\\\\int' cannot be read as LaTeX"
    assert sources["data"].dropped == {
        "has an answer that reward math cannot compare": [
            f"{data} line 51: {unreadable}",
            f"{data} line 52: the answer '2x+3y=' cannot be read as LaTeX",
        ]
    }
    assert sources["evaluation.data.b"].notes == [
        "1 answers cannot be compared by reward math, and only their very text is right; the first "
        f"is {tests} line 2: {unreadable}"
    ]
    config.data = write_lines(tmp_path / "c.jsonl", *bad)
    with pytest.raises(DataError, match="c.jsonl line 1: .*cannot be read as LaTeX"):
        load_prompts(config, character_tokenizer())


def test_question_is_tokenized_unchanged_without_a_chat_template(tmp_path: Path) -> None:
    source = read_problems(write_lines(tmp_path / "a.jsonl", GOOD), {})
    [prompt] = tokenize(source, character_tokenizer(), max_prompt_length=6)
    assert prompt.token_ids == [ord(character) for character in "1 + 1?"]
    assert (prompt.question, prompt.answer, prompt.metadata) == ("1 + 1?", "2", {})


def test_chat_template_makes_the_question_a_user_turn_and_opens_the_assistants(
    tmp_path: Path,
) -> None:
    tokenizer = character_tokenizer(CHAT_TEMPLATE)
    user = tokenizer.convert_tokens_to_ids("<user>")
    assistant = tokenizer.convert_tokens_to_ids("<assistant>")
    source = read_problems(write_lines(tmp_path / "a.jsonl", GOOD), {})
    [prompt] = tokenize(source, tokenizer, max_prompt_length=8)
    assert prompt.token_ids == [user, *(ord(character) for character in "1 + 1?"), assistant]


def test_chat_messages_keep_their_roles_in_the_chat_template(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(CHAT_TEMPLATE)
    tokenizer.add_tokens(["<system>"], special_tokens=True)
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    source = read_problems(write_lines(tmp_path / "a.jsonl", VERL, {**VERL, "prompt": chat}), {})
    alone, after_system = tokenize(source, tokenizer, max_prompt_length=100)
    texts = ["".join(tokenizer.convert_ids_to_tokens(p.token_ids)) for p in (alone, after_system)]
    assert texts == ["<user>3 + 3?<assistant>", "<system>Be brief.<user>3 + 3?<assistant>"]
    assert alone.id != after_system.id


def test_chat_that_needs_a_template_is_refused_without_one(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    data = write_lines(tmp_path / "a.jsonl", VERL, {**VERL, "prompt": chat})
    source = read_problems(data, {})
    with pytest.raises(DataError, match="line 2: a chat of 2 messages, and .* no chat template"):
        tokenize(source, character_tokenizer(), max_prompt_length=100)
    source.problems.pop()
    (alone,) = tokenize(source, character_tokenizer(), max_prompt_length=100)
    assert len(alone.token_ids) == len("3 + 3?")
    strict = character_tokenizer("{{ raise_exception('system messages are not supported') }}")
    with pytest.raises(DataError, match="line 1: the chat template refuses it.*not supported"):
        tokenize(source, strict, max_prompt_length=100)


def test_too_long_prompt_is_refused_and_its_line_and_length_are_named(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "a.jsonl", GOOD, {"question": "x" * 40, "answer": "2"})
    source = read_problems(data, {})
    with pytest.raises(DataError, match="line 2: the prompt has 40 tokens.*max_prompt_length 39"):
        tokenize(source, character_tokenizer(), max_prompt_length=39)
    assert len(tokenize(source, character_tokenizer(), max_prompt_length=40)) == 2


def test_too_long_prompts_are_dropped_and_counted_unless_the_run_refuses_them(
    tmp_path: Path,
) -> None:
    long = [{"question": "x" * length, "answer": "2"} for length in (11, 10, 30)]
    config = Config(data=write_lines(tmp_path / "a.jsonl", *numbered(*range(60)), *long))
    config.reward, config.rollout.max_prompt_length = "exact", 10
    loaded = load_prompts(config, character_tokenizer())
    assert len(loaded.train) + len(loaded.held_out) == 61
    reason = "has more than 10 tokens (rollout.max_prompt_length)"
    assert loaded.sources["data"].dropped == {
        reason: [f"{config.data} line {number}" for number in (61, 63)]
    }
    assert load_prompts(config, character_tokenizer()) == loaded  # the learner reads it again
    config.overlong_prompts = "refuse"
    with pytest.raises(DataError, match="line 61: the prompt has 11 tokens, more than"):
        load_prompts(config, character_tokenizer())
    config.overlong_prompts, config.rollout.max_prompt_length = "drop", 3
    with pytest.raises(DataError, match=r"a\.jsonl: every prompt has more than .* the shortest 6;"):
        load_prompts(config, character_tokenizer())


def test_too_long_prompt_to_evaluate_on_is_always_refused(tmp_path: Path) -> None:
    config = Config(data=write_lines(tmp_path / "a.jsonl", *numbered(*range(60))))
    config.reward, config.rollout.max_prompt_length = "exact", 10
    tests = write_lines(tmp_path / "b.jsonl", {"question": "x" * 11, "answer": "2"})
    config.evaluation.data = {"b": tests}
    with pytest.raises(DataError, match=r"b\.jsonl line 1: the prompt has 11 tokens"):
        load_prompts(config, character_tokenizer())


def test_named_fields_may_be_missing_from_data_to_evaluate_on(tmp_path: Path) -> None:
    renamed = [{"q": each["question"], "a": each["answer"]} for each in numbered(*range(60))]
    config = Config(data=write_lines(tmp_path / "a.jsonl", *renamed), reward="exact")
    config.question_key, config.answer_key = "q", "a"
    tests = write_lines(tmp_path / "b.jsonl", *numbered(100), {"q": "5?", "a": "5"})
    config.evaluation.data = {"b": tests}
    loaded = load_prompts(config, character_tokenizer())
    assert [prompt.answer for prompt in loaded.files["b"]] == ["101", "5"]
    assert len(loaded.train) + len(loaded.held_out) == 60


def test_problems_with_the_same_question_have_different_ids_and_are_on_the_same_side(
    tmp_path: Path,
) -> None:
    entries = numbered(*range(60))
    others = [{**entry, "answer": "many"} for entry in entries]
    both = Config(data=write_lines(tmp_path / "a.jsonl", *entries, *others), reward="exact")
    one = Config(data=write_lines(tmp_path / "b.jsonl", *entries), reward="exact")
    train, held_out, *_ = load_prompts(both, character_tokenizer())
    assert len({prompt.id for prompt in train + held_out}) == 120
    for side, alone in zip(
        (train, held_out), load_prompts(one, character_tokenizer())[:2], strict=True
    ):
        half = len(side) // 2
        assert side[:half] == alone  # other answers change neither the ids nor the split
        assert [prompt.question for prompt in side[half:]] == [prompt.question for prompt in alone]
        assert {prompt.answer for prompt in side[half:]} == {"many"}


def test_system_prompt_is_put_before_chats_that_have_none_and_changes_nothing_else(
    tmp_path: Path,
) -> None:
    tokenizer = character_tokenizer(CHAT_TEMPLATE)
    tokenizer.add_tokens(["<system>"], special_tokens=True)
    chat = [{"role": "system", "content": "Own."}, *CHAT]
    config = Config(
        data=write_lines(tmp_path / "a.jsonl", *numbered(*range(60)), {**VERL, "prompt": chat})
    )
    config.reward, config.evaluation.held_out_fraction = "math", 0.2
    before = load_prompts(config, tokenizer)
    config.system_prompt = "Be brief."
    after = load_prompts(config, tokenizer)
    for with_system, without in ((after.train, before.train), (after.held_out, before.held_out)):
        assert [prompt.id for prompt in with_system] == [prompt.id for prompt in without]
    texts = [
        "".join(tokenizer.convert_ids_to_tokens(prompt.token_ids))
        for prompt in after.train + after.held_out
    ]
    own = [text for text in texts if not text.startswith("<system>Be brief.<user>")]
    assert own == ["<system>Own.<user>3 + 3?<assistant>"]
    assert after.sources["data"].own_system_prompts == 1
    with pytest.raises(DataError, match="line 1: a chat of 2 messages.*and no system_prompt"):
        load_prompts(config, character_tokenizer())


def test_tools_and_all_of_a_message_reach_the_chat_template(tmp_path: Path) -> None:
    template = (
        "{% for tool in tools %}{{ tool.name }};{% endfor %}{% for message in messages %}"
        "{{ message.name if message.name is defined else message.content }}|{% endfor %}"
    )
    messages = [{"role": "user", "content": "hi", "name": "Ann"}, *CHAT]
    entry = {"messages": messages, "answer": "6", "tools": [{"name": "add"}]}
    source = read_problems(write_lines(tmp_path / "a.jsonl", entry), {})
    tokenizer = character_tokenizer(template)
    [prompt] = tokenize(source, tokenizer, max_prompt_length=100)
    assert "".join(tokenizer.convert_ids_to_tokens(prompt.token_ids)) == "add;Ann|3 + 3?|"


@pytest.mark.parametrize(
    ("calls", "template", "reason"),
    [
        (7, "{% for call in messages[0].tool_calls %}{{ call.id }}{% endfor %}", "not iterable"),
        ([{}], "{{ messages[0].tool_calls[0].arguments | tojson }}", "not JSON serializable"),
        ("x", "{{ messages[0].tool_calls.items() }}", "has no attribute 'items'"),
        ("x", "{{ '%d\\n' % messages[0].tool_calls }}", "a real number is required"),
    ],
)
def test_messages_that_a_chat_template_cannot_render_are_refused_in_one_line(
    calls: Any, template: str, reason: str, tmp_path: Path
) -> None:
    entry = {"messages": [{**CHAT[0], "tool_calls": calls}], "answer": "6"}
    source = read_problems(write_lines(tmp_path / "a.jsonl", entry), {})
    with pytest.raises(DataError, match=f"line 1: the chat template refuses it.*{reason}") as told:
        tokenize(source, character_tokenizer(template), max_prompt_length=100)
    assert "\n" not in str(told.value)


def test_stream_serves_each_prompt_once_per_epoch_in_a_new_order() -> None:
    stream = PromptStream(prompts(*"abcdefghijklm"), seed=0)
    served = [prompt.question for _ in range(13) for prompt in stream.next(3)]
    epochs = ["".join(served[start : start + 13]) for start in (0, 13, 26)]
    assert all(sorted(epoch) == list("abcdefghijklm") for epoch in epochs)
    assert len(set(epochs)) == 3


def test_stream_serves_more_than_an_epoch_at_once() -> None:
    served = PromptStream(prompts(*"abc"), seed=0).next(8)
    counts = Counter(prompt.question for prompt in served)
    assert set(counts) == set("abc") and max(counts.values()) == 3


def test_restored_stream_continues_where_it_was_saved() -> None:
    def fresh(seed: int) -> PromptStream:
        return PromptStream(prompts(*"abcdefghij"), seed)

    stream = fresh(0)
    stream.next(17)
    state = json.loads(json.dumps(stream.state()))
    resumed = fresh(5)
    resumed.restore(state)
    assert resumed.next(40) == stream.next(40)
    assert fresh(5).next(10) != fresh(0).next(10)


def test_stream_refuses_the_state_of_other_prompts() -> None:
    state = PromptStream(prompts(*"abc"), seed=0).state()
    with pytest.raises(DataError, match="other prompts"):
        PromptStream(prompts(*"abd"), seed=0).restore(state)
    with pytest.raises(DataError, match="at least one"):
        PromptStream([], seed=0)
