"""Prompts: turn problems into tokens, split off the held-out ones, and serve them in order.

Invariants:
- Whether a question is held out depends on its text alone: not on the machine, the seed, its line
  or the other questions. Questions that differ only in case, spacing or Unicode form (é as one
  character or two) are on the same side.
- No question that a run is evaluated on is trained on, whatever its case and spacing.
"""

import hashlib
import math
import random
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.algorithm.score import texts_of
from qurl_megatron.config.schema import Config, Overlong
from qurl_megatron.data.entries import DataError, parts_of
from qurl_megatron.data.problems import Fields, Problem, Source, keep_verifiable, read_problems
from qurl_megatron.data.rewards import is_user_function, of_set, reads_entries
from qurl_megatron.model.chat_template import TemplateError, knows_developer, render
from qurl_megatron.model.tokenizer import (
    end_tokens,
    opens_turn,
    turn_begin,
    what_differs,
    without_end,
)

DRAWN = 64  # prompts that stand for all, such as those by which smoothing chooses its scales
BINS = 8
COMPARED_PROMPTS = 32  # on which transformers' own choice of tokenizer is tried too
BAR_WIDTH = 40  # characters of the longest bar
SHOWN_CHARACTERS = 2000  # of a prompt; the middle of a longer one is left out


class PromptSet(NamedTuple):
    """The prompts of a run. No question to train on is also evaluated on."""

    train: list[Prompt]
    held_out: list[Prompt]
    files: dict[str, list[Prompt]]  # prompts of evaluation.data, by name
    sources: dict[str, Source] = {}  # what was read and dropped, by name of file; "": training


def load_prompts(
    config: Config, tokenizer: Any, columns: Mapping[str, Collection[str]] = {}
) -> PromptSet:
    """Read, tokenize and split the data of a run.

    Its entries must have the fields `columns`, as `check_rewards` returns them.

    Problems whose answer the verifier cannot read are left out of `config.data`. So are prompts
    that are too long, if `config.prompts.overlong` says so. In `config.evaluation.data` such
    problems stay and such prompts are refused, so that a score is over the whole file.

    Raises:
        DataError: the data cannot be used, or no problem is left to train on.
    """
    has_agent, how = bool(config.rollout.agent), config.prompts

    def read(data: str, options: Mapping[str, Any], name: str = "") -> Source:
        scored = of_set(config, name)
        fields = Fields.of(
            how,
            required=not name,
            for_function=is_user_function(scored) or has_agent,
            keeps_entries=reads_entries(scored),
            columns=() if has_agent else columns.get(name, columns.get("", ())),
        )
        return read_problems(data, options, seed=config.seed, fields=fields)

    num_parts = len(parts_of(config.data))
    if len(how.weights) not in (0, num_parts):
        raise DataError(
            f"prompts.weights={how.weights}: data has {num_parts} sources; give one weight for each"
        )
    sources = {"": read(config.data, how.options)}
    sources |= {name: read(data, {}, name) for name, data in config.evaluation.data.items()}
    known = {problem.asked.source for each in sources.values() for problem in each.problems}
    if unknown := next((each for each in config.scoring.by_source if each not in known), None):
        raise DataError(
            f"scoring.by_source.{unknown}: no entry has this data_source; they have "
            f"{', '.join(sorted(known - {''})) or 'none'}"
        )
    if not has_agent:  # which rewards its episodes itself
        keep_verifiable(sources, config)
    files = {
        name: tokenize(
            source,
            tokenizer,
            config.rollout.max_prompt_length,
            system_prompt=how.system_prompt,
            overlong="refuse" if name else how.overlong,
            stops=config.rollout.stop_token_ids,
        )
        for name, source in sources.items()
    }
    train, held_out = split_held_out(files.pop(""), config.evaluation.held_out)
    evaluated = {_normalize(prompt.question) for file in files.values() for prompt in file}
    kept = [prompt for prompt in train if _normalize(prompt.question) not in evaluated]
    if not kept:
        raise DataError(f"{config.data}: every problem to train on is in evaluation.data too")
    if len(kept) < len(train):
        dropped = [""] * (len(train) - len(kept))  # a prompt has no location
        sources[""].dropped["is in evaluation.data too"] += dropped
    return PromptSet(kept, held_out, files, sources)


