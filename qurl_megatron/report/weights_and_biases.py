"""Curves and samples of a run at Weights & Biases, for runs with `wandb_project`."""

import dataclasses
import shlex
from collections.abc import Callable
from typing import Any, Literal

import wandb

from qurl_megatron import device
from qurl_megatron.config.schema import Config
from qurl_megatron.files import write_whole


class WandbCurves:
    """What one attempt of a run sends, or leaves in the run's directory to be sent later."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._run_dir, self._say = config.run_dir, say
        directory = (config.run_dir / "wandb").absolute()
        # Tables are staged for upload there, and not in the home directory.
        names = ("WANDB_DATA_DIR", "WANDB_CACHE_DIR")
        device.extend_environment(dict.fromkeys(names, str(directory)))
        session = wandb.setup(wandb.Settings(silent=True))
        mode: Literal["offline"] | None = None
        # `viewer` asks the server for the user, and waits 5 s for the answer. wandb.init()
        # would wait 90 s, and then end the run. A mode that the user has set is kept.
        if "mode" not in session.settings.model_fields_set and not session.viewer:
            mode = "offline"
            say(
                f"Weights & Biases is offline: {session.settings.base_url} does not answer, or "
                "knows no key of yours"
            )
        if not (identity := directory / "run_id").exists():
            directory.mkdir(exist_ok=True)
            write_whole(identity, wandb.util.generate_id())
        self._run = wandb.init(
            mode=mode,
            project=config.wandb_project,
            id=identity.read_text(),
            resume="allow",
            name=config.name,
            dir=config.run_dir,
            config=dataclasses.asdict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Steps after a checkpoint are repeated, and W&B's own numbers only grow.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, Any], rewards: list[float]) -> None:
        """Add a point at `step` to the curve of each value, and the distribution of rewards."""
        histogram = {"rewards": wandb.Histogram(rewards)} if rewards else {}
        self._run.log({**values, **histogram, "step": step})

    def write_table(self, step: int, columns: list[str], rows: list[list[object]]) -> None:
        """Show samples of a step as a table."""
        self._run.log({"samples": wandb.Table(columns=columns, data=rows), "step": step})

    def close(self) -> None:
        """Finish the run of W&B, and say how to send what could not be sent."""
        self._run.finish()
        if self._run.offline:
            recorded = self._run_dir / "wandb" / "offline-run-"
            self._say(
                f"to send the curves later: wandb sync --append {shlex.quote(str(recorded))}*"
            )
