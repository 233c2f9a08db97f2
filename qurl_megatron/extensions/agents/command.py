"""The command `qurl agent`."""

from collections.abc import Iterator
from typing import Annotated

import typer

from qurl_megatron.commands.models import found_model

UNUSED = ("k", "k_of", "output", "reward", "reward_of", "scoring")  # settings of qurl eval


def agent(
    function: Annotated[
        str, typer.Argument(metavar="AGENT", help="The agent: FILE.py:NAME or MODULE:NAME.")
    ],
    model: Annotated[
        str, typer.Option(help="Hugging Face directory of the policy, or a name of the Hub.")
    ],
    data: Annotated[str, typer.Option(help="Problems: a file, directory or reasoning_gym:TASK.")],
    episodes: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of problems, one episode each.")
    ] = 2,
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIELD=VALUE", help="Settings of qurl eval, such as max_turns=4."),
    ] = None,
) -> Iterator[int]:
    """Play a few episodes of an agent, and print every turn with its tokens and log-probs."""
    from qurl_megatron.config.schema import ConfigError
    from qurl_megatron.config.text import leaf_values, with_overrides
    from qurl_megatron.evaluation import evaluate
    from qurl_megatron.extensions.agents import episodes as played

    given = evaluate.EvalConfig(model=found_model(model), data={data: data}, agent=function)
    config = with_overrides(given, settings or [])
    if config.agent != function:
        raise ConfigError(f"agent={config.agent}: {function} is played; name one")
    before = leaf_values(given)
    for field, value in leaf_values(config).items():
        if field.partition(".")[0] in UNUSED and value != before[field]:
            raise ConfigError(
                f"{field}={value}: qurl agent shows episodes, and neither scores nor keeps "
                "answers; leave it out, or call qurl eval"
            )
    evaluate.check(config)
    yield config.server.tensor_parallel_size
    played.run(config, episodes)
