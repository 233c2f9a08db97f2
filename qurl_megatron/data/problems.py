"""Problems: read questions and answers from files, dataset directories and reasoning-gym tasks.

Sources:

    FILE.jsonl             one JSON object per line
    FILE.json              a list of objects, or one object per line
    FILE.parquet           one row per problem
    FILE.csv, FILE.tsv     a line of names, then one row per problem; every cell is text
    FILE.jsonl.gz          any of the texts above, compressed
    DIR                    a Hugging Face dataset: written by `save_to_disk`, or files such as
                           these in the layout of the Hub (train-*.parquet, data/, the configs of
                           a README.md); the split `train`, or the only split
    DIR:SPLIT              another split of it
    DIR:CONFIG             one of the configs of its README.md, which are datasets of their own
    DIR:CONFIG:SPLIT       another split of that
    ORG/NAME               a dataset of the Hugging Face Hub; what follows it is as for DIR, and
                           @REVISION before or after that is a branch, a tag or a commit
    reasoning_gym:TASK     problems that reasoning-gym generates
    DIR/part-*.jsonl       all files whose names match, sorted
    SOURCE,SOURCE          several of these, one after the other

Recognized fields of an entry (others are ignored):

    source                         question                            answer
    plain, reasoning-gym           question (or prompt, or problem)    answer
    GSM8K                          question                            answer, "#### 42" at its end
    DeepScaleR, MATH-500, AIME     problem                             answer
    verl, DAPO-17k                 prompt: chat messages               reward_model.ground_truth
    OpenAI, TRL                    messages: a conversation            answer, or its last message
    ShareGPT                       conversations: from and value       answer, or its last message

`Fields` names other fields. The question is a string or a list of chat messages, which are objects
with `role` and `content`. If the assistant has the last message of a conversation, that is not part
of the question. Other fields of a message (`tool_calls`, `name`) and the `tools` of an entry go to
the chat template. An answer is a string, a number, or a list of these, all of them right.
For a function of the user's own it may be any JSON value, or be missing in all entries.

`metadata` holds fields for the verifier; reward reasoning_gym needs its `source_dataset`.

Invariants:
- A question appears once with each of its answers; later copies are dropped and counted.
- A number has the same text from every kind of file but CSV, which has only texts. A whole float
  is a whole number. Any other is the shortest decimal without an exponent that its type
  distinguishes from its neighbors.
- Only `local_data` downloads, into the Hub's cache; nothing else is written outside a temporary
  directory.
"""

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from qurl_megatron.algorithm.score import Question, texts_of
from qurl_megatron.config.schema import Config, ReadingConfig, Unusable
from qurl_megatron.data.entries import (
    REASONING_GYM,
    DataError,
    Entries,
    from_json,
    generate,
    parts_of,
)
from qurl_megatron.data.rewards import each_of, names_for, of_set
from qurl_megatron.data.scoring import unverifiable
from qurl_megatron.data.verifiers import has_other_words
from qurl_megatron.model.chat_template import read_message
from qurl_megatron.model.repository import snapshot_of

QUESTION_FIELDS = ("question", "prompt", "problem")
_ORDERS = ("system", "system_prompt")
_PARTS = (*_ORDERS, "choices", "options", "context", "passage")
# Fields without which a question may be half of one. A prompt has all but orders.
_READ_WITH = {
    "instruction": ("input", "context"),
    "prompt": _ORDERS,
    "question": _PARTS,
    "problem": _PARTS,
}


class Incomplete(DataError):
    """An entry has no answer."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question and its answer, before tokenization."""

    question: str  # for a chat, the content of all messages
    messages: list[dict[str, Any]]  # role, content and more; a plain question is one user message
    answer: Any  # a text, the first if there are several; see `texts_of`
    metadata: dict[str, Any]  # fields for the verifier
    location: str  # file and line, for messages
    tools: list[dict[str, Any]] | None = None  # for the chat template
    answers: tuple[str, ...] = ()  # of a list: each is right
    columns: dict[str, Any] = dataclasses.field(default_factory=dict)  # the entry, if it is kept
    part: int = 0  # of the data's sources, the number of its own
    given: Any = None  # the answer as the entry has it

    @property
    def asked(self) -> Question:
        """What a verifier learns of the problem."""
        learned = self.question, self.answer, self.metadata, self.answers, self.columns, self.given
        return Question(*learned)


