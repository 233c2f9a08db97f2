"""Prompts: turn problems into tokens, split off the held-out ones, and serve them in order.

    tokenize         [Problem] -> [Prompt]
    split_held_out   [Prompt] -> those to train on, those held out
    load_prompts     all prompts of a run, for training and evaluation
    PromptStream     [Prompt] -> the prompts of each step, resumable

Invariants:
- Whether a question is held out depends on its text alone: not on the machine, the seed, its line
  or the other questions. Questions that differ only in case or spacing are on the same side.
- No question that a run is evaluated on is trained on, whatever its case and spacing.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jinja2

from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import Config
from qurl_megatron.data.problems import DataError, Problem, find_unverifiable, read_problems


class PromptSet(NamedTuple):
    """The prompts of a run. No question to train on is also evaluated on."""

    train: list[Prompt]
    held_out: list[Prompt]
    files: dict[str, list[Prompt]]  # prompts of evaluation.data, by name
    notes: list[str] = []  # noqa: RUF012  # lines on problems that no response could be right for


def load_prompts(config: Config, tokenizer: Any) -> PromptSet:
    """Read, tokenize and split the data of a run.

    Problems whose answer the verifier cannot read are left out of `config.data`. They stay in
    `config.evaluation.data`, so that scores are over the whole file.

    Raises:
        DataError: the data cannot be used, or no problem is left to train on.
    """
    notes: list[str] = []

    def prompts(data: str, options: Mapping[str, Any], *, drop: bool) -> list[Prompt]:
        problems = read_problems(data, options, seed=config.seed)
        problems, note = without_unverifiable(problems, data, config, drop=drop)
        notes.extend([note] * bool(note))
        return tokenize(problems, tokenizer, config.rollout.max_prompt_length)

    train, held_out = split_held_out(
        prompts(config.data, config.data_options, drop=True), config.evaluation.held_out_fraction
    )
    files = {name: prompts(data, {}, drop=False) for name, data in config.evaluation.data.items()}
    evaluated = {_normalize(prompt.question) for file in files.values() for prompt in file}
    train = [prompt for prompt in train if _normalize(prompt.question) not in evaluated]
    if not train:
        raise DataError(f"{config.data}: every problem to train on is in evaluation.data too")
    return PromptSet(train, held_out, files, notes)


def without_unverifiable(
    problems: list[Problem], data: str, config: Config, *, drop: bool
) -> tuple[list[Problem], str]:
    """Return the problems to use, and a line on those whose answer the verifier cannot read.

    With `drop` they are left out. Without it they stay, and only a response with the very text of
    the answer can be right.

    Raises:
        DataError: the verifier can read no answer.
    """
    reasons = find_unverifiable(problems, config)
    if not reasons:
        return problems, ""
    location, reason = next(iter(reasons.items()))
    effect = "are left out" if drop else "stay in, and only their very text is right"
    note = (
        f"{data}: {len(reasons):,} of {len(problems):,} problems {effect}, because reward "
        f"{config.reward} cannot compare their answers; the first is {location}: {reason}"
    )
    if drop:
        problems = [problem for problem in problems if problem.location not in reasons]
    return problems, note


def tokenize(problems: Iterable[Problem], tokenizer: Any, max_prompt_length: int) -> list[Prompt]:
    """Return the prompts that the policy continues, in the order of `problems`.

    A tokenizer with a chat template renders the messages and opens the assistant's turn. Without a
    template, the prompt is the text of the question.

    Raises:
        DataError: a prompt is longer than `max_prompt_length` tokens, the tokenizer has no template
            for a chat, or the template refuses it.
    """
    return [_tokenize(problem, tokenizer, max_prompt_length) for problem in problems]


def _tokenize(problem: Problem, tokenizer: Any, max_prompt_length: int) -> Prompt:
    if getattr(tokenizer, "chat_template", None):
        try:
            text = tokenizer.apply_chat_template(
                problem.messages, add_generation_prompt=True, tokenize=False
            )
        except jinja2.TemplateError as error:
            raise DataError(
                f"{problem.location}: the chat template refuses it ({error})"
            ) from error
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif [message["role"] for message in problem.messages] == ["user"]:
        token_ids = tokenizer(problem.question)["input_ids"]
    else:
        raise DataError(
            f"{problem.location}: a chat of {len(problem.messages)} messages, and the tokenizer "
            "has no chat template; without one, only a single user message can be used"
        )
    if len(token_ids) > max_prompt_length:
        raise DataError(
            f"{problem.location}: the prompt has {len(token_ids)} tokens, more than "
            f"max_prompt_length {max_prompt_length}; raise it or drop the problem"
        )
    identity = hashlib.sha256(problem.question.encode()).hexdigest()[:16]
    return Prompt(identity, problem.question, problem.answer, list(token_ids), problem.metadata)


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


def _hash(question: str) -> float:
    """Return a number in [0, 1) that depends on the question, but not on its case and spacing."""
    digest = hashlib.sha256(_normalize(question).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _normalize(question: str) -> str:
    return " ".join(question.casefold().split())


class PromptStream:
    """An endless stream of prompts: every epoch serves all of them once, in a new order.

    Prompts are numbered from 0 in the order of the stream: these are their ordinals. Which prompt
    an ordinal stands for depends only on `seed` and the prompts, so the state is small.
    """

    def __init__(self, prompts: list[Prompt], seed: int) -> None:
        if not prompts:
            raise DataError("a prompt stream needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self.position = 0  # ordinal of the next prompt
        self._shuffle(epoch=0)

    def prompt(self, ordinal: int) -> Prompt:
        """Return the prompt with this ordinal, wherever the stream stands."""
        epoch, index = divmod(ordinal, len(self._prompts))
        if epoch != self._epoch:
            self._shuffle(epoch)
        return self._prompts[self._order[index]]

    def next(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, crossing the end of an epoch if necessary."""
        first, self.position = self.position, self.position + count
        return [self.prompt(ordinal) for ordinal in range(first, self.position)]

    def state(self) -> dict[str, Any]:
        """Return the position in the stream, for a checkpoint: numbers and a string."""
        epoch, index = divmod(self.position, len(self._prompts))
        return {
            "seed": self._seed,
            "epoch": epoch,
            "position": index,
            "prompts": self._fingerprint(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`.

        Raises:
            DataError: the state belongs to other prompts.
        """
        if state["prompts"] != self._fingerprint():
            raise DataError(
                f"the checkpoint was saved with other prompts than these {len(self._prompts)}; "
                "resume with the same data and data_options"
            )
        self._seed = state["seed"]
        self.position = state["epoch"] * len(self._prompts) + state["position"]
        self._shuffle(state["epoch"])

    def _shuffle(self, epoch: int) -> None:
        """Draw the order of an epoch."""
        self._epoch = epoch
        self._order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}/{epoch}").shuffle(self._order)

    def _fingerprint(self) -> str:
        ids = "".join(prompt.id for prompt in self._prompts)
        return hashlib.sha256(ids.encode()).hexdigest()[:16]
