"""Write curves, histograms and texts for TensorBoard.

torch's `SummaryWriter` writes with a thread of its own, which prints a traceback when the disk is
full. Here the caller writes, and gets the error.
"""

import io
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from qurl_megatron.files import append_whole


class EventFile:
    """An event file of one attempt of a run.

    TensorBoard hides the points that older files of the directory have at `purge_step` and after.
    """

    def __init__(self, directory: Path, purge_step: int) -> None:
        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = directory / name
        start = SessionLog(status=SessionLog.START)
        self._append({"file_version": "brain.Event:2"}, {"step": purge_step, "session_log": start})

    def add(self, step: int, summaries: Iterable[Summary]) -> None:
        """Append what `torch.utils.tensorboard.summary` made of a step's measurements.

        Raises:
            OSError: writing failed; the file is as it was.
        """
        self._append(*({"step": step, "summary": summary} for summary in summaries))

    def _append(self, *events: dict[str, Any]) -> None:
        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            writer.write(Event(wall_time=time.time(), **event).SerializeToString())
        append_whole(self._path, records.getvalue())