class Fields(NamedTuple):
    """Fields of an entry that are read in place of the recognized ones.

    `a.b` is field b of the object in field a. An entry without a named field is refused or, if the
    field is not `required`, read by the recognized names.
    """

    question: str = ""  # empty: the recognized ones
    answer: str = ""
    required: bool = True
    incomplete: Unusable = "refuse"  # what becomes of entries without an answer
    for_function: bool = False  # of the user's own, which gets entries and answers as they are
    keeps_entries: bool = False  # for a function beside a verifier
    without_answer: bool = False  # no entry has one
    ignores_media: bool = False  # images, audio and video are left out; else they are refused
    columns: Collection[str] = ()  # fields that each entry must have, for a reward function

    @classmethod
    def of(cls, how: ReadingConfig, **others: Any) -> "Fields":
        """Return what a configuration says of them, and `others`."""
        named = how.question_key, how.answer_key
        return cls(*named, incomplete=how.incomplete, ignores_media=how.ignore_media, **others)


RECOGNIZED = Fields()


@dataclasses.dataclass
class Source:
    """The problems of a source, and what happened to its other entries.

    `read_problems`, `keep_verifiable` and `tokenize` record here what they leave out.
    """

    data: str  # as in the configuration
    problems: list[Problem] = dataclasses.field(default_factory=list)
    entries: int = 0
    kept_system_prompts: int = 0  # prompts that keep a system message of their own
    notes: list[str] = dataclasses.field(default_factory=list)  # what else a user should know
    dropped: defaultdict[str, list[str]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )
    """Locations of the entries that were left out, by reason, which begins with a verb ("has no
    answer"). An empty text is an unknown location."""


def read_problems(
    data: str,
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    fields: Fields = RECOGNIZED,
) -> Source:
    """Read a file, a dataset directory or `reasoning_gym:TASK`; keep order, drop repetitions.

    Args:
        data: a source, see the top of this module.
        options: of the reasoning-gym task; empty for any other source. `size` defaults to 5000 and
            `seed` to `seed`.
        fields: where question and answer are, if not in a recognized field.

    Raises:
        DataError: a problem cannot be read, or there is none.
        HubError: a dataset of the Hub cannot be downloaded.
    """
    source = Source(data)
    data = local_data(data)
    if options and not any(part.startswith(REASONING_GYM) for part in parts_of(data)):
        raise DataError(
            f"prompts.options.{next(iter(options))}: {data} takes no options; only "
            f"{REASONING_GYM}TASK does; give prompts.options={{}} to drop them"
        )
    entries = (
        (number, *entry)
        for number, part in enumerate(parts_of(data))
        for entry in _entries(part, options, seed)
    )
    unique: dict[tuple[str, tuple[str, ...]], Problem] = {}
    incomplete: dict[str, Incomplete] = {}  # by location
    for part, location, entry in entries:
        source.entries += 1
        try:
            problem = dataclasses.replace(_problem(entry, location, fields), part=part)
        except Incomplete as error:
            incomplete[location] = error
            continue
        except DataError as error:
            raise DataError(f"{location}: {error}") from None
        key = problem.question, texts_of(problem.answer, problem.answers)
        if key in unique:
            source.dropped["repeats an earlier problem"].append(location)
            continue
        unique[key] = problem
    is_named = fields.answer and fields.required
    if incomplete and not unique and fields.for_function and not is_named:
        fields = fields._replace(without_answer=True)
        source = dataclasses.replace(
            read_problems(data, options, seed=seed, fields=fields), data=source.data
        )
        source.notes.append("no entry has an answer, and the function gets None")
        return source
    if incomplete and (fields.incomplete == "refuse" or not unique):
        location, first = next(iter(incomplete.items()))
        hint = "; prompts.incomplete=drop leaves such entries out" if unique else ""
        raise DataError(
            f"{location}: {first}; {len(incomplete):,} of {source.entries:,} entries have no "
            f"answer{hint}"
        )
    if not unique:
        raise DataError(f"{data}: contains no problems")
    if incomplete:
        source.dropped["has no answer"] += incomplete
    source.problems = list(unique.values())
    return source


def local_data(data: str, kept: str = "") -> str:
    """Return sources on this machine: those of `data`, or downloads of what they name on the Hub.

    Of a dataset with several configs, only the files of one are downloaded.

    Args:
        data: a source, see the top of this module.
        kept: the sources that a run has already; a name without a revision means their commit.

    Raises:
        DataError: it has no such config or split, or several and none is named.
        HubError: it cannot be downloaded, or is an address.
    """
    directories = [part.partition(":")[0] for part in parts_of(kept)]
    commits = {known.name: each for each in directories if (known := snapshot_of(each))}
    return ",".join(_local(part, commits) for part in parts_of(data))


