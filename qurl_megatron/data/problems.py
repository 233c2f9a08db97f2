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

import contextlib
import csv
import dataclasses
import difflib
import glob
import gzip
import io
import itertools
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from qurl_megatron.algorithm.score import Question, texts_of
from qurl_megatron.config.schema import Config, ReadingConfig, Unusable
from qurl_megatron.data.rewards import each_of, names_for, of_set
from qurl_megatron.data.scoring import unverifiable
from qurl_megatron.data.verifiers import has_other_words, reasoning_gym_tasks
from qurl_megatron.model.chat_template import read_message
from qurl_megatron.model.repository import refuse_address, repository_of, snapshot_of

REASONING_GYM = "reasoning_gym:"
QUESTION_FIELDS = ("question", "prompt", "problem")
DEFAULT_TASK_SIZE = 5000
ROWS_AT_ONCE = 1000  # of an Arrow table that become Python objects
# Files that say which config of a dataset has which files.
_CARD = ("README.md", ".huggingface.yaml", "dataset_infos.json")
# ORG/NAME or the path of a snapshot, @REVISION, :CONFIG:SPLIT, @REVISION
_HUB_DATA = re.compile(r"([^:@]+)(?:@([^:@]+))?((?::[^:@]+){0,2})(?:@([^:@]+))?")
MAX_DEPTH = 100  # of lists and objects in JSON; pickling metadata ends at a few hundred

Entries = Iterator[tuple[str, Any]]
"""The location of each entry, for messages, and the entry, which should be an object."""


class DataError(ValueError):
    """Data that cannot be used; the text says where, what is wrong and what would be right."""


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

    @property
    def asked(self) -> Question:
        """What a verifier learns of the problem."""
        return Question(self.question, self.answer, self.metadata, self.answers, self.columns)


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
        for entry in (
            _generate(part.removeprefix(REASONING_GYM), options, seed)
            if part.startswith(REASONING_GYM)
            else _read(part)
        )
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


# Sources: each yields entries.


def _generate(task: str, options: Mapping[str, Any], seed: int) -> Entries:
    import reasoning_gym

    tasks = reasoning_gym_tasks()
    if task not in tasks:
        raise DataError(f"{REASONING_GYM}{task}: no such task;{_suggestion(task, tasks)}")
    _, config_class = tasks[task]
    known = [field.name for field in dataclasses.fields(config_class)]
    for option in options:
        if option not in known:
            raise DataError(
                f"prompts.options.{option}: reasoning_gym's {task} has no such option;"
                f"{_suggestion(option, known)}"
            )
    options = {"size": DEFAULT_TASK_SIZE, "seed": seed, **options}
    wholes = {"size": "a whole number from 1, such as 10000", "seed": "a whole number, such as 7"}
    for option, right in wholes.items():
        value = options[option]  # a seed of None would be another one in each process
        if type(value) is not int or (option == "size" and value < 1):
            raise DataError(f"prompts.options.{option}={value}: must be {right}")
    try:
        entries = reasoning_gym.create_dataset(task, **options)
        for index in range(len(entries)):  # a task may look at its options only here
            yield f"{REASONING_GYM}{task} entry {index}", entries[index]
    except Exception as error:  # the library's own checks: AssertionError, TypeError, ValueError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{REASONING_GYM}{task} with {options}: {reason}") from error


