"""What a learner rank prints and returns when its run ends early."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from qurl_megatron.learner.non_finite import NonFinite
from qurl_megatron.loop import train


def test_nan_ends_a_rank_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_nan(*args: object) -> NoReturn:
        raise NonFinite("on learner rank 3 the loss holds NaN; resume from a checkpoint")

    monkeypatch.setattr(train, "train", find_nan)
    monkeypatch.setattr(train, "load", lambda path: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = train.run_rank(Path("runs/a"), [], stop_on=[], exit_on=signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
        dist.destroy_process_group()
    assert code == 1
    assert capsys.readouterr().err == (
        "qurl: on learner rank 3 the loss holds NaN; resume from a checkpoint: qurl resume runs/a\n"
    )
