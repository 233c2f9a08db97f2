"""Checks of PPO's critic: its layout, its optimizer and its model."""

from collections.abc import Iterator
from pathlib import Path

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.validate import check_layout, check_lengths, wrong_schedule
from qurl_megatron.model.architecture import Architecture, ArchitectureError


def wrong_critic(config: Config, policy: Architecture) -> Iterator[str]:
    """Yield what is wrong with PPO's critic."""
    critic, rollout = config.critic, config.rollout
    layout = critic.layout(config.learner)
    if layout.world_size != config.learner.world_size:
        yield (
            f"critic.tensor_parallel_size={layout.tensor_parallel_size}: with "
            f"{layout.pipeline_parallel_size} pipeline stages it does not divide the policy's "
            f"{config.learner.world_size} ranks"
        )
    yield from wrong_schedule(critic.optimizer, "critic.optimizer")
    parts = critic.optimizer.minibatches_per_step * layout.data_parallel_size
    completions = [rollout.at(first).completions_per_step for first in (1, *rollout.stages)]
    for uneven in (count for count in completions if count % parts):
        yield (
            f"critic.optimizer.minibatches_per_step={critic.optimizer.minibatches_per_step}: a "
            f"step's {uneven} completions do not divide into minibatches x "
            f"{layout.data_parallel_size} data-parallel ranks of the critic"
        )
    directory = Path(critic.model or config.model)
    try:
        architecture = Architecture.from_directory(directory)
        check_layout(architecture, layout)
    except ArchitectureError as error:
        yield f"critic: {error}"
    else:
        if architecture.vocab_size != policy.vocab_size:
            yield (
                f"critic.model={directory}: has a vocabulary of {architecture.vocab_size} "
                f"tokens, the policy one of {policy.vocab_size}; they must be equal"
            )
        try:
            check_lengths(rollout, architecture)
        except ConfigError as error:
            yield f"critic.model={directory}: {error}"
