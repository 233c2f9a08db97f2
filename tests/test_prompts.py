"""Prompts: tokenizing, splitting and serving them, and the summary of them."""

import json
import unicodedata
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from qurl_megatron.config.schema import Config, PromptsConfig, ScoringConfig
from qurl_megatron.config.text import with_overrides
from qurl_megatron.data.entries import DataError
from qurl_megatron.data.problems import read_problems
from qurl_megatron.data.prompts import (
    BAR_WIDTH,
    BINS,
    PromptSet,
    PromptStream,
    draw,
    length_lines,
    load_prompts,
    set_aside,
    split_held_out,
    summarize,
    tokenize,
)


def prompts(*questions: str) -> list[Prompt]:
    return [Prompt(question, question, "answer", [1]) for question in questions]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Return the configuration of a run on 60 problems with questions of 6 and 7 characters."""
    return Config(data=write_lines(tmp_path / "a.jsonl", *numbered(*range(60))), reward="exact")


def load(config: Config, chat_template: str | None = None) -> PromptSet:
    return load_prompts(config, character_tokenizer(chat_template))


def tokenized(
    tmp_path: Path, *entries: Any, chat_template: str | None = None, max_prompt_length: int = 100
) -> list[Prompt]:
    source = read_problems(write_lines(tmp_path / "c.jsonl", *entries), {})
    return tokenize(source, character_tokenizer(chat_template), max_prompt_length)


def text(prompt: Prompt) -> str:
    return str(character_tokenizer().decode(prompt.token_ids))


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


def test_questions_that_differ_in_unicode_form_are_on_the_same_side() -> None:
    texts = [f"Où est le café {n}?" for n in range(200)]
    composed, split = (
        split_held_out(prompts(*(unicodedata.normalize(form, text) for text in texts)), 0.5)[1]
        for form in ("NFC", "NFD")
    )
    assert 50 < len(composed) < 150
    assert [unicodedata.normalize("NFC", each.question) for each in split] == [
        each.question for each in composed
    ]


def test_split_is_the_same_on_every_machine() -> None:
    """The expected questions are constants: another hash would change the split."""
    _, held_out = split_held_out(prompts(*(f"What is {n}?" for n in range(20))), 0.2)
    assert [p.question for p in held_out] == ["What is 15?", "What is 16?", "What is 18?"]


def test_problems_that_are_set_aside_are_a_sample_of_sorted_ones() -> None:
    everything = prompts(*(f"What is {n}?" for n in range(2000)))
    sample, others = set_aside(everything, 256)
    numbers = [int(prompt.question.strip("What is?")) for prompt in sample]
    assert 96 < sum(number >= 1000 for number in numbers) < 160  # four standard deviations
    assert others == [prompt for prompt in everything if prompt not in sample]
    assert set_aside(everything[:9], 256)[1] == []


def test_split_that_leaves_a_side_empty_is_refused() -> None:
    with pytest.raises(DataError, match="leaves none to hold out"):
        split_held_out(prompts("What is 1?"), 1e-9)
    with pytest.raises(DataError, match="leaves none to train on"):
        split_held_out(prompts("What is 1?"), 1.0)
    assert split_held_out(prompts("What is 1?"), 0.0) == (prompts("What is 1?"), [])


def test_no_question_of_an_evaluation_file_is_trained_on(config: Config, tmp_path: Path) -> None:
    path = Path(config.data)
    path.write_text(path.read_text().replace("+", "Plus"))
    seen = [{"question": f" {n}  plus\t1?", "answer": f"{n + 1}"} for n in range(50)]
    tests = write_lines(tmp_path / "b.jsonl", *seen, *numbered(1000))
    config.evaluation.data = {"b": tests}
    train, held_out, files, sources = load(config)
    assert len(files["b"]) == 51
    dropped = sources[""].dropped["is in evaluation.data too"]
    assert len(train) + len(held_out) + len(dropped) == 60
    assert 0 < len(train) < 10 and held_out
    assert not {p.question for p in train} & {f"{n} Plus 1?" for n in range(50)}
    config.evaluation.data = {"b": config.data}
    with pytest.raises(DataError, match="every problem to train on is in evaluation.data too"):
        load(config)


@pytest.mark.parametrize("word", ["held_out_fraction", "problems"])
def test_a_run_without_held_out_problems_to_measure_on_trains_on_everything(
    word: str, config: Config
) -> None:
    config = with_overrides(config, [f"evaluation.{word}=0"])
    assert [len(part) for part in load(config)[:3]] == [60, 0, 0]


def test_problems_whose_answer_cannot_be_read_are_left_out_of_training_and_named(
    tmp_path: Path,
) -> None:
    bad = [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(("\\int", "2x+3y="))]
    data = write_lines(tmp_path / "a.jsonl", *numbered(*range(50)), *bad)
    tests = write_lines(tmp_path / "b.jsonl", {"question": "b?", "answer": "1"}, bad[0])
    config = Config(data=data, reward="math")
    config.evaluation.held_out_fraction = 0.0
    config.evaluation.data = {"b": tests}
    train, _, files, sources = load(config)
    assert len(train) == 50 and len(files["b"]) == 2
    unreadable = "the answer '\\\\int' cannot be read as LaTeX"
    assert sources[""].dropped == {
        "has an answer that reward math cannot compare": [
            f"{data} line 51: {unreadable}",
            f"{data} line 52: the answer '2x+3y=' cannot be read as LaTeX",
        ]
    }
    assert sources["b"].notes == [
        "1 answers cannot be compared by reward math, and only their exact text is right; the "
        f"first is {tests} line 2: {unreadable}"
    ]
    config.evaluation.reward_of = {"b": "exact"}  # which can compare any text
    assert not load(config).sources["b"].notes
    config.evaluation.reward_of = {"b": "mine.py:reward"}
    assert load(config).files["b"][1].columns == bad[0]
    config.scoring.by_source = {"none": "exact"}
    with pytest.raises(
        DataError, match="^scoring.by_source.none: no entry has this data_source; they"
    ):
        load(config)
    whole = [each | {"data_source": f"{n % 2}"} for n, each in enumerate([*numbered(9), *bad])]
    mixed = write_lines(tmp_path / "d.jsonl", *whole)
    by_source = Config(data=mixed, reward="exact", scoring=ScoringConfig(by_source={"0": "math"}))
    by_source.evaluation.held_out_fraction = 0.0
    kept = load(by_source)
    assert [prompt.answer for prompt in kept.train] == ["10", "\\int"]
    (lost,) = kept.sources[""].dropped.values()
    assert lost == [f"{mixed} line 3: the answer '2x+3y=' cannot be read as LaTeX"]
    config.scoring.by_source = {}
    config.reward = "exact, mine:reward, math"
    assert load(config).train[0].columns == {"question": "0 + 1?", "answer": "1"}
    assert len(load(config).train) == 50
    config.data = write_lines(tmp_path / "c.jsonl", *bad)
    with pytest.raises(DataError, match="c.jsonl line 1: .*cannot be read as LaTeX"):
        load(config)


def test_prompt_is_the_text_of_its_question_or_a_chat_that_the_template_renders(
    tmp_path: Path,
) -> None:
    [prompt] = tokenized(tmp_path, GOOD, max_prompt_length=6)
    assert prompt.token_ids == [ord(character) for character in "1 + 1?"]
    assert (prompt.question, prompt.answer, prompt.metadata) == ("1 + 1?", "2", {})
    chat = {**VERL, "prompt": [{"role": "system", "content": "Be brief."}, *CHAT]}
    rendered = tokenized(tmp_path, GOOD, VERL, chat, chat_template=CHAT_TEMPLATE)
    assert [text(prompt) for prompt in rendered] == [
        "<user>1 + 1?<assistant>",
        "<user>3 + 3?<assistant>",
        "<system>Be brief.<user>3 + 3?<assistant>",
    ]
    assert [len(prompt.token_ids) for prompt in rendered] == [8, 8, 18]
    assert len({prompt.id for prompt in rendered}) == 3


def test_chat_that_needs_a_template_is_refused_without_one(tmp_path: Path) -> None:
    chat = {**VERL, "prompt": [{"role": "system", "content": "Be brief."}, *CHAT]}
    with_tools = {**VERL, "tools": [{"name": "add"}]}
    for entry, number in ((chat, 2), (with_tools, 1)):
        refused = f"line 2: a chat of {number} messages, or with tools, and .* no chat template"
        with pytest.raises(DataError, match=refused):
            tokenized(tmp_path, GOOD, entry)
    (alone,) = tokenized(tmp_path, VERL)
    assert len(alone.token_ids) == len("3 + 3?")


def test_too_long_prompts_are_dropped_and_counted_unless_the_run_refuses_them(
    tmp_path: Path,
) -> None:
    long = [{"question": "x" * length, "answer": "2"} for length in (11, 10, 30)]
    config = Config(data=write_lines(tmp_path / "a.jsonl", *numbered(*range(60)), *long))
    config.reward, config.rollout.max_prompt_length = "exact", 10
    loaded = load(config)
    assert len(loaded.train) + len(loaded.held_out) == 61
    reason = "has more than 10 tokens (rollout.max_prompt_length)"
    assert loaded.sources[""].dropped == {
        reason: [f"{config.data} line {number}" for number in (61, 63)]
    }
    assert load(config) == loaded  # the learner reads it again
    config.evaluation.data = {"b": write_lines(tmp_path / "b.jsonl", long[0])}
    with pytest.raises(DataError, match=r"b\.jsonl line 1: the prompt has at least 11 tokens"):
        load(config)  # a score is over the whole file
    config.evaluation.data, config.prompts.overlong = {}, "refuse"
    with pytest.raises(
        DataError, match="line 61: the prompt has at least 11 tokens.*max_prompt_length 10"
    ):
        load(config)
    question = f"1{'x' * 30}9"
    config.data = write_lines(tmp_path / "c.jsonl", *numbered(7), GOOD | {"question": question})
    config.evaluation.problems = 0
    for side, cut in (("left", "xxxxxxxxx9"), ("right", "1xxxxxxxxx")):
        config.prompts.overlong = f"truncate_{side}"  # type: ignore[assignment]
        found = load(config)
        assert [text(each) for each in found.train] == ["7 + 1?", cut]
        assert found.train[1].question == question
        assert found.sources[""].notes == [f"cut to 10 tokens, at the {side}: 1 prompts"]
    config.prompts.overlong, config.rollout.max_prompt_length = "drop", 3
    with pytest.raises(DataError, match=r"c\.jsonl: every prompt has more than .* the shortest 6;"):
        load(config)


def test_a_text_of_more_characters_than_a_prompt_can_have_never_reaches_the_tokenizer(
    tmp_path: Path,
) -> None:
    tokenizer = character_tokenizer()
    longest = max(map(len, tokenizer.get_vocab()))
    data = write_lines(
        tmp_path / "a.jsonl",
        {"question": "2+2?", "answer": "4"},
        {"question": "x" * (10 * longest + longest), "answer": "2"},
    )
    seen: list[int] = []

    class Watched:
        chat_template = bos_token_id = eos_token_id = None

        def get_vocab(self) -> dict[str, int]:
            return tokenizer.get_vocab()

        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return tokenizer(text, **options)

    source = read_problems(data, {})
    assert len(tokenize(source, Watched(), 10, overlong="drop")) == 1
    assert seen == [4]
    assert source.dropped == {
        "has more than 10 tokens (rollout.max_prompt_length)": [f"{data} line 2"]
    }
    with pytest.raises(DataError, match="line 2: the prompt has at least 11 tokens, more than"):
        tokenize(source, Watched(), 10)


def test_named_fields_may_be_missing_from_data_to_evaluate_on(tmp_path: Path) -> None:
    renamed = [{"q": each["question"], "a": each["answer"]} for each in numbered(*range(60))]
    config = Config(data=write_lines(tmp_path / "a.jsonl", *renamed), reward="exact")
    config.prompts = PromptsConfig(question_key="q", answer_key="a")
    tests = write_lines(tmp_path / "b.jsonl", *numbered(100), {"q": "5?", "a": "5"})
    config.evaluation.data = {"b": tests}
    loaded = load(config)
    assert [prompt.answer for prompt in loaded.files["b"]] == ["101", "5"]
    assert len(loaded.train) + len(loaded.held_out) == 60


def test_problems_with_the_same_question_have_different_ids_and_are_on_the_same_side(
    config: Config, tmp_path: Path
) -> None:
    entries = numbered(*range(60))
    others = [{**entry, "answer": "many"} for entry in entries]
    both = Config(data=write_lines(tmp_path / "b.jsonl", *entries, *others), reward="exact")
    train, held_out, *_ = load(both)
    assert len({prompt.id for prompt in train + held_out}) == 120
    for side, alone in zip((train, held_out), load(config)[:2], strict=True):
        half = len(side) // 2
        assert side[:half] == alone  # other answers change neither the ids nor the split
        assert [prompt.question for prompt in side[half:]] == [prompt.question for prompt in alone]
        assert {prompt.answer for prompt in side[half:]} == {"many"}


def test_system_prompt_is_put_before_chats_that_have_none_and_changes_nothing_else(
    tmp_path: Path,
) -> None:
    chat = {**VERL, "prompt": [{"role": "system", "content": "Own."}, *CHAT]}
    config = Config(data=write_lines(tmp_path / "a.jsonl", *numbered(*range(60)), chat))
    config.reward, config.evaluation.held_out_fraction = "math", 0.2
    before = load(config, CHAT_TEMPLATE)
    config.prompts.system_prompt = "Be brief."
    after = load(config, CHAT_TEMPLATE)
    for with_system, without in ((after.train, before.train), (after.held_out, before.held_out)):
        assert [prompt.id for prompt in with_system] == [prompt.id for prompt in without]
    texts = map(text, after.train + after.held_out)
    own = [each for each in texts if not each.startswith("<system>Be brief.<user>")]
    assert own == ["<system>Own.<user>3 + 3?<assistant>"]
    assert after.sources[""].kept_system_prompts == 1
    with pytest.raises(DataError, match="line 1: a chat of 2 messages.*no prompts.system_prompt"):
        load(config)


def test_a_system_message_without_text_does_not_count_as_one(tmp_path: Path) -> None:
    nothing: list[Any] = [" \n", None, [{"type": "text", "text": ""}]]
    none = [{"role": "system", "content": content} for content in nothing]
    own = [{"role": role, "content": "Own."} for role in ("system", "developer")]
    entries = [{**VERL, "prompt": [each, *CHAT], "answer": "1"} for each in (*none, *own)]
    template = CHAT_TEMPLATE.replace(
        "<{{ message.role }}>",
        "{% if message.role == 'system' %}<system>{% else %}<user>{% endif %}",
    )
    texts = []
    for entry in entries:
        source = read_problems(write_lines(tmp_path / "c.jsonl", entry), {})
        (prompt,) = tokenize(source, character_tokenizer(template), 99, system_prompt="Be brief.")
        texts.append(text(prompt))
    brief, kept = (f"<system>{order}<user>3 + 3?<assistant>" for order in ("Be brief.", "Own."))
    assert texts[:4] == [brief, brief, brief, kept]


def test_tools_and_all_of_a_message_reach_the_chat_template(tmp_path: Path) -> None:
    template = (
        "{% for tool in tools %}{{ tool.name }};{% endfor %}{% for message in messages %}"
        "{{ message.name if message.name is defined }}{{ message.content }}|{% endfor %}"
    )
    messages = [{"role": "user", "content": "hi", "name": "Ann"}, *CHAT]
    entry = {"messages": messages, "answer": "6", "tools": [{"name": "add"}]}
    [prompt] = tokenized(tmp_path, entry, chat_template=template)
    assert text(prompt) == "add;Annhi|3 + 3?|"


ONLY_USERS = (
    "{% for m in messages if m.role in ('user', 'system') %}{{ m.role }}:{{ m.content }}"
    "{% endfor %}"
)


def test_what_a_chat_template_leaves_out_is_refused_by_line_and_role(tmp_path: Path) -> None:
    human = {"messages": [{"role": "human", "content": "4 + 3?"}], "answer": "7"}
    with pytest.raises(DataError, match="line 2: the chat template leaves out .* role 'human'"):
        tokenized(tmp_path, VERL, human, chat_template=ONLY_USERS)
    with pytest.raises(DataError, match="line 1: the chat template leaves out the tool 'add'"):
        tokenized(tmp_path, {**VERL, "tools": [{"name": "add"}]}, chat_template=ONLY_USERS)


def test_a_text_that_the_chat_template_has_written_already_is_refused(tmp_path: Path) -> None:
    rendered = {"prompt": "<user>2 + 2?<assistant>Let me think.", "answer": "4"}
    told = "line 2: '<assistant>' is in its text, and the chat template would write it again; give"
    for entry in (rendered, {**rendered, "prompt": [{**CHAT[0], "content": rendered["prompt"]}]}):
        with pytest.raises(DataError, match=told):
            tokenized(tmp_path, GOOD, entry, chat_template=CHAT_TEMPLATE)
        for template in (None, "{{ messages[0].content }}"):
            prompt = tokenized(tmp_path, GOOD, entry, chat_template=template)[1]
            assert text(prompt) == rendered["prompt"]
    words = "{{ messages[0].content }}{% if add_generation_prompt %}: {% endif %}"
    (prompt,) = tokenized(tmp_path, {"prompt": "2: 3?", "answer": "4"}, chat_template=words)
    assert text(prompt) == "2: 3?: "


def test_a_developers_message_is_written_as_the_systems_and_the_summary_says_so(
    tmp_path: Path,
) -> None:
    entries = [{"messages": [{"role": "developer", "content": "Add."}, *CHAT], "answer": "6"}]
    source = read_problems(write_lines(tmp_path / "c.jsonl", *entries), {})
    (prompt,) = tokenize(source, character_tokenizer(ONLY_USERS), 99)
    assert text(prompt) == "system:Add.user:3 + 3?"
    assert source.notes == ["messages of role developer, written as system: 1 prompts"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].tool_calls[0].index | tojson }}", "not JSON serializable"),
        ("{{ messages[0].tool_calls.items() }}", "has no attribute 'items'"),
        ("{{ raise_exception('tools are not supported') }}", "not supported"),
        ("{{ '%d\n' % messages[0].tool_calls }}", "a real number is required"),
    ],
)
def test_messages_that_a_chat_template_cannot_render_are_refused_in_one_line(
    template: str, reason: str, tmp_path: Path
) -> None:
    calls = [{"function": {"name": "add"}}]
    entry = {"messages": [{**CHAT[0], "tool_calls": calls}], "answer": "6"}
    with pytest.raises(DataError, match=f"line 1: the chat template refuses it.*{reason}") as told:
        tokenized(tmp_path, entry, chat_template=template)
    assert "\n" not in str(told.value)


def test_stream_serves_each_prompt_once_per_epoch_in_a_new_order() -> None:
    stream = PromptStream(prompts(*"abcdefghijklm"), seed=0)
    served = [prompt.question for _ in range(13) for prompt in stream.next(3)]
    epochs = ["".join(served[start : start + 13]) for start in (0, 13, 26)]
    assert all(sorted(epoch) == list("abcdefghijklm") for epoch in epochs)
    assert len(set(epochs)) == 3
    counts = Counter(prompt.question for prompt in PromptStream(prompts(*"abc"), seed=0).next(8))
    assert set(counts) == set("abc") and max(counts.values()) == 3  # more than an epoch at once
    ordered = PromptStream(prompts(*"cab"), seed=0, shuffle=False)
    assert [prompt.question for prompt in ordered.next(7)] == [*"cabcabc"]


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


def test_an_epoch_serves_the_prompts_of_each_source_as_often_as_its_weight_says(
    tmp_path: Path,
) -> None:
    sources = [
        write_lines(tmp_path / f"{name}.jsonl", *numbered(*range(start, start + 20)))
        for name, start in (("a", 0), ("b", 20), ("c", 40))
    ]
    config = Config(data=",".join(sources), reward="exact")
    config.prompts.weights = [2, 0.5, 0]
    config.evaluation.problems = 0
    train = load(config).train
    assert [prompt.part for prompt in train] == [0] * 20 + [1] * 20 + [2] * 20
    stream = PromptStream(train, 0, weights=config.prompts.weights)
    stream.prompt(0)
    (epoch,) = stream._epochs
    counts = Counter(train[index].id for index in epoch.order)
    assert all(counts[prompt.id] == 2 for prompt in train[:20])
    assert 4 < sum(counts[prompt.id] for prompt in train[20:40]) < 16
    assert counts.keys().isdisjoint(prompt.id for prompt in train[40:])
    stream.next(30)
    resumed = PromptStream(train, 0, weights=config.prompts.weights)
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert resumed.next(150) == stream.next(150)
    config.prompts.weights = [1]
    with pytest.raises(DataError, match=r"^prompts.weights=\[1\]: data has 3 sources; give one w"):
        load(config)


def test_prompts_that_stand_for_all_are_drawn_from_sorted_and_weighted_data() -> None:
    sorted_ones = [
        replace(each, part=n // 500) for n, each in enumerate(prompts(*map(str, range(1000))))
    ]
    drawn = draw(sorted_ones, seed=0)
    assert len({prompt.id for prompt in drawn}) == 64 and drawn == draw(sorted_ones, seed=0)
    assert 16 < sum(prompt.part for prompt in drawn) < 48  # four standard deviations
    assert draw(sorted_ones, seed=0, count=8) == drawn[:8] != draw(sorted_ones, seed=1)[:8]
    assert {prompt.part for prompt in draw(sorted_ones, seed=0, weights=[0, 1])} == {1}
    assert len(draw(sorted_ones[:9], seed=0)) == 9 and draw([], seed=0) == []


def test_prompts_whose_last_groups_had_equal_rewards_are_left_out_of_later_epochs() -> None:
    """As many times as `retire_after` says, in a row; what has begun stays as it is."""

    def fresh(least: int = 6) -> PromptStream:
        return PromptStream(prompts(*"abcdefgh"), 0, retire_after=2, least=least)

    def visit(stream: PromptStream, epochs: int, equal: str) -> None:
        for _ in range(epochs):
            for each in [each for each in stream.next(8) if each.question in equal]:
                stream.visited(each, is_equal=True)

    stream = fresh()
    visit(stream, 2, equal="ab")
    third = stream.next(6)
    assert sorted(prompt.question for prompt in third) == [*"cdefgh"]
    ahead = [stream.prompt(stream.position + place).question for place in range(6)]
    assert sorted(ahead) == [*"cdefgh"]
    stream.visited(third[0], is_equal=True)
    stream.visited(third[0], is_equal=True)
    stream.visited(prompts("a")[0], is_equal=False)
    assert stream.retired == {"b", third[0].question}
    resumed, larger = fresh(), fresh(least=8)  # with larger steps
    for each in (resumed, larger):
        each.restore(json.loads(json.dumps(stream.state())))
    assert resumed.next(30) == (found := stream.next(30))
    assert larger.next(6) == found[:6]
    served = [prompt.question for prompt in found]
    assert served[:6] == ahead and sorted(served[6:12]) == sorted(
        set("abcdefgh") - {"b", third[0].question}
    )
    every = PromptStream(prompts(*"abcdefgh"), 0)
    every.restore(stream.state())
    assert len({prompt.question for prompt in every.next(30)[12:]}) == 8
    few = fresh()
    visit(few, 2, equal="abc")  # five would be left
    assert sorted(prompt.question for prompt in few.next(8)) == [*"abcdefgh"]


def test_stream_refuses_the_state_of_other_prompts() -> None:
    state = PromptStream(prompts(*"abc"), seed=0).state()
    with pytest.raises(DataError, match="other prompts"):
        PromptStream(prompts(*"abd"), seed=0).restore(state)


def summary_of(config: Config, chat_template: str | None = None) -> str:
    config.reward = "exact"
    config.evaluation.held_out_fraction = 0.0
    config.rollout.stop_token_ids = [127]
    return summarize(config, load(config, chat_template), character_tokenizer(chat_template))


def test_summary_accounts_for_every_entry_and_shows_a_prompt(tmp_path: Path) -> None:
    entries = [{"question": "x" * 12, "answer": "1"}, {"question": "x" * 40, "answer": "1"}]
    entries += numbered(*range(10), 3, 4)  # questions of 6 characters; 3 and 4 are repeated
    entries += [{"question": "3 + 1?", "answer": "four"}]
    config = Config(data=write_lines(tmp_path / "a.jsonl", *entries))
    config.rollout.max_prompt_length = 20
    config.evaluation.data = {"b": write_lines(tmp_path / "b.jsonl", *numbered(7, 99, 99))}
    assert (
        summary_of(config, CHAT_TEMPLATE)
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
an answer ends with: '<system>' (127)
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
    *_, lengths, template, _, title, first, second, left_out, last = summary_of(config).splitlines()
    assert lengths == "prompt lengths: 3,019 tokens each"
    assert template == "chat template: none, a prompt is the text of its question"
    assert title == "the first prompt, 3,019 tokens:"
    assert (first, second[:12]) == ("  | Red: \\x1b[31m", "  | Say it.y")
    assert left_out == "  | [1,019 characters not shown]"
    assert last == f"  | {'y' * 999}."


def test_summary_counts_the_prompts_with_a_system_message_of_their_own(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Own."}, {"role": "user", "content": "5?"}]
    data = write_lines(tmp_path / "a.jsonl", *numbered(1, 2), {**VERL, "prompt": chat})
    config = Config(data=data, prompts=PromptsConfig(system_prompt="Be brief."))
    config.evaluation.data = {"b": write_lines(tmp_path / "b.jsonl", *numbered(3))}
    shown = summary_of(config, CHAT_TEMPLATE)
    assert "\nprompts.system_prompt: given to 3 prompts; 1 have their own\n" in shown


def test_end_tokens_behind_prompts_are_cut_off_and_counted(tmp_path: Path) -> None:
    entries = [
        *numbered(1),
        {"question": "Say 5.", "answer": "5"},
        {"question": "2?<system><system>", "answer": "2"},
    ]
    source = read_problems(write_lines(tmp_path / "a.jsonl", *entries), {})
    (end,) = character_tokenizer().encode("<system>")
    read = tokenize(source, character_tokenizer(), 9, stops=[ord("?"), end])
    assert [text(prompt) for prompt in read] == ["1 + 1?", "Say 5.", "2?"]
    assert source.notes == ["end tokens, or a second beginning, cut off: 1 prompts"]
    nothing = read_problems(
        write_lines(tmp_path / "b.jsonl", {"question": "<system>", "answer": "5"}), {}
    )
    with pytest.raises(DataError, match="b.jsonl line 1: its prompt is nothing but an end token"):
        tokenize(nothing, character_tokenizer(), 9, stops=[end])


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
