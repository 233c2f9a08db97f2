"""Conversations: sampled tokens stay, and what is new is what the template writes."""

import asyncio
import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conversations import (
    BEGINS_THOUGHT,
    DROPS_THOUGHTS,
    KEEPS_THOUGHTS,
    SPECIAL,
    VOCABULARY,
    chat_tokenizer,
)
from qurl_megatron.extensions.agents.chat import check_template, say_once
from qurl_megatron.extensions.agents.policy import EpisodeOver, Limits, Policy, Request, Turn
from qurl_megatron.extensions.agents.tools import call_tools, schema
from qurl_megatron.model.chat_template import TemplateError, read_message, render
from tiny import EOS_TOKEN_ID

KEEPS, DROPS = chat_tokenizer(KEEPS_THOUGHTS), chat_tokenizer(DROPS_THOUGHTS)
BEGINS = chat_tokenizer(BEGINS_THOUGHT)
LIMITS = Limits(max_turns=0, max_turn_tokens=1000, max_episode_tokens=100_000)


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


@dataclass
class Server:
    """What rank 0 records of an episode; each turn samples the next of some token lists."""

    turns: list[list[int]]
    sequences: list[list[tuple[int, bool]]] = field(default_factory=list)  # token, was sampled

    async def sample(self, request: Request) -> Turn:
        if request.begins:
            self.sequences.append([])
        self.sequences[-1] += [(token, False) for token in request.ids]
        ids = self.turns.pop(0)
        await asyncio.sleep(0)
        self.sequences[-1] += [(token, True) for token in ids]
        finish = "stop" if ids[-1] == EOS_TOKEN_ID else "length"
        return Turn(ids, "", [-0.5] * len(ids), finish, [1] * len(ids), 0)

    def sampled(self) -> list[int]:
        return [token for each in self.sequences for token, sampled in each if sampled]


def write(tokenizer: Any, text: str, random: Random | None = None) -> list[int]:
    """Return tokens of a text; with `random`, some are cut into bytes that no encoding gives."""
    pieces: list[int] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        name = tokenizer.convert_ids_to_tokens(token)
        splits = random is not None and token >= len(SPECIAL) and random.random() < 0.5
        pieces += (
            [tokenizer.convert_tokens_to_ids(letter) for letter in name] if splits else [token]
        )
    return pieces


def play(tokenizer: Any, server: Server, agent: Any) -> Policy:
    policy = Policy([5], LIMITS, server.sample, tokenizer)
    asyncio.run(agent(policy))
    return policy


THOUGHT = "<think>\nthis is the thought\n</think>\n\n"
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
SAYS = st.builds(
    lambda thought, text, call, end: (thought + text + call, end),
    st.sampled_from(["", THOUGHT]),
    st.sampled_from(
        ["", "this is the answer", "is the <", "\n\n  the  \n", "\u00e9\U0001f600 the"]
    ),
    st.sampled_from(["", CALL, CALL + "\n" + CALL, "<tool_call>\n{broken\n</tool_call>"]),
    st.booleans(),
)
DOES = st.sampled_from(["user", "tools", "two users", "rewrite", "compact", "tools off"])


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(SAYS, DOES), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from([KEEPS, DROPS]),
)
def test_whatever_is_said_sampled_tokens_stay_and_text_is_what_the_template_writes(
    talk: list[tuple[tuple[str, bool], str]], random: Random, tokenizer: Any
) -> None:
    """Chat, tools, observations, changed histories and cut-off turns, in any order.

    The tokens sampled are in the record id for id, once, in order. As long as only the template has
    written between turns, the text of a sequence is what it writes for the whole conversation,
    but that it writes down calls again in its own way.
    """
    turns = []
    for (text, ends), _ in talk:
        ids = write(tokenizer, text or "this", random)
        turns.append([*ids, EOS_TOKEN_ID] if ends else ids)
    server = Server([list(turn) for turn in turns])
    expected: list[list[int]] = []  # sampled tokens, by sequence

    async def agent(policy: Policy) -> None:
        messages: list[Any] = [{"role": "user", "content": "what is this"}]
        tools: list[Any] = [multiply]
        for number, (_, does) in enumerate(talk):
            before = len(server.sequences)
            reply = await policy.chat(messages, tools=tools)
            if len(server.sequences) > before:
                expected.append([])
                read = [read_message(message) for message in messages]
                whole = render(tokenizer, read, [schema(tool) for tool in tools])
                prompt = [token for token, sampled in server.sequences[-1] if not sampled]
                assert prompt == tokenizer.encode(whole, add_special_tokens=False)
            expected[-1] += turns[number]
            assert policy.ids == [token for token, _ in server.sequences[-1]]
            messages = [*messages, reply]
            if does == "tools" and reply.get("tool_calls"):
                answers = await call_tools(reply, [multiply])
                assert {answer["content"] for answer in answers} == {"42"}
                messages += answers
            elif does == "compact":
                messages = [messages[0], {"role": "user", "content": "go on"}]
            elif does == "rewrite":
                messages = [{"role": "user", "content": "else"}, *messages[1:]]
                messages.append({"role": "user", "content": "more"})
            else:
                messages.append({"role": "user", "content": "more"})
                if does == "two users":
                    messages.append({"role": "user", "content": "is the"})
            if does == "tools off":
                tools = []

    play(tokenizer, server, agent)
    assert server.sampled() == [token for turn in turns for token in turn]
    assert [[t for t, sampled in each if sampled] for each in server.sequences] == expected