def _suggestion(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    matches = difflib.get_close_matches(name, known, n=3)
    return f" did you mean {', '.join(matches)}?" if matches else f" known are {', '.join(known)}"


def parts_of(data: str) -> list[str]:
    """Return the sources that a text names: itself, or several between commas."""
    if _place(data):  # its name may have a comma
        return [data]
    return [part.strip() for part in data.split(",") if part.strip()]


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


def _local(data: str, commits: Mapping[str, str]) -> str:
    refuse_address(data)
    match = _HUB_DATA.fullmatch(data)
    if not match or data.startswith(REASONING_GYM):
        return data
    name, before, names, after = match.groups(default="")
    if _reader(Path(name)) or (before and after):
        return data
    from qurl_megatron.model import downloads

    revision = f"@{before or after}" if before or after else ""
    known = snapshot_of(f"{name}{revision}")
    # The files of a snapshot may be only a part of it.
    if _place(data) and not (known and downloads.is_listed(known, "dataset")):
        return data
    repository = repository_of(f"{name}{revision}", commits.get(name, ""))
    if repository is None:
        return data
    snapshot = downloads.download(repository, "dataset", _CARD)
    commit = snapshot_of(str(snapshot)) or repository
    with tempfile.TemporaryDirectory(prefix="qurl-data-") as scratch:
        # The library finds the files of a config by names alone, so empty files will do.
        for file in downloads.listed(commit, "dataset"):
            (Path(scratch) / file).parent.mkdir(parents=True, exist_ok=True)
            (Path(scratch) / file).touch()
        for file in _CARD:
            if (snapshot / file).is_file():
                shutil.copyfile(snapshot / file, Path(scratch) / file)
        title, splits, rest = _config_files(Path(scratch), names.split(":")[1:], name + revision)
        _choose_split(splits, rest, title)
        files = [os.path.relpath(file, scratch) for split in splits.values() for file in split]
    downloads.download(commit, "dataset", [*_CARD, *map(glob.escape, files)])
    if not snapshot_of(name):
        print(f"qurl: {data} is {snapshot}{names}", file=sys.stderr)
    return f"{snapshot}{names}"


def _place(data: str) -> tuple[Path, list[str]] | None:
    """Return the path that a source names, and the names after it; None if it does not exist."""
    if Path(data).is_file():
        return Path(data), []
    words = data.split(":")
    for length in range(len(words), max(len(words) - 3, 0), -1):
        directory, names = ":".join(words[:length]), words[length:]
        # DIR, DIR:SPLIT or DIR:CONFIG, DIR:CONFIG:SPLIT; a comma is between two sources.
        if directory and "," not in "".join(names) and Path(directory).is_dir():
            return Path(directory), names
    return None


def _read(data: str) -> Entries:
    place = _place(data)
    if place is None:
        files = sorted(map(Path, glob.glob(data, recursive=True)))
        if not files:
            nothing = (
                "no file's name matches" if glob.has_magic(data) else "no such file or directory"
            )
            raise DataError(f"{data}: {nothing}")
        return itertools.chain.from_iterable(map(_read_file, filter(Path.is_file, files)))
    path, names = place
    return _read_directory(path, names) if path.is_dir() else _read_file(path)


def _reader(path: Path) -> Callable[[Path], Entries] | None:
    """Return what reads a file of this name; None if nothing does."""
    if path.suffix == ".gz" and path.stem.endswith(_TEXTS):
        path = path.with_suffix("")
    return _READERS.get(path.suffix)


def _read_file(path: Path) -> Entries:
    reader = _reader(path)
    if reader is None:
        raise DataError(
            f"{path}: unsupported; expected a {', '.join(_READERS)} or .jsonl.gz file, a dataset "
            f"directory or {REASONING_GYM}TASK"
        )
    try:
        yield from reader(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"{path}: not a whole gzip file ({error}); copy it again, or without .gz if it is text"
        ) from error


def _read_jsonl(path: Path) -> Entries:
    number = 0
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                location = f"{path} line {number}"
                if line.strip():
                    encoded = line.encode(errors="surrogateescape")  # with any wrong bytes
                    yield location, _from_json(encoded, location, "one object per line")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} line {number + 1}: not text ({error})") from error


def _open(path: Path, newline: str = "\n") -> TextIO:
    """Open a file of text, which is in UTF-8, UTF-16 or UTF-32, with a byte order mark or not.

    By default its lines end with a line feed only: the other separators can be inside a JSON
    string. Bytes that are not UTF-8 become surrogates.
    """
    with _open_bytes(path) as file:
        encoding = json.detect_encoding(file.read(4))
    return io.TextIOWrapper(_open_bytes(path), encoding, "surrogateescape", newline)


