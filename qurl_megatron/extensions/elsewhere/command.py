"""The command that serves a model to a run on another machine."""

import sys
from typing import Annotated

import typer


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Hugging Face directory of the run's model, or a name of the Hub."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE", help="Settings, such as format=fp8 host=10.0.0.5 port=30000."
        ),
    ] = None,
) -> None:
    """Serve a model to a run on another machine, which lists it in rollout.servers_at.

    Both sides need the same key, in a file or in the variable QURL_SERVERS_KEY.
    """
    from qurl_megatron.config.text import with_overrides
    from qurl_megatron.extensions.elsewhere import serve
    from qurl_megatron.model import hub

    model = hub.local_model(model, files=hub.TOKENIZER)
    config = with_overrides(serve.ServeConfig(model=model), settings or [])
    sys.exit(serve.run(config))
