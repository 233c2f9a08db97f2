"""Checkpoints: everything a run needs to resume, written asynchronously and atomically.

    RUN/checkpoints/step_000020/
        megatron/     weights, optimizers and schedules of the policy and of PPO's critic, in
                      Megatron's layout-independent format
        model/        config.json and tokenizer, for `qurl export`
        config.yaml   the run's configuration at the save
        state.json    RunState

Invariants:
- A directory named `step_*` is complete: it is filled under another name, synced, and renamed when
  every rank has written its shards. The next save removes the remains of a killed one.
- A checkpoint holds the state at the call of `save`. Training continues while it is written.
- Any tensor, pipeline and data parallel layout can resume from the checkpoint of any other.

RUN/checkpoints/best is a link to the newest checkpoint whose evaluation cannot be told apart from
the best: it is at most `SIGNIFICANT` standard errors below. It is kept beside the newest ones. When
a run resumes with another measure, such as another k, it stays until there is a score by that.

RUN/checkpoints.jsonl has one line per complete checkpoint: its step, and the seconds it took to
write.

Megatron's files hold pickles, which run code when they are read. Resume and export only checkpoints
that you trust as you trust a program. `qurl eval` of an exported directory reads safetensors only.

The learner has no dropout and so no random state. The RunState holds the order of prompts.
"""

import dataclasses
import json
import math
import multiprocessing
import os
import shutil
import time
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, Protocol

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint.api import CheckpointException

from qurl_megatron.config import text
from qurl_megatron.config.schema import OF_COPY, Config, ConfigError
from qurl_megatron.data.rewards import what_decides_scores
from qurl_megatron.device import from_rank_zero
from qurl_megatron.files import PARTIAL, append_lines, partial_of, rename_whole, sync, write_whole
from qurl_megatron.learner.cpu_runtime import megatron_runtime
from qurl_megatron.learner.learner import Learner
from qurl_megatron.machine.disk import free_bytes
from qurl_megatron.machine.memory import lack_of_shared_memory
from qurl_megatron.machine.output import gigabytes
from qurl_megatron.machine.processes import die_with_parent
from qurl_megatron.memory.disk import checkpoint_bytes
from qurl_megatron.model.huggingface import copy_beside_weights, write_template
from qurl_megatron.report.record import list_checkpoints

BEST = "best"
SIGNIFICANT = 2.0  # standard errors of a difference from which it counts
# Fields that decide a score over files, and may change when a run resumes.
OF_FILES = tuple(f"evaluation.{each}" for each in "k k_of reward_of temperature top_p".split())


class CheckpointError(ConfigError):
    """A directory is not a complete checkpoint, or cannot be written. The message says why."""


class Saved(Protocol):
    """What a checkpoint holds beside the learner: PPO's critic."""

    def sharded_state(self) -> dict[str, Any]:
        """Return its state, as Megatron saves it."""

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Load the `sharded_state` after a run's `step`."""


@dataclasses.dataclass(frozen=True)
class RunState:
    """The state of a run after a step, apart from learner and critic."""

    step: int
    """The last completed step."""
    weight_version: int
    """The version published after that step."""
    time_s: float
    """Seconds of RL training until then, over all attempts of the run."""
    evaluation_before: dict[str, Any]
    """The fields of the `Evaluation` before the first RL step."""
    prompts: dict[str, Any]
    """`PromptStream.state`."""
    accuracy: float | None = None
    """`Evaluation.score` after that step. None: not evaluated."""
    standard_error: float | None = None
    """Of `accuracy`."""
    base: str = ""
    """`Learner.base_hash`."""
    highest: list[float] = dataclasses.field(default_factory=list)
    """The highest accuracy of all checkpoints until this one, and its standard error; empty: none.
    `Checkpoints.save` sets it."""
    measure: dict[str, Any] = dataclasses.field(default_factory=dict)
    """`measure_of` the configuration, and `sum_of` what was asked as `problems`; as `highest`. Of
    an older version it lacks some or all."""

    @property
    def best(self) -> list[float]:
        """`highest`, or in the checkpoint of an older version its own."""
        own = [] if self.accuracy is None else [self.accuracy, self.standard_error or 0.0]
        return max(self.highest, own)

    def is_below(self, highest: list[float]) -> bool:
        """Return whether the accuracy is significantly below the highest, or was not measured."""
        if self.accuracy is None:
            return True
        error = math.hypot(highest[1], self.standard_error or 0.0)
        return highest[0] - self.accuracy > SIGNIFICANT * error