def _open_bytes(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _read_json(path: Path) -> Entries:
    with _open(path) as file:
        is_list = file.read(64).lstrip()[:1] == "["
    if not is_list:
        yield from _read_jsonl(path)
        return
    with _open_bytes(path) as whole:
        entries = _from_json(whole.read(), str(path), "a list of objects")
    for number, entry in enumerate(entries, start=1):
        yield f"{path} entry {number}", entry


def _read_csv(path: Path) -> Entries:
    csv.field_size_limit(sys.maxsize)
    number = 0
    mark, separator = ("\t", "tab") if ".tsv" in path.suffixes else (",", "comma")
    try:
        with _open(path, newline="") as file:
            rows = csv.reader(file, delimiter=mark, strict=True)
            names = next(rows, [])
            number = rows.line_num
            "".join(names).encode()  # finds bytes that were not UTF-8
            if len(names) == 1 and (other := re.search("[;,\t|]", names[0])):
                raise DataError(
                    f"{path}: its first line has {other[0]!r} between names; expected a {separator}"
                )
            if len({*names}) < len(names):
                raise DataError(f"{path}: its first line must name each column, and no two alike")
            for cells in filter(None, rows):
                number = rows.line_num
                "".join(cells).encode()
                if len(cells) != len(names):
                    raise DataError(
                        f"{path} line {number}: has {len(cells)} cells, and the first line "
                        f"{len(names)}; a cell with a comma or a line break needs quotes"
                    )
                yield f"{path} line {number}", dict(zip(names, cells, strict=True))
    except UnicodeEncodeError as error:
        raise DataError(f"{path} line {number}: not UTF-8; save the file in it") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path} line {number + 1}: not readable as CSV ({error})") from error


def _from_json(text: str | bytes, location: str, expected: str) -> Any:
    """Return the value of JSON text; may raise DataError."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
        is_deep = _depth(value) > MAX_DEPTH
    except RecursionError:
        is_deep = True
    except ValueError as error:  # also raised for bytes that are not UTF-8
        raise DataError(f"{location}: not JSON ({error}); expected {expected}") from error
    if is_deep:
        raise DataError(f"{location}: nested more than {MAX_DEPTH} deep; expected {expected}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError if a field is given twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        )
        raise ValueError(f"the field {twice} is given twice")
    return fields


def _depth(value: Any) -> int:
    """Return how deep lists and objects are nested; raise RecursionError beyond some hundreds."""
    parts = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, parts), default=0) if isinstance(value, list | dict) else 0


def _read_parquet(path: Path) -> Entries:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for rows in file.iter_batches():
                for entry in _entries(rows):
                    number += 1
                    yield f"{path} row {number}", entry
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as parquet after row {number} ({error})") from error


def _entries(rows: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow table or batch."""
    narrow = [field for field in rows.schema if "float" in str(field.type)]  # 64 bits are "double"
    for entry in rows.to_pylist():
        yield entry | {field.name: _shortest(entry[field.name], field.type) for field in narrow}


def _shortest(value: Any, arrow_type: Any) -> Any:
    """Return a value with floats of 16 or 32 bits as the shortest decimals of their own type.

    Arrow gives 0.10000000149011612 for 0.1 in 32 bits.
    """
    import pyarrow.types

    if value is None:
        return None
    if pyarrow.types.is_float32(arrow_type) or pyarrow.types.is_float16(arrow_type):
        return float(str(arrow_type.to_pandas_dtype()(value)))
    if pyarrow.types.is_struct(arrow_type):
        return {field.name: _shortest(value[field.name], field.type) for field in arrow_type}
    if isinstance(value, list):
        return [_shortest(each, arrow_type.value_type) for each in value]
    return value