def conversation(tokenizer: Any, *said: str) -> tuple[Server, list[Any]]:
    """Play turns that say these texts, each followed by a user's message."""
    server = Server([[*write(tokenizer, text), EOS_TOKEN_ID] for text in said])
    messages: list[Any] = [{"role": "user", "content": "what is this"}]

    async def agent(policy: Policy) -> None:
        for _ in said:
            messages.append(await policy.chat(list(messages)))
            messages.append({"role": "user", "content": "more"})

    play(tokenizer, server, agent)
    return server, messages


def text_of(tokenizer: Any, sequence: list[tuple[int, bool]]) -> str:
    text: str = tokenizer.decode([token for token, _ in sequence])
    return text


@pytest.mark.parametrize("said", ["this", THOUGHT + "this"])
def test_a_sequence_is_the_text_that_the_template_writes_for_the_conversation(said: str) -> None:
    server, messages = conversation(KEEPS, said, said, said)
    (sequence,) = server.sequences
    whole = render(KEEPS, messages[:-2], []) + said + "<|im_end|>"
    assert text_of(KEEPS, sequence) == whole


def test_thoughts_that_the_template_drops_open_a_branch_without_them() -> None:
    server, _ = conversation(DROPS, THOUGHT + "first", "second", "third")
    first, second = server.sequences
    assert THOUGHT in text_of(DROPS, first) and "thought" not in text_of(DROPS, second)
    assert text_of(DROPS, second).count("<|im_start|>assistant") == 3  # no further branch
    plain, _ = conversation(DROPS, "first", "second")
    assert len(plain.sequences) == 1


def test_an_empty_thought_that_opens_each_turn_does_not_stay_in_the_history() -> None:
    opens = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    template = DROPS_THOUGHTS.replace("<|im_start|>assistant\n{% endif", opens + "{% endif")
    assert template != DROPS_THOUGHTS
    without = chat_tokenizer(template)
    server, _ = conversation(without, "first", "second")
    assert [text_of(without, each).count("</think>") for each in server.sequences] == [1, 1]


def test_messages_may_be_written_down_again_as_openai_clients_do() -> None:
    server = Server([[*write(KEEPS, CALL), EOS_TOKEN_ID], [*write(KEEPS, "42"), EOS_TOKEN_ID]])

    async def agent(policy: Policy) -> None:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "6 x 7"}]}]
        reply = await policy.chat(messages, tools=[multiply])
        again = {**json.loads(json.dumps(reply)), "refusal": None}
        again["tool_calls"][0]["function"]["arguments"] = '{"b": 7, "a": 6}'
        messages = [
            {"role": "user", "content": "6 x 7"},
            again,
            *await call_tools(reply, [multiply]),
        ]
        last = await policy.chat(messages, tools=[multiply])
        assert last == {"role": "assistant", "content": "42"}

    play(KEEPS, server, agent)
    assert len(server.sequences) == 1


def test_a_reply_that_was_changed_in_place_was_changed() -> None:
    server = Server([[*write(KEEPS, THOUGHT + "this"), EOS_TOKEN_ID], [EOS_TOKEN_ID]])

    async def agent(policy: Policy) -> None:
        messages: list[Any] = [{"role": "user", "content": "what"}]
        messages.append(await policy.chat(messages))
        messages[-1]["content"] = "this"
        await policy.chat([*messages, messages[0]])

    play(KEEPS, server, agent)
    _, changed = server.sequences
    assert "assistant\nthis<|im_end|>" in text_of(KEEPS, changed)


