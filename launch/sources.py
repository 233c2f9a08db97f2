"""The models, adapters and data that a run reads: their names, paths, and new places."""

from collections.abc import Callable
from pathlib import Path

from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import Given
from qurl_megatron.data.entries import REASONING_GYM, parts_of
from qurl_megatron.data.problems import local_data
from qurl_megatron.data.rewards import absolute
from qurl_megatron.model import hub
from qurl_megatron.model.repository import snapshot_of
from qurl_megatron.model.tokenizer import read_template

MODELS = ("model", "critic.model")  # the fields
DIRECTORIES = (*MODELS, "adapters.init")  # other sources are data


def sources(config: Config) -> dict[str, str]:
    """Return the models, adapters and data that a run reads, by field."""
    data = {f"evaluation.data.{name}": data for name, data in config.evaluation.data.items()}
    return {
        "model": config.model,
        "critic.model": config.critic.model,
        "adapters.init": config.adapters.init,
        "data": config.data,
        **data,
    }


def change_sources(config: Config, change: Callable[[str, str], str]) -> None:
    """Replace each of `sources` by what a function returns for field and source."""
    changed = [change(field, source) for field, source in sources(config).items()]
    config.model, config.critic.model, config.adapters.init, config.data, *data = changed
    config.evaluation.data = dict(zip(config.evaluation.data, data, strict=True))


def find_sources(config: Config, saved: Config) -> None:
    """Replace names of the Hub with paths of their snapshots, and a chat template with its text.

    Models come without weights yet. `saved` is the run's configuration so far, whose commits are
    kept.
    """
    before = sources(saved)

    def find(field: str, source: str) -> str:
        if field in MODELS:
            return hub.local_model(source, before[field], hub.TOKENIZER)
        return source if field in DIRECTORIES else local_data(source, before.get(field, ""))

    change_sources(config, find)
    prompts = config.prompts
    prompts.chat_template = read_template(prompts.chat_template, Path(config.model))


def snapshots(config: Config) -> list[Given]:
    """Return what gives a job the snapshots and the chat template of this configuration."""
    found = [
        Given(field, source)
        for field, source in sources(config).items()
        if any(snapshot_of(part.partition(":")[0]) for part in parts_of(source))
    ]
    template = config.prompts.chat_template
    return [*found, Given("prompts.chat_template", template)] if template else found


def make_paths_absolute(config: Config) -> None:
    """Make models, data, a key and the user's functions independent of the working directory."""

    def change(field: str, source: str) -> str:
        parts = [source] if field in DIRECTORIES else parts_of(source)
        return ",".join(map(_absolute, parts))

    change_sources(config, change)
    config.rollout.servers_key_file = _absolute(config.rollout.servers_key_file)
    config.reward = ",".join(map(absolute, config.rewards))
    for by_name in (config.scoring.by_source, config.evaluation.reward_of):
        by_name.update({name: absolute(reward) for name, reward in by_name.items()})
    config.model_builder = absolute(config.model_builder)
    config.objective.objective = absolute(config.objective.objective)
    config.rollout.agent = absolute(config.rollout.agent)


def _absolute(path: str) -> str:
    """Return a path as an absolute one; a generated task and an empty path as they are."""
    return str(Path(path).absolute()) if path and not path.startswith(REASONING_GYM) else path