class Checkpoints:
    """Writer of one run's checkpoints. Every learner rank makes the same calls."""

    def __init__(
        self, config: Config, learner: Learner, critic: Saved | None = None, problems: str = ""
    ) -> None:
        """Store the parts; `problems` is `sum_of` what evaluations ask, on global rank 0."""
        self._config = config
        self._learner = learner
        self._critic = critic
        self.best_by = config.checkpoint.best_by
        self._measure = measure_of(config) | {"problems": problems}
        self._directory = config.run_dir / "checkpoints"
        # The highest accuracy, also of a save that is not complete; on global rank 0.
        self._highest: list[float] = []
        # The clock when the last save began or, after a resume, this attempt; None before.
        self._saved_at: float | None = None
        self._bytes = checkpoint_bytes(learner.architecture, config)
        self._queue = AsyncCallsQueue(persistent=False)
        # Megatron's own manager would outlive a rank that is killed.
        self._manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        self._manager.start(die_with_parent)
        filesystem_async._results_queue = self._manager.Queue()

    def newest(self) -> Path | None:
        """Return the run's newest checkpoint, or None."""
        return max(list_checkpoints(self._config.run_dir), default=None)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Return whether the configuration asks for a checkpoint after `step`."""
        settings, saved_at = self._config.checkpoint, self._saved_at
        if settings.every_steps == 0:
            return False
        if saved_at is None or step % settings.every_steps == 0 or is_last:
            return True  # the first step too: it shows that the disk takes a checkpoint
        due_at = saved_at + 60 * settings.every_minutes
        # The clock of rank 0 decides, because all ranks must enter a save together.
        return settings.every_minutes > 0 and from_rank_zero(lambda: time.monotonic() >= due_at)

    def is_best(self, accuracy: float | None) -> bool:
        """Return whether a policy of this accuracy is above all others and is to be saved.

        `accuracy` is None if the policy was not evaluated.
        """
        settings = self._config.checkpoint
        if accuracy is None or not settings.keep_best or settings.every_steps == 0:
            return False
        highest = from_rank_zero(lambda: max(self._highest, _highest(self._states())))
        return not highest or accuracy > highest[0]

    def save(self, state: RunState) -> None:
        """Wait for an earlier save, then start to save in background processes.

        Only global rank 0 uses `state`.

        Raises:
            CheckpointError: the earlier save failed, or the disk has too little space.
        """
        self.poll(wait=True)
        self._saved_at = time.monotonic()
        checkpoint = self._directory / f"step_{state.step:06}"
        partial = partial_of(checkpoint)
        from_rank_zero(lambda: self._prepare(partial, state))
        with megatron_runtime():
            request = dist_checkpointing.save(
                self._sharded_state(),
                str(partial / "megatron"),
                async_sharded_save=True,
            )
            request.add_finalize_fn(
                lambda: from_rank_zero(lambda: self._complete(partial, checkpoint))
            )
            self._queue.schedule_async_request(request)

    def restore(self, checkpoint: Path) -> None:
        """Load weights, optimizer and schedule of learner and critic from a checkpoint."""
        self._saved_at = time.monotonic()
        step = read_state(checkpoint).step
        with megatron_runtime():
            state = dist_checkpointing.load(self._sharded_state(), str(checkpoint / "megatron"))
            self._learner.restore(state, step)
            if self._critic:
                self._critic.restore(state["critic"], step)

    def poll(self, *, wait: bool = False) -> None:
        """Complete a save if every rank has written its shards; with `wait`, wait for them.

        Raises:
            CheckpointError: writing failed; the message names the last whole checkpoint.
        """
        try:
            with megatron_runtime():
                self._queue.maybe_finalize_async_calls(blocking=wait)
        except (CheckpointException, CheckpointingException, OSError) as error:
            # torch's writer does not always report a full disk, nor Megatron why it has no queue.
            full = "the disk is full" if free_bytes(self._directory) < self._bytes else ""
            full = full or lack_of_shared_memory()
            reason = full or " ".join(str(error).split())[-500:]
            raise CheckpointError(
                f"a checkpoint was not written: {reason}; {self._last()}"
            ) from error

    def compares(self, state: RunState) -> bool:
        """Return whether the scores of a state can be compared with those of this attempt."""
        return self._measure == self._measure | state.measure

    def _states(self) -> dict[Path, RunState]:
        """Return the comparable states of complete checkpoints, oldest first."""
        states = {path: read_state(path) for path in list_checkpoints(self._config.run_dir)}
        return {path: state for path, state in states.items() if self.compares(state)}

    def _last(self) -> str:
        """Return a text that names the last whole checkpoint."""
        newest = self.newest()
        return f"the last whole one is {newest}" if newest else "there is no earlier one"

    def close(self) -> None:
        """Abort a save that is not complete; keep all complete checkpoints."""
        for call in self._queue.async_calls:
            call.async_caller.close(abort=True)
        filesystem_async._results_queue = None
        self._manager.shutdown()

    def _sharded_state(self) -> dict[str, Any]:
        state = self._learner.sharded_state()
        if self._critic:
            state["critic"] = self._critic.sharded_state()
        return state

    def _prepare(self, partial: Path, state: RunState) -> None:
        self._highest = max(self._highest, _highest(self._states()), state.best)
        state = dataclasses.replace(state, highest=self._highest, measure=self._measure)
        for leftover in self._directory.glob("*" + PARTIAL):
            shutil.rmtree(leftover)
        self._check_space(state.step)
        (partial / "megatron").mkdir(parents=True)
        (partial / "model").mkdir()
        copy_beside_weights(Path(self._config.model), partial / "model")
        write_template(partial / "model", self._config.prompts.chat_template)
        text.save(self._config, partial / "config.yaml")
        write_whole(partial / "state.json", json.dumps(dataclasses.asdict(state), indent=2) + "\n")

    def _check_space(self, step: int) -> None:
        free = free_bytes(self._directory)
        if free < self._bytes:
            raise CheckpointError(
                f"step {step} was not saved: the disk is full: {gigabytes(free)} are free, a "
                f"checkpoint takes {gigabytes(self._bytes)}; {self._last()}"
            )

    def _complete(self, partial: Path, checkpoint: Path) -> None:
        sync(partial / "megatron")
        rename_whole(partial, checkpoint)
        run_dir, settings = self._config.run_dir, self._config.checkpoint
        # The seconds from the start of a save to its last file, by the file system's clock.
        written = max(path.stat().st_mtime for path in (checkpoint / "megatron").iterdir())
        time_write_s = written - (checkpoint / "state.json").stat().st_mtime
        line = {"step": read_state(checkpoint).step, "time_write_s": time_write_s}
        append_lines(run_dir / "checkpoints.jsonl", [line])
        states = self._states() if settings.keep_best else {}
        highest = _highest(states)
        level = [path for path, state in states.items() if not state.is_below(highest)]
        best, link = max(level, default=None), self._directory / BEST
        if settings.keep_best and not highest and link.exists():
            best = self._directory / link.readlink()  # by another measure
        _link(link, best)
        for old in list_checkpoints(run_dir)[: -settings.keep_last]:
            if old == best:
                continue
            # Rename first: an interrupted removal must not leave a directory that looks complete.
            shutil.rmtree(old.rename(partial_of(old)))


def measure_of(config: Config) -> dict[str, Any]:
    """Return what decides a score, beside the policy and the fields that a run keeps, as JSON."""
    by_files = bool(config.checkpoint.best_by) or not config.evaluation.held_out
    values = text.leaf_values(config)
    fields = by_files * OF_FILES + config.evaluation.quantized * OF_COPY
    measured = what_decides_scores(config) | {field: values[field] for field in fields}
    return measured | {"longest_completion": config.rollout.longest_completion}


def _highest(states: dict[Path, RunState]) -> list[float]:
    """Return the highest accuracy, as `RunState.highest` has it."""
    return max((state.best for state in states.values()), default=[])


def _link(link: Path, target: Path | None) -> None:
    """Make `link` a relative symbolic link to `target`, which is beside it; None removes it."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    unfinished = link.with_name(link.name + ".unfinished")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target.name)
    os.replace(unfinished, link)


def read_state(checkpoint: Path) -> RunState:
    """Return the run's state in a checkpoint.

    Raises:
        CheckpointError: its file is broken.
    """
    path = checkpoint / "state.json"
    try:
        return RunState(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: {error}; remove {checkpoint}, and the run goes on from the one before"
        ) from None