def test_a_turn_that_the_agent_waits_for_no_longer_is_taken() -> None:
    """Its tokens are sampled, so they belong to the sequence; a chat then begins anew."""
    server = Server([[9, EOS_TOKEN_ID], [8], [*write(KEEPS, "this"), EOS_TOKEN_ID]])

    async def agent(policy: Policy) -> None:
        user = {"role": "user", "content": "what"}
        for turn in (policy.generate(), policy.chat([user])):
            waiting = asyncio.create_task(turn)
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.sleep(0.01)
            assert waiting.cancelled()
        assert policy.num_turns == 2 and policy.ids[-1] == 8
        assert (await policy.chat([user]))["content"] == "this"
        assert policy.ids == [token for token, _ in server.sequences[-1]]

    play(KEEPS, server, agent)
    assert server.sampled()[:3] == [9, EOS_TOKEN_ID, 8]


def test_a_turn_that_was_cut_off_is_ended_before_the_next_message() -> None:
    server = Server([write(KEEPS, "this"), [*write(KEEPS, "is"), EOS_TOKEN_ID]])

    async def agent(policy: Policy) -> None:
        user = {"role": "user", "content": "what"}
        await policy.chat([user, await policy.chat([user]), user])

    play(KEEPS, server, agent)
    (sequence,) = server.sequences
    user = "<|im_start|>user\nwhat<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(KEEPS, sequence) == f"{user}this<|im_end|>\n{user}is<|im_end|>"


def test_a_function_becomes_the_schema_that_openai_clients_send() -> None:
    assert schema(multiply) == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first number."},
                    "b": {"type": "integer", "description": "The second number."},
                },
                "required": ["a", "b"],
            },
            "return": {"type": "integer"},
        },
    }

    def untyped(a):  # type: ignore[no-untyped-def]
        """Do something.

        Args:
            a: A number.
        """

    with pytest.raises(TypeError, match="tool 'untyped': Argument a is missing a type hint"):
        schema(untyped)


BROKEN = {
    "another end": KEEPS_THOUGHTS.replace("<|im_end|>\n", "</s>\n"),
    "only the last message": KEEPS_THOUGHTS.replace("in messages -%}", "in messages[-1:] -%}"),
    "a count of messages": KEEPS_THOUGHTS.replace("{{ m.role }}", "{{ m.role }}{{ loop.index }}"),
    "no template": "",
}


@pytest.mark.parametrize(
    ("template", "why"),
    zip(
        BROKEN.values(),
        [
            "does not end an assistant's message",
            "depends on|leaves out|fewer",
            "depends on",
            "has no chat",
        ],
        strict=True,
    ),
    ids=BROKEN,
)
def test_a_template_that_cannot_be_appended_to_is_refused(template: str, why: str) -> None:
    with pytest.raises(TemplateError, match=why):
        check_template(chat_tokenizer(template))


def test_templates_that_can_be_appended_to_are_accepted() -> None:
    check_template(KEEPS)
    check_template(DROPS)


def test_two_turns_at_once_and_turns_beyond_a_limit_are_refused() -> None:
    async def agent() -> None:
        policy = Policy([5], Limits(2, 4, 8), Server([[9], [9], [9]]).sample, KEEPS)
        with pytest.raises(ValueError, match="stop='': an empty text"):
            await policy.generate(stop=["what is", ""])
        with pytest.raises(EpisodeOver, match="a text of 1,000 characters does not fit"):
            policy.encode("x" * 1000)
        policy.over = ""
        one, other = await asyncio.gather(
            policy.generate(stop=["</tool_call>", 7]), policy.generate(), return_exceptions=True
        )
        assert isinstance(one, Turn) and isinstance(other, RuntimeError)
        assert policy.room == 6 and policy.ids == [5, 9]
        await policy.generate()
        with pytest.raises(EpisodeOver, match="max_turns is 2"):
            await policy.generate()
        assert policy.over == "turns"

    asyncio.run(agent())


def test_chats_of_one_episode_at_the_same_time_are_played_one_after_another(
    capfd: pytest.CaptureFixture[str],
) -> None:
    say_once.cache_clear()
    server = Server([[*write(KEEPS, text), EOS_TOKEN_ID] for text in ("this", "the", "is")])

    async def agent(policy: Policy) -> None:
        chats = (policy.chat([{"role": "user", "content": text}]) for text in "abc")
        replies = await asyncio.gather(*chats)
        assert [reply["content"] for reply in replies] == ["this", "the", "is"]

    play(KEEPS, server, agent)
    assert len(server.sequences) == 3
    assert capfd.readouterr().out.count("waits until the one before it") == 1


