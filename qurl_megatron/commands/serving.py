"""Commands that start one server: to evaluate a model, or to serve it to a run elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from qurl_megatron.launch.bad_input import exit_on_bad_input


def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hugging Face directory or checkpoint.")
    ],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA... [FIELD=VALUE]...",
            help="Data files or reasoning_gym:TASK, and settings such as k=32.",
        ),
    ],
) -> None:
    """Measure Avg@1 and Avg@k of a model on data files, on a server started for it."""
    with exit_on_bad_input():
        from qurl_megatron.config.overrides import with_overrides
        from qurl_megatron.evaluation import evaluate
        from qurl_megatron.evaluation.avg_at_k import EvalConfig

        data = [word for word in words if "=" not in word]
        settings = [word for word in words if "=" in word]
        config = with_overrides(EvalConfig(model=model, data=data), settings)
        with exit_on_failed_server():
            evaluate.run(config)


def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hugging Face directory of the run's model.")
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
    with exit_on_bad_input():
        from qurl_megatron.config.overrides import with_overrides
        from qurl_megatron.launch import serve

        config = with_overrides(serve.ServeConfig(model=model), settings or [])
        with exit_on_failed_server():
            sys.exit(serve.run(config))


@contextmanager
def exit_on_failed_server() -> Iterator[None]:
    """Turn the failure of a server into one message on stderr and exit code 1."""
    from qurl_megatron.rollout.server import ServerFailed

    try:
        yield
    except ServerFailed as failure:
        print(f"qurl: {failure}", file=sys.stderr)
        sys.exit(1)