def tokenize(
    source: Source,
    tokenizer: Any,
    max_prompt_length: int,
    *,
    system_prompt: str = "",
    overlong: Overlong = "refuse",
    stops: Iterable[int] = (),
) -> list[Prompt]:
    """Return the prompts that the policy continues, in the order of the source's problems.

    A tokenizer with a chat template renders the messages and opens the assistant's turn. Without a
    template, the prompt is the text of the question. `system_prompt` is put before the messages of
    a problem that has no system message. The source counts the prompts that `overlong` drops or
    cuts. End tokens behind a prompt are cut off; a token of `stops` is one if it is special.

    Raises:
        DataError: a prompt that is to stay whole is longer than `max_prompt_length` tokens, or all
            are; the tokenizer has no template for a chat, or the template refuses it.
    """
    prompts: list[Prompt] = []
    questions: set[str] = set()
    shortest = math.inf
    num_cut, num_renamed, ends = 0, 0, end_tokens(tokenizer, stops)
    num_truncated = 0
    longest_token = max(map(len, tokenizer.get_vocab()))  # in characters
    kept = {  # of a text or of tokens
        "truncate_left": lambda part, most: part[-most:],
        "truncate_right": lambda part, most: part[:most],
    }.get(overlong)
    for problem in source.problems:
        messages = problem.messages
        orders = [each for each in messages if each["role"] in ("system", "developer")]
        has_own = any(each["content"].strip() for each in orders)
        if system_prompt and not has_own:
            others = [each for each in messages if each not in orders]
            messages = [{"role": "system", "content": system_prompt}, *others]
        num_renamed += any(each["role"] == "developer" for each in orders)
        text = _prompt_text(problem, messages, tokenizer)
        # A tokenizer takes 1 s and 300 MB for a million characters, so it gets no more than a
        # prompt can have.
        if kept:
            text = kept(text, max_prompt_length * longest_token)
        length = len(text) // longest_token
        if length <= max_prompt_length:
            whole = _token_ids(text, tokenizer)
            token_ids = without_end(whole, tokenizer, ends)
            num_cut += token_ids != whole
            length = len(token_ids)
            if not token_ids:
                raise DataError(f"{problem.location}: its prompt is nothing but an end token")
        if kept and length > max_prompt_length:
            token_ids, length = kept(token_ids, max_prompt_length), max_prompt_length
            num_truncated += 1
        shortest = min(shortest, length)
        if length > max_prompt_length:
            if overlong == "refuse":
                raise DataError(
                    f"{problem.location}: the prompt has at least {length} tokens, more than "
                    f"max_prompt_length {max_prompt_length}; raise it or drop the problem"
                )
            reason = f"has more than {max_prompt_length:,} tokens (rollout.max_prompt_length)"
            source.dropped[reason].append(problem.location)
            continue
        source.kept_system_prompts += has_own
        # The first problem with a question is identified by the question alone.
        identity = problem.question
        if identity in questions:
            identity += "\0" + "\0".join(texts_of(problem.answer, problem.answers))
        questions.add(problem.question)
        prompts.append(
            Prompt(
                _digest(identity),
                problem.question,
                problem.answer,
                token_ids,
                problem.metadata,
                problem.answers,
                problem.columns,
                problem.part,
                problem.given,
            )
        )
    if num_cut:
        source.notes.append(f"end tokens, or a second beginning, cut off: {num_cut:,} prompts")
    if num_truncated:
        side = overlong.removeprefix("truncate_")
        source.notes.append(
            f"cut to {max_prompt_length:,} tokens, at the {side}: {num_truncated:,} prompts"
        )
    if num_renamed and not knows_developer(tokenizer):
        source.notes.append(
            f"messages of role developer, written as system: {num_renamed:,} prompts"
        )
    if not prompts and source.problems:
        raise DataError(
            f"{source.data}: every prompt has more than max_prompt_length {max_prompt_length} "
            f"tokens, the shortest {shortest}; raise rollout.max_prompt_length"
        )
    return prompts


def _prompt_text(problem: Problem, messages: list[dict[str, Any]], tokenizer: Any) -> str:
    if getattr(tokenizer, "chat_template", None):
        begin = turn_begin(tokenizer)
        if begin and any(begin in message["content"] for message in messages):
            raise DataError(
                f"{problem.location}: {begin!r} is in its text, and the chat template would write "
                "it again; give the messages, or prompts.chat_template='{{ messages[0].content }}'"
            )
        try:
            return render(tokenizer, messages, problem.tools or ())
        except TemplateError as error:
            raise DataError(f"{problem.location}: {error}") from None
    is_question = [message["role"] for message in messages] == ["user"]
    if is_question and not problem.tools and "tool_calls" not in messages[0]:
        return problem.question
    raise DataError(
        f"{problem.location}: a chat of {len(messages)} messages, or with tools, and the tokenizer "
        "has no chat template; without one, only a single user message can be used, and no "
        "prompts.system_prompt"
    )


def _token_ids(text: str, tokenizer: Any) -> list[int]:
    is_rendered = bool(getattr(tokenizer, "chat_template", None))  # with special tokens
    return list(tokenizer(text, add_special_tokens=not is_rendered)["input_ids"])