def _entries(part: str, options: Mapping[str, Any], seed: int) -> Entries:
    if part.startswith(REASONING_GYM):
        return generate(part.removeprefix(REASONING_GYM), options, seed)
    from qurl_megatron.data import files

    return files.read(part)


def _local(part: str, commits: Mapping[str, str]) -> str:
    if part.startswith(REASONING_GYM):
        return part
    from qurl_megatron.data import files

    return files.local(part, commits)


def keep_verifiable(sources: Mapping[str, Source], config: Config) -> None:
    """Find problems that no completion could solve, and record them in their sources.

    Training data, the source `""`, loses them. In evaluation sets, sources by their names, they
    stay, and only a completion with the exact text of the answer is right. All sources are checked
    together, because the processes that check them take seconds to start.

    Raises:
        ConfigError: the reward cannot be loaded.
        DataError: no problem of a source can be solved, or one of reasoning_gym cannot, whose entry
            then lacks what its scorer needs.
    """
    scored = {name: of_set(config, name) for name in sources}
    rewards = {each.reward: each for of_source in scored.values() for each in each_of(of_source)}
    for each in rewards.values():
        asked = {
            name: [p for p in source.problems if each.reward in names_for(scored[name], p.asked)]
            for name, source in sources.items()
        }
        _keep_verifiable_by(each, sources, asked)


def _keep_verifiable_by(
    config: Config, sources: Mapping[str, Source], problems: Mapping[str, list[Problem]]
) -> None:
    """Check the `problems` of each source that the only reward of `config` scores."""
    every = itertools.chain.from_iterable(problems.values())
    reasons_of = iter(unverifiable(config, [problem.asked for problem in every]))
    for name, source in sources.items():
        asked = list(zip(problems[name], reasons_of, strict=False))  # the next source has the rest
        reasons = [f"{problem.location}: {reason}" for problem, reason in asked if reason]
        worded = [
            f"{problem.location}: {answer!r}"
            for problem, reason in asked
            for answer in texts_of(problem.answer, problem.answers)
            if not reason and has_other_words(config.reward, answer)
        ]
        if worded:
            source.notes.append(
                f"{len(worded):,} answers are a number among words, which a completion may have to "
                f"repeat for reward {config.reward}; the first is {worded[0]}"
            )
        if not reasons:
            continue
        if config.reward == "reasoning_gym" or len(reasons) == len(asked):
            raise DataError(reasons[0])
        if not name:
            lost = {problem.location for problem, reason in asked if reason}
            source.problems = [each for each in source.problems if each.location not in lost]
            source.dropped[f"has an answer that reward {config.reward} cannot compare"] += reasons
        else:
            source.notes.append(
                f"{len(reasons):,} answers cannot be compared by reward {config.reward}, and only "
                f"their exact text is right; the first is {reasons[0]}"
            )


# From an entry to a problem.


