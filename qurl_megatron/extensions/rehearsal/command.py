"""The command that plays a learner's ranks on fake GPU tensors."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from qurl_megatron.commands.runs import Overrides
from qurl_megatron.extensions.planning.command import (
    GpuName,
    GpusOfNode,
    Subject,
    plan_input,
    say_recipe,
)


def rehearse(
    subject: Subject,
    overrides: Overrides = None,
    all_ranks: Annotated[
        bool,
        typer.Option("--all", help="Play all ranks, not only the first and last of each stage."),
    ] = False,
    transformer_engine: Annotated[
        bool | None,
        typer.Option(help="Play Transformer Engine's layers. Default: if it is installed."),
    ] = None,
    changed: Annotated[
        float, typer.Option(min=0.001, max=0.2, help="Share of elements that a delta changes.")
    ] = 0.02,
    gpu: GpuName = "H100",
    gpus_per_node: GpusOfNode = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a rank a line.")] = False,
) -> None:
    """Play the learner's ranks at their true size without a GPU: memory, waits, collectives.

    The code is a run's own; the tensors are fake. Exit code 1: a rank fails or does not fit.
    """
    from qurl_megatron.config.gpus import node_of
    from qurl_megatron.extensions.rehearsal.page import find_transformer_engine, play_and_print
    from qurl_megatron.extensions.rehearsal.rehearsal import Rehearsal, ranks_that_differ

    architecture, config, given = plan_input(subject, overrides or [])
    learner = config.learner
    rehearsal = Rehearsal(
        architecture,
        config,
        node_of(gpu, gpus_per_node),
        list(range(learner.world_size)) if all_ranks else ranks_that_differ(learner),
        find_transformer_engine(transformer_engine),
        changed,
    )
    if given is not None and not as_json:
        say_recipe(subject, architecture)
    sys.exit(play_and_print(rehearsal, as_json=as_json))
