"""The disk space that a run asks for before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from qurl_megatron.config.disk import check_disk
from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.config.schema import Config
from tiny import build_tiny_model


@pytest.mark.parametrize(
    ("words", "written", "checkpoints"),
    [
        ("checkpoint.keep_last=2", 0, 4),  # two last ones, the best, and one being written
        ("checkpoint.keep_last=2 checkpoint.keep_best=false", 0, 3),
        ("checkpoint.keep_last=2 evaluation.problems=0", 0, 3),  # nothing is evaluated
        ("checkpoint.every_steps=0", 0, 0),
        ("checkpoint.keep_last=2", 2, 2),  # those that are there are not asked for again
    ],
)
def test_a_run_asks_for_every_checkpoint_that_the_disk_holds_at_once(
    words: str, written: int, checkpoints: int, tmp_path: Path
) -> None:
    build_tiny_model(tmp_path / "model")
    config = Config(model=str(tmp_path / "model"), output_dir=str(tmp_path), name="run")
    for step in range(written):
        (config.run_dir / "checkpoints" / f"step_{step:06}").mkdir(parents=True)
    line = check_disk(with_overrides(config, words.split()))
    assert f"for {checkpoints} checkpoints and the final model" in line