def _problem(entry: Any, location: str, fields: Fields) -> Problem:
    if not isinstance(entry, dict):
        raise DataError(f"a JSON {type(entry).__name__}; expected an object")
    conversations = ("messages", "conversations")
    name = _name(entry, fields.question, (*QUESTION_FIELDS, *conversations), fields.required)
    if _is_missing(_look_up(entry, name)) and {"instruction", "output"} <= entry.keys():
        raise DataError(
            "has Alpaca's fields; give prompts.question_key=instruction prompts.answer_key=output; "
            "with an input too, join it with the instruction in one field, such as question"
        )
    if {"chosen", "rejected"} <= entry.keys() and not (fields.answer or fields.for_function):
        raise DataError(
            "has chosen and rejected, a preference and no right answer; if a field holds one, name "
            "it with prompts.answer_key="
        )
    asked = _value(entry, name, "prompts.question_key")
    if not fields.ignores_media and (media := _media({**entry, "type": None})):
        raise DataError(f"has the field {media}; {_TEXT_ONLY}")
    others = {each: entry.get(each) for each in QUESTION_FIELDS}
    also = [  # a number is that of a problem, as in the answers that a run keeps
        each for each, value in others.items() if value and value != asked and not _is_number(value)
    ]
    if name in QUESTION_FIELDS and not fields.question and also:
        raise DataError(
            f"has {name} and {also[0]}, which differ; ask one with prompts.question_key={name} or "
            f"{also[0]}"
        )
    messages = _messages(asked, name, fields.ignores_media)
    if name in conversations and not _say(messages, entry.get("system")):
        messages.insert(0, {"role": "system", "content": _text(entry["system"], "system")})
    beside = [each for each in _READ_WITH.get(name, ()) if not _say(messages, entry.get(each))]
    if beside and (name == "instruction" or name != fields.question):
        alone = "" if name == "instruction" else f", or ask without: prompts.question_key={name}"
        raise DataError(f"has {name} and {beside[0]}; join them in one field{alone}")
    last = ""
    answers: tuple[str, ...] = ()
    if name not in QUESTION_FIELDS and messages[-1]["role"] == "assistant" and len(messages) > 1:
        last = messages.pop().get("content", "")
    elif name in QUESTION_FIELDS and messages[-1]["role"] == "assistant":
        raise DataError(
            f"the last message of {name} is the assistant's; end it with the user's, or call it "
            "messages, whose last one is the answer"
        )
    question = "\n\n".join(message["content"] for message in messages if message["content"])
    verl = isinstance(entry.get("reward_model"), dict)
    usual = "reward_model.ground_truth" if verl else "answer"
    name = _name(entry, fields.answer, (usual,), fields.required)
    answer = given = None
    if last and not fields.answer and _look_up(entry, name) is None:
        answer = given = last
    elif not fields.without_answer:
        answer = given = _value(entry, name, "prompts.answer_key", Incomplete)
        if not fields.for_function or _is_text(answer):
            answers = _answers(answer, name) if isinstance(answer, list) else ()
            answer = answers[0] if answers else _text(answer, name)
    metadata = _from_text(entry.get("metadata"))
    metadata = metadata if isinstance(metadata, dict) else {}
    tools = _tools(entry.get("tools"))
    if any("parameters" in each for each in _tools(entry.get("functions")) or []):
        raise DataError("has functions; give them as tools")
    columns: dict[str, Any] = {}
    if fields.for_function or fields.keeps_entries:  # a conversation is given without its answer
        columns = {**entry, "prompt": messages} if isinstance(asked, list) else entry
    if missing := [column for column in fields.columns if column not in columns]:
        raise DataError(
            f"has no field {missing[0]}, which is a parameter of the reward function; give the "
            f"parameter a default, or name a field: {', '.join(columns)}"
        )
    read = question, messages, answer, metadata, location, tools, answers, columns
    return Problem(*read, given=given)


def _name(entry: dict[str, Any], given: str, usual: tuple[str, ...], required: bool) -> str:
    """Return the name of the field to read: the given one, or the first usual one with a value."""
    if given and (required or _look_up(entry, given) is not None):
        return given
    # A parquet row has every column; None marks those without a value.
    return next((name for name in usual if _look_up(entry, name) is not None), usual[0])


def _look_up(entry: dict[str, Any], name: str) -> Any:
    """Return the value of a field, or of `field.field`; None if the entry does not have it."""
    if name in entry:
        return entry[name]
    value: Any = entry
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _value(entry: dict[str, Any], name: str, key: str, missing: type[DataError] = DataError) -> Any:
    value = _look_up(entry, name)
    if _is_missing(value):
        raise missing(
            f"{name} is missing or empty; the entry has {', '.join(entry) or 'nothing'} (name "
            f"another field with {key}=)"
        )
    return value


def _is_missing(value: Any) -> bool:
    """Return whether it is nothing, blank, or NaN: what pandas puts where a column has a gap."""
    is_blank = isinstance(value, str) and not value.strip()
    return value is None or is_blank or (isinstance(value, float) and math.isnan(value))


def _say(messages: list[dict[str, Any]], value: Any) -> bool:
    """Return whether messages repeat a value: all texts of a list, as those of choices."""
    if isinstance(value, list | dict):
        parts = value.values() if isinstance(value, dict) else value
        return all(_say(messages, each) for each in parts)
    return _is_missing(value) or any(str(value).strip() in each["content"] for each in messages)


