"""Checks of an agent before anything starts."""

import dataclasses
from pathlib import Path
from typing import Any

from qurl_megatron.config.schema import ConfigError, SamplingConfig
from qurl_megatron.model.architecture import Architecture


def check(config: SamplingConfig, architecture: Architecture, section: str, given: str) -> None:
    """Check that settings of agents come with an agent, and that its episodes have room.

    Args:
        section: what stands before its fields in error messages, such as `rollout.`.
        given: the first setting, with its value.

    Raises:
        ConfigError: the agent is missing or a length is wrong; the message names the field.
    """
    if not config.agent:
        raise ConfigError(f"{given}: there is no agent; give {section}agent, or leave it out")
    positions, longest = architecture.max_position_embeddings, config.max_episode_tokens
    if longest > positions:
        raise ConfigError(
            f"{section}max_episode_tokens={longest}: the model has {positions} positions; set it "
            f"to {positions} or less"
        )
    if 0 < longest <= config.max_prompt_length:
        raise ConfigError(
            f"{section}max_episode_tokens={longest}: a prompt of {section}max_prompt_length="
            f"{config.max_prompt_length} leaves no room for a turn; set it higher"
        )


def load(config: SamplingConfig, model: str | Path, tokenizer: Any, section: str = "") -> str:
    """Check that the agent can be loaded; return a line that says whether it can use chats.

    Raises:
        ConfigError: it cannot; the text says why.
    """
    from qurl_megatron.extensions.agents.calls import form_of
    from qurl_megatron.extensions.agents.chat import check_template
    from qurl_megatron.extensions.agents.pool import Agents  # imports torch
    from qurl_megatron.model.chat_template import TemplateError

    with Agents(dataclasses.replace(config, agent_workers=1), model) as agents:
        try:
            agents.wait_ready()
        except ConfigError as error:
            raise ConfigError(f"{section}{error}") from None
    try:
        check_template(tokenizer)
        limit = "" if form_of(tokenizer) else ", without tools: it writes none that are read"
        return f"policy.chat: can be used with this chat template{limit}\n"
    except TemplateError as error:
        return f"policy.chat: cannot be used: {error}\n"