_READERS: dict[str, Callable[[Path], Entries]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
_TEXTS = (".jsonl", ".json", ".csv", ".tsv")  # which may be compressed


def _read_directory(directory: Path, names: list[str]) -> Entries:
    """Read one split of a Hugging Face dataset; `names` are as for `_config_files`."""
    if not any((directory / name).is_file() for name in ("dataset_dict.json", "state.json")):
        title, splits, rest = _config_files(directory, names, str(directory))
        for shard in splits[_choose_split(splits, rest, title)]:
            yield from _read_file(Path(shard))
        return
    import datasets  # takes seconds: imported only where it is used

    with _as_data_error(str(directory)):
        saved = datasets.load_from_disk(directory)
        by_name = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        name = _choose_split(by_name, names, str(directory))
        batches = by_name[name].with_format("arrow").iter(ROWS_AT_ONCE)
        rows = (entry for batch in batches for entry in _entries(batch))
        for number, entry in enumerate(rows, start=1):
            yield f"{directory} split {name} row {number}", entry


def _config_files(
    directory: Path, names: list[str], title: str
) -> tuple[str, Mapping[Any, list[str]], list[str]]:
    """Return a config's title, its files by split, and the `names` that are left for a split.

    The library finds the files, by their names and the README.md. `names` are those after the
    directory: a config, a split, both or none. `title` is the user's name for the dataset.
    """
    import datasets  # takes seconds: imported only where it is used

    with _as_data_error(title):
        config = _choose_config(directory, names, title)
        if names[:1] == [config]:
            title, names = f"{title}:{config}", names[1:]
        with tempfile.TemporaryDirectory(prefix="qurl-data-") as cache:
            shards = datasets.load_dataset_builder(str(directory), config, cache_dir=cache)
        return title, shards.config.data_files or {}, names


@contextlib.contextmanager
def _as_data_error(title: str) -> Iterator[None]:
    """Turn any exception of the library `datasets` into a DataError of one line."""
    # The library's log messages repeat its exceptions.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # the library raises many kinds
        reason = " ".join(str(error).split())
        raise DataError(
            f"{title}: not the directory of one dataset ({reason}); give the directory of one"
        ) from error


def _choose_config(directory: Path, names: list[str], title: str) -> str:
    """Return the config that `names` begins with, or the default one; may raise DataError."""
    import datasets

    configs = datasets.get_dataset_config_names(str(directory))
    if names and names[0] in configs:
        return names[0]
    default = datasets.get_dataset_default_config_name(str(directory))
    if default is None or len(names) == 2:
        given = f"no config {names[0]!r}" if names else "several configs"
        raise DataError(
            f"{title}: has {given}; name one of {', '.join(configs)} as {title}:{configs[0]}"
        )
    return default


def _choose_split(splits: Mapping[Any, Any], names: list[str], dataset: str) -> Any:
    """Return the key of the split in `names`, or of the default split; may raise DataError."""
    known = [str(split) for split in splits]
    name = ":".join(names) or (known[0] if len(known) == 1 else "train")
    if name not in known:
        raise DataError(
            f"{dataset}: has no split {name!r}; name one of {', '.join(known)} as "
            f"{dataset}:{known[0]}"
        )
    return list(splits)[known.index(name)]


# From an entry to a problem.


def _problem(entry: Any, location: str, fields: Fields) -> Problem:
    if not isinstance(entry, dict):
        raise DataError(f"a JSON {type(entry).__name__}; expected an object")
    conversations = ("messages", "conversations")
    name = _name(entry, fields.question, (*QUESTION_FIELDS, *conversations), fields.required)
    beside = [each for each in ("input", "context") if not _is_missing(entry.get(each))]
    if name == "instruction" and beside:
        raise DataError(
            f"has an instruction and {beside[0]}; join them in one field, such as question"
        )
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
            f"has {name} and {also[0]}, which differ; ask one with prompts.question_key={name}"
        )
    messages = _messages(asked, name, fields.ignores_media)
    if name == "conversations" and not _is_missing(entry.get("system")):
        messages.insert(0, {"role": "system", "content": _text(entry["system"], "system")})
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
    answer: Any = None
    if last and not fields.answer and _look_up(entry, name) is None:
        answer = last
    elif not fields.without_answer:
        answer = _value(entry, name, "prompts.answer_key", Incomplete)
        if not fields.for_function or _is_text(answer):
            answers = _answers(answer, name) if isinstance(answer, list) else ()
            answer = answers[0] if answers else _text(answer, name)
    metadata = entry.get("metadata")
    if not isinstance(metadata, dict | None):
        raise DataError(f"metadata is a {type(metadata).__name__}; expected an object")
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
    return Problem(question, messages, answer, metadata or {}, location, tools, answers, columns)


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
    if isinstance(value, str):
        try:
            value = _from_json(value, "tools", "a list of objects")
        except DataError:
            return None
    value = [value] if isinstance(value, dict) else value
    is_tools = isinstance(value, list) and value and all(isinstance(tool, dict) for tool in value)
    return _without_none(value) if is_tools else None


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
        parts = ", ".join(f"{field}.{name}" for name in value) if isinstance(value, dict) else ""
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
