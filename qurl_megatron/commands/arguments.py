"""Arguments that several `qurl` commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe, such as quickstart.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: runs/NAME.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE", help="Fields to change; `qurl config RECIPE` lists them."
    ),
]
SourceDirectory = Annotated[
    Path, typer.Argument(metavar="SRC", help="Hugging Face directory: config.json, safetensors.")
]
NewDirectory = Annotated[Path, typer.Argument(metavar="DST", help="Directory to create.")]
