"""Play a few episodes of an agent on a server started for them, and print every token."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.config.schema import ConfigError
from qurl_megatron.data.problems import Fields, read_problems
from qurl_megatron.data.prompts import tokenize
from qurl_megatron.data.rewards import absolute
from qurl_megatron.evaluation.evaluate import (
    EvalConfig,
    check_format,
    served_model,
    serving,
    settle_cache,
    settle_template,
)
from qurl_megatron.extensions.agents.checks import load
from qurl_megatron.extensions.agents.client import AgentClient
from qurl_megatron.extensions.agents.pool import Agents
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.huggingface import check_model
from qurl_megatron.model.tokenizer import load_tokenizer, stop_token_ids

SHOWN_CHARACTERS = 2000  # of a prompt, or of what was observed at once


def run(config: EvalConfig, count: int) -> None:
    """Play an episode of each of the first `count` problems; `check` accepted the settings.

    What the agent prints goes to standard error.

    Raises:
        ConfigError, ArchitectureError, DataError: an input is wrong; the server is not started.
        ServerFailed: the server died.
    """
    if not config.agent:
        raise ConfigError("agent=: missing; give FILE.py:NAME or MODULE:NAME")
    check_format(config)
    config.agent, model = absolute(config.agent), Path(config.model)
    check_model(model)
    architecture = Architecture.from_directory(model)
    settle_cache(config, model)
    how = config.prompts
    settle_template(config, model, date.today().isoformat())
    tokenizer = load_tokenizer(model, *how.template)
    load(config, model, tokenizer)
    stops = config.stop_token_ids or stop_token_ids(architecture, tokenizer)
    (data,) = config.data.values()
    fields = Fields.of(how, for_function=True)
    source = read_problems(data, how.options, seed=config.seed, fields=fields)
    prompts = tokenize(
        source, tokenizer, config.max_prompt_length, system_prompt=how.system_prompt, stops=stops
    )
    console = Console(stderr=True, highlight=False)
    with (
        tempfile.TemporaryDirectory(prefix="qurl-agent-") as scratch,
        Agents(config, model, how.template) as agents,
        serving(
            dataclasses.replace(config, output=scratch),
            served_model(config, model, Path(scratch) / "converted", prompts),
            console,
        ) as fleet,
    ):
        client = AgentClient(agents, 0.0, fleet, tokenizer, stops)
        played = prompts[:count]
        groups = client.generate(
            played,
            completions_per_prompt=1,
            temperature=config.temperature,
            top_p=config.top_p,
            max_completion_length=config.max_completion_length,
        )
    for number, (prompt, (completion,)) in enumerate(zip(played, groups, strict=True)):
        for line in describe(number, prompt, completion, tokenizer):
            print(line)


def describe(number: int, prompt: Prompt, completion: Completion, tokenizer: Any) -> Iterator[str]:
    """Yield lines that show an episode: every span, and each sampled token with its log-prob."""
    episode = completion.episode
    assert episode is not None
    how = f"{episode.end} after {len(episode.turns)} turns"
    if completion.score is None:
        how += ", no reward of its own"
    elif completion.score.failure:
        how += f": {completion.score.failure}"
    else:
        parts = {"reward": completion.score.value, **completion.score.parts}
        how += "".join(f", {name} {value:g}" for name, value in parts.items())
    yield f"episode {number}: {how}"
    yield f"  question: {_shown(prompt.question)}"
    turns = iter(episode.turns)
    for branch, sequence in enumerate(completion.sequences()):
        assert sequence.episode is not None
        prompt_ids = sequence.episode.prompt_ids
        if branch:
            yield f"  branch {branch}: another history"
        yield f"  prompt    {_text(prompt_ids, tokenizer)}"
        logprobs = iter(sequence.behaviour_logprobs)
        tokens = zip(sequence.sampled, sequence.token_ids, strict=True)
        for is_sampled, span in groupby(tokens, key=lambda each: each[0]):
            ids = [token for _, token in span]
            if not is_sampled:
                yield f"  observed  {_text(ids, tokenizer)}"
                continue
            while ids:  # consecutive turns, with nothing observed between them
                turn = next(turns)
                taken, ids = ids[: turn.length], ids[turn.length :]
                yield f"  sampled   {_text(taken, tokenizer)}"
                cached = f"{turn.cached_tokens} of {turn.context} tokens before it were cached"
                yield f"            {cached}; log-probs:"
                shown = [f"{tokenizer.decode([t])!r} {next(logprobs):.3f}" for t in taken]
                yield f"            {'  '.join(shown)}"


def _text(ids: list[int], tokenizer: Any) -> str:
    return f"{len(ids)} tokens: {_shown(tokenizer.decode(ids, skip_special_tokens=False))}"


def _shown(text: str) -> str:
    """Return a text on one line, without the middle if it is long."""
    half = SHOWN_CHARACTERS // 2
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]} [...] {text[-half:]}")