def _is_text(value: Any) -> bool:
    """Return whether a value can be read as a text, or as a list of texts."""
    if isinstance(value, list):
        return not any(isinstance(each, list) for each in value) and all(map(_is_text, value))
    return isinstance(value, str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _answers(values: list[Any], field: str) -> tuple[str, ...]:
    if not values:
        raise Incomplete(f"{field} is an empty list; expected at least one answer")
    return tuple(_text(each, f"{field}[{number}]") for number, each in enumerate(values))


def _messages(value: Any, field: str, ignores_media: bool) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        text = _text(value, field)
        if _TEXT_OF_MESSAGES.match(text):
            raise DataError(
                f"{field} is a text with a list of chat messages in it; expected the list itself, "
                "or the question"
            )
        return [{"role": "user", "content": text}]
    if not value or not all(isinstance(message, dict) for message in value):
        raise DataError(f"{field} is a list, but not of chat messages, each with role and content")
    return [_message(each, f"{field}[{n}]", ignores_media) for n, each in enumerate(value)]


# A list of messages as JSON, or as Python prints it into a CSV file.
_TEXT_OF_MESSAGES = re.compile(r"""\s*(\[?\s*\{\s*["'](role|content)|\[\s*\{\s*["']from)["']\s*:""")


def _message(message: dict[str, Any], field: str, ignores_media: bool) -> dict[str, Any]:
    """Return a chat message as `read_message` does, with a role and a text."""
    message = _without_none(message)
    if "from" in message and "role" not in message:  # ShareGPT's
        role = message.pop("from")
        message["role"] = {"human": "user", "gpt": "assistant"}.get(role, role)
        message["content"] = message.pop("value", None)
    message["role"] = role = _text(message.get("role"), f"{field}.role")
    content = message.get("content")
    if isinstance(content, list):
        texts = [part for part in content if not (isinstance(part, dict) and _media(part))]
        if ignores_media:
            message["content"] = texts
        elif len(texts) < len(content):
            raise DataError(f"{field}.content has an image, audio or video; {_TEXT_ONLY}")
    elif not isinstance(content, str | None):
        message["content"] = _text(content, f"{field}.content")
    if not ignores_media and (name := _media(message)):
        raise DataError(f"{field} has the field {name}; {_TEXT_ONLY}")
    try:
        message = read_message(message)
    except ValueError as error:
        raise DataError(f"{field}: {error}") from None
    may_be_empty = role in ("system", "developer", "tool") or "tool_calls" in message
    if message["content"].strip() or not may_be_empty:
        message["content"] = _text(message["content"], f"{field}.content")
    return message


_TEXT_ONLY = "the policy reads text; prompts.ignore_media=true leaves images, audio and video out"
_MEDIA = re.compile(
    r"(input_)?(image|img|picture|photo|frame|audio|video)s?_?\d*(_(url|path|file|base64)s?)?"
)


def _media(fields: dict[str, Any]) -> str:
    """Return the field of an entry, message or part that is an image, audio or video.

    Its name says so, or its value: bytes, or a file as the library `datasets` keeps it. A part of a
    message says it in its `type`. Empty: there is none.
    """
    for name, value in fields.items():
        first = value[0] if isinstance(value, list) and value else value
        is_file = isinstance(first, bytes)
        is_file |= isinstance(first, dict) and first.keys() == {"bytes", "path"}
        is_media = value and isinstance(value, str | list | dict) and _MEDIA.fullmatch(name)
        if is_file or is_media:
            return name
    kind = fields.get("type")
    return "type" if isinstance(kind, str) and _MEDIA.fullmatch(kind) else ""


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of an entry: objects, or their JSON; None for anything else."""
    value = _from_text(value)
    value = [value] if isinstance(value, dict) else value
    is_tools = isinstance(value, list) and value and all(isinstance(tool, dict) for tool in value)
    return _without_none(value) if is_tools else None


def _from_text(value: Any) -> Any:
    """Return what a text says as JSON; None if it says nothing; anything else as it is."""
    try:
        return from_json(value, "", "") if isinstance(value, str) else value
    except DataError:
        return None


def _without_none(value: Any) -> Any:
    """Return JSON without fields that are None: a parquet row has the fields of all its rows."""
    if isinstance(value, dict):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _text(value: Any, field: str) -> str:
    if _is_missing(value):
        raise DataError(f"{field} is missing or empty; expected a non-empty string")
    if _is_number(value):
        return _number(value, field)
    if not isinstance(value, str):
        names = value if isinstance(value, dict) and "[" not in field else ()
        parts = ", ".join(f"{field}.{name}" for name in names)
        raise DataError(
            f"{field} is a {type(value).__name__}; expected a string or a number"
            + (f", such as {parts}" if parts else "")
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{field} is not Unicode text ({error.reason})") from error
    return value


def _number(value: int | float | Decimal, field: str) -> str:
    """Return a number as a plain decimal: 27 for 27.0, 0.00001 for 1e-05."""
    if not math.isfinite(value):
        raise DataError(f"{field} is {value}; expected text or a finite number")
    text = format(Decimal(str(value)), "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