def test_calls_have_ids_of_their_own_in_all_turns_of_an_episode() -> None:
    server = Server([[*write(KEEPS, CALL + "\n" + CALL), EOS_TOKEN_ID] for _ in range(3)])

    async def agent(policy: Policy) -> None:
        messages: list[Any] = [{"role": "user", "content": "what"}]
        ids = []
        for _ in range(3):
            reply = await policy.chat(messages, tools=[multiply])
            ids += [call["id"] for call in reply["tool_calls"]]
            messages += [reply, *await call_tools(reply, [multiply])]
        assert ids == [f"call_{number}" for number in range(6)]

    play(KEEPS, server, agent)
    assert len(server.sequences) == 1


TAGS = """\
this is it
</think>

<tool_call>
<function=multiply>
<parameter=a>
6
</parameter>
<parameter=b>
7
</parameter>
</function>
</tool_call>"""


def test_calls_in_tags_are_made_and_their_text_is_the_templates() -> None:
    server = Server(
        [[*write(BEGINS, text), EOS_TOKEN_ID] for text in (TAGS, "it is\n</think>\n\n42")]
    )

    async def agent(policy: Policy) -> None:
        messages: list[Any] = [{"role": "user", "content": "what"}]
        reply = await policy.chat(messages, tools=[multiply])
        messages += [reply, *await call_tools(reply, [multiply])]
        assert messages[-1]["content"] == "42"
        assert "42" in (await policy.chat(messages, tools=[multiply]))["content"]
        (sequence,) = server.sequences
        read = [read_message(message) for message in messages]
        whole = render(BEGINS, read, [schema(multiply)])
        assert text_of(BEGINS, sequence).startswith(whole)

    play(BEGINS, server, agent)


@pytest.mark.parametrize("said", ["this is the", "this\n</think>\n\nthe"])
def test_a_turn_that_ends_within_its_thought_is_followed_by_a_new_rendering(said: str) -> None:
    user = {"role": "user", "content": "what"}
    server = Server([write(BEGINS, said), [*write(BEGINS, "is"), EOS_TOKEN_ID]])
    messages: list[Any] = [user]

    async def agent(policy: Policy) -> None:
        messages.extend([await policy.chat(messages), user])
        await policy.chat(messages)

    play(BEGINS, server, agent)
    *_, last = server.sequences
    whole = render(BEGINS, [read_message(message) for message in messages])
    assert text_of(BEGINS, last) == whole + "is<|im_end|>"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (KEEPS_THOUGHTS.replace("<tool_call>", "[CALL]"), "in a form that is not read"),
        (KEEPS_THOUGHTS.replace("if tools", "if false"), "writes no tools"),
        (KEEPS_THOUGHTS.replace("m.tool_calls or []", "[]"), "writes no tools"),
    ],
)
def test_tools_are_refused_where_the_template_writes_no_calls_that_are_read(
    template: str, why: str
) -> None:
    tokenizer = chat_tokenizer(template)
    server = Server([[9, EOS_TOKEN_ID]])

    async def agent(policy: Policy) -> None:
        with pytest.raises(TemplateError, match=why):
            await policy.chat([{"role": "user", "content": "what"}], tools=[multiply])
        await policy.chat([{"role": "user", "content": "what"}])

    play(tokenizer, server, agent)


def test_a_message_lacks_the_text_that_ended_it() -> None:
    server = Server([write(KEEPS, "this is the"), [*write(KEEPS, "the"), EOS_TOKEN_ID]])

    async def agent(policy: Policy) -> None:
        user = {"role": "user", "content": "what"}
        reply = await policy.chat([user], stop=["is the", "is t"])
        assert reply["content"] == "this "
        await policy.chat([user, reply, user], stop="is the")

    play(KEEPS, server, agent)
    (sequence,) = server.sequences  # what was sampled stays
    assert "this is the<|im_end|>" in text_of(KEEPS, sequence)


def test_a_turn_after_one_that_was_given_up_waits_for_it() -> None:
    """Rank 0 answers a turn that was given up later, with None or, if it was sampled, with it."""
    for was_sampled in (False, True):
        given_up = asyncio.Event()

        async def sample(
            request: Request, given_up: Any = given_up, late: Any = was_sampled
        ) -> Any:
            if not given_up.is_set():
                await given_up.wait()
                await asyncio.sleep(0.02)
                if not late:
                    return None
            return Turn([9], "", [-0.5], "stop", [1], 0)

        async def agent(
            sample: Any = sample, given_up: Any = given_up, late: Any = was_sampled
        ) -> None:
            policy = Policy([5], LIMITS, sample, KEEPS, abandon=given_up.set)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(policy.generate(), 0.01)
            policy.observe([7])
            await policy.generate()
            assert policy.ids == [5, *([9] if late else []), 7, 9]

        asyncio.run(agent())


def test_the_vocabulary_is_that_of_the_tokenizer() -> None:
    assert len(KEEPS) == VOCABULARY