def split_held_out(
    prompts: list[Prompt], held_out_fraction: float
) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts into those to train on and those held out, about `held_out_fraction` of all.

    Raises:
        DataError: there is no prompt left to train on, or none to hold out of a positive fraction.
    """
    held_out = [prompt for prompt in prompts if _hash(prompt.question) < held_out_fraction]
    train = [prompt for prompt in prompts if _hash(prompt.question) >= held_out_fraction]
    if not train or (held_out_fraction > 0 and not held_out):
        side = "train on" if not train else "hold out"
        raise DataError(
            f"held_out_fraction {held_out_fraction} of {len(prompts)} problems leaves none to "
            f"{side}; add problems or change the fraction"
        )
    return train, held_out


def set_aside(prompts: list[Prompt], number: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return a sample of `number` prompts, or all if there are fewer, and the others.

    The hash of each question decides, so the order of the files does not matter.
    """
    sample = sorted(prompts, key=lambda prompt: _hash(prompt.question))[:number]
    ids = {prompt.id for prompt in sample}
    return sample, [prompt for prompt in prompts if prompt.id not in ids]


def _hash(question: str) -> float:
    """Return a number in [0, 1) that depends on the question, but not on how it is spelled."""
    digest = hashlib.sha256(_normalize(question).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _normalize(question: str) -> str:
    return " ".join(unicodedata.normalize("NFC", question).casefold().split())


class _Epoch(NamedTuple):
    number: int
    first: int  # ordinal of its first prompt
    order: list[int]  # numbers of its prompts

    @property
    def end(self) -> int:
        return self.first + len(self.order)


class PromptStream:
    """An endless stream of prompts: every epoch serves all of them once.

    With `weights`, it serves those of each part of the data so many times on average. `shuffle`
    gives each epoch a new order; without it, that is the order of `prompts`. With
    `retire_after`, an epoch leaves out the prompts that were `visited` with equal rewards in their
    last so many visits before it began, as long as `least` prompts are left. Only visits under the
    same settings count: under others, such as a longer limit, the rewards may differ.

    Prompts are numbered from 0 in the order of the stream: these are their ordinals. Which prompt
    an ordinal stands for depends on `seed`, the prompts, and visits before its epoch began, so the
    state is small.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        seed: int,
        *,
        shuffle: bool = True,
        weights: Sequence[float] = (),
        retire_after: int = 0,
        least: int = 1,
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._weights = weights
        self._retire_after = retire_after
        self._least = least
        self._equal: Counter[str] = Counter()  # last visits with equal rewards, by prompt's id
        self._settings: Mapping[str, Any] | None = None  # of these visits
        self._epochs: list[_Epoch] = []  # that began, from the one of `position`
        self.position = 0  # ordinal of the next prompt

    @property
    def retired(self) -> set[str]:
        """Ids of the prompts that an epoch that begins now would leave out."""
        after = self._retire_after
        return {prompt for prompt, visits in self._equal.items() if after and visits >= after}

    def visit_under(self, settings: Mapping[str, Any]) -> None:
        """Say which settings later visits have, as JSON; visits under others count no more."""
        if self._retire_after:
            if self._settings not in (None, settings):
                self._equal.clear()
            self._settings = settings

    def visited(self, prompt: Prompt, *, is_equal: bool) -> None:
        """Record whether the completions of a prompt had equal rewards."""
        if self._retire_after:
            self._equal[prompt.id] = (self._equal[prompt.id] + 1) if is_equal else 0

    def prompt(self, ordinal: int) -> Prompt:
        """Return the prompt with this ordinal, which is not before `position`."""
        while not self._epochs or self._epochs[-1].end <= ordinal:
            self._begin(self.retired, self._least)
        self._epochs = [epoch for epoch in self._epochs if epoch.end > self.position]
        epoch = next(each for each in self._epochs if ordinal < each.end)
        return self._prompts[epoch.order[ordinal - epoch.first]]

    def _begin(self, retired: set[str], least: int, number: int = 0, first: int = 0) -> None:
        """Begin the next epoch, or the first one with this number and ordinal.

        It leaves out the retired prompts if `least` others are left.
        """
        if self._epochs:
            number, first = self._epochs[-1].number + 1, self._epochs[-1].end
        draw, order = random.Random(f"{self._seed}/{number}"), list(range(len(self._prompts)))
        if self._weights:
            times = [self._weights[prompt.part] + draw.random() for prompt in self._prompts]
            order = [index for index in order for _ in range(int(times[index]))]
        if self._shuffle:
            draw.shuffle(order)
        kept = [index for index in order if self._prompts[index].id not in retired]
        self._epochs.append(_Epoch(number, first, kept if len(kept) >= least else order))

    def next(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, crossing the end of an epoch if necessary."""
        served = [self.prompt(self.position + place) for place in range(count)]
        self.position += count
        return served

    def state(self) -> dict[str, Any]:
        """Return the position in the stream, and what it depends on, as JSON."""
        self.prompt(self.position)
        ids = {prompt.id for prompt in self._prompts}
        served = [{self._prompts[index].id for index in epoch.order} for epoch in self._epochs]
        return {
            "seed": self._seed,
            "epoch": self._epochs[0].number,
            "position": self.position - self._epochs[0].first,
            "prompts": _fingerprint(self._prompts),
            "retired": [sorted(ids - each) for each in served],
            "equal": {prompt: visits for prompt, visits in self._equal.items() if visits},
            "settings": self._settings,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            DataError: the state belongs to other prompts.
        """
        check_saved(self._prompts, state)
        self._seed = state["seed"]
        self._equal = Counter(state.get("equal", {}))
        self._settings = state.get("settings")  # older checkpoints had none
        self._epochs, first = [], state["epoch"] * len(self._prompts)
        for retired in state.get("retired", [[]]):  # version 0.2 had none
            self._begin(set(retired), 0, state["epoch"], first)
        self.position = first + state["position"]


def draw(
    prompts: list[Prompt], seed: int, weights: Sequence[float] = (), count: int = DRAWN
) -> list[Prompt]:
    """Return `count` prompts, or as many as there are, as a shuffled run begins.

    So they stand for all, whether the data is sorted or not. `weights` are those of `PromptStream`.
    """
    stream = PromptStream(prompts, seed, weights=weights)
    return stream.next(min(count, len(prompts)))


def check_saved(prompts: Sequence[Prompt], state: Mapping[str, Any]) -> None:
    """Check that a `PromptStream.state` belongs to these prompts.

    Raises:
        DataError: it belongs to others.
    """
    if state["prompts"] != _fingerprint(prompts):
        raise DataError(
            f"the checkpoint was saved with other prompts than these {len(prompts)}; resume with "
            "the same data, prompts.options and reward"
        )


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    return _digest("".join(prompt.id for prompt in prompts))


def sum_of(prompts: Iterable[Prompt]) -> str:
    """Return a text that only equal prompts have, of which verifiers learn the same."""
    sums = hashlib.sha256()
    for prompt in prompts:
        sums.update(repr(prompt).encode())
    return sums.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def summarize(config: Config, prompts: PromptSet, tokenizer: Any) -> str:
    """Return the summary of what a run is about to train on, which ends with a line break.

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
    read = [*prompts.train, *prompts.held_out]
    uses = {"to train on": prompts.train, "held out": prompts.held_out}
    lines = source_lines("data", prompts.sources[""], uses)
    for name, file in prompts.files.items():
        of_file = {"to evaluate on": file}
        lines += source_lines(f"evaluation.data.{name}", prompts.sources[name], of_file)
    lines += length_lines([len(prompt.token_ids) for prompt in read])
    lines += tokenizer_lines(tokenizer, config.rollout.stop_token_ids, prompts.train)
    if config.prompts.system_prompt:
        own = sum(source.kept_system_prompts for source in prompts.sources.values())
        num_prompts = len(read) + sum(map(len, prompts.files.values()))
        lines.append(
            f"prompts.system_prompt: given to {num_prompts - own:,} prompts; {own:,} have their own"
        )
    first = prompts.train[0].token_ids
    lines.append(f"the first prompt, {len(first):,} tokens:")
    lines += quoted(tokenizer.decode(first))
    return "\n".join(lines) + "\n"


def tokenizer_lines(
    tokenizer: Any, stop_token_ids: Sequence[int], prompts: Sequence[Prompt]
) -> list[str]:
    """Return what a user should know of a tokenizer, as it is used for these prompts."""
    template = "none, a prompt is the text of its question"
    if getattr(tokenizer, "chat_template", None):
        template = "yes" if opens_turn(tokenizer) else "yes, but it opens no assistant's turn"
    ends = ", ".join(f"{tokenizer.decode([token])!r} ({token})" for token in stop_token_ids)
    questions = [prompt.question for prompt in prompts[:COMPARED_PROMPTS]]
    differs = what_differs(tokenizer, questions)
    return [
        *([differs] if differs else []),
        f"chat template: {template}",
        f"an answer ends with: {ends}",
    ]


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


def quoted(text: str) -> list[str]:
    """Return the lines of a text, without its middle if it is long.

    Control characters are escapes.
    """
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[{left_out:,} characters not shown]\n{text[-half:]}"
    readable = "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )
    return [f"  | {line}" for line in readable.split("\n")]
