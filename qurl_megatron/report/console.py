"""What a training run shows: lines on its steps, warnings, and on a terminal a live bar below.

    time     step           s reward   len  cut      KL entropy tok/s  GiB left
    14:02:11 step 12/80   3.2  0.431   6.1   0% 1.3e-04   0.512  2180  1.2 3 min 37 s

The first steps have a line each. Later a step has one if it was evaluated or raises a warning. So
that a log goes on, every tenth step has one too, and the first after a minute without. Colours
follow the terminal and the variable NO_COLOR.

A warning is a rule about a run's metrics. It is raised once the rule has held at each of the last
`WINDOW` steps. It is over when the rule has held at none of them, and can then be raised again. A
metric that is not finite raises one at once.
"""

import contextlib
import math
import textwrap
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from datetime import datetime
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from qurl_megatron.config.schema import WITHOUT_GROUPS, Config
from qurl_megatron.report.metrics import Evaluation, StepMetrics

STEPS_LOG = "steps.log"  # in a run's directory, with all that its attempts printed
FIRST_STEPS = 10  # of an attempt, each with a line
LINE_EVERY = 10  # steps
LINE_EVERY_S = 60.0
HEADER_EVERY = 25  # lines of steps between two headers
LEGEND = """\
s: seconds of a step   len: mean completion length in tokens   cut: share cut off
KL: of behaviour and proximal, k3, in nats   entropy: in nats
tok/s: sampled   GiB: memory of learner rank 0   left: time to the last step"""
WINDOW = 5  # steps
FINITE = (  # metrics that must be finite
    "reward_mean",
    "kl_behaviour_proximal",
    "kl_behaviour_proximal_k3",
    "kl_reference",
    "entropy",
    "loss",
    "grad_norm",
    "value_loss",
)
NOT_FINITE = "not finite"
KL = "kl_behaviour_proximal_k3"
LARGE = 1e-2  # of it, in nats a token, from which a run and its report say what it means


class RunConsole:
    """The output of one attempt of a run."""

    def __init__(self, config: Config, *, quiet: bool) -> None:
        self._config = config
        self._console = Console(quiet=quiet, highlight=False)
        self._log = None if quiet else config.run_dir / STEPS_LOG
        self._watch = Watch(config)
        self._steps = self._lines = 0  # of this attempt
        self._step_start = self._line_time = time.monotonic()
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}this step for"),
            TimeElapsedColumn(),
            console=self._console,
            refresh_per_second=1,
            disable=not self._console.is_interactive,
        )
        self._task = self._bar.add_task(config.name[:20], total=config.steps, state="")

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line, above the live bar if there is one, and append it to the run's log."""
        self._console.print(text, style=style, markup=False, soft_wrap=True)
        if self._log:
            with contextlib.suppress(OSError), self._log.open("a") as log:
                log.write(f"{text}\n")

    def start(self, earlier: list[dict[str, Any]]) -> None:
        """Begin to show steps, and repeat the warnings that stand.

        `earlier` has the lines of metrics.jsonl that earlier attempts wrote.
        """
        for step in earlier:
            self._watch.update(step)
        self.say(LEGEND)
        self._warn(self._watch.raised)
        self.begin_step()
        self._bar.reset(self._task, completed=len(earlier))
        self._bar.start()

    def begin_step(self) -> None:
        """Begin to count the seconds of a step."""
        self._step_start = time.monotonic()

    def step(self, metrics: StepMetrics, evaluation: Evaluation | None, left_s: float) -> None:
        """Show a step that has ended, its evaluation if it has one, and the warnings it raises."""
        now = time.monotonic()
        warnings = self._watch.update(vars(metrics))
        self._steps += 1
        is_due = self._steps <= FIRST_STEPS or metrics.step % LINE_EVERY == 0
        is_late = now - self._line_time >= LINE_EVERY_S or metrics.step == self._config.steps
        if evaluation or warnings or is_due or is_late:
            self._line_time = now
            seconds = now - self._step_start - metrics.time_proof_s
            self._show(metrics, evaluation, seconds, left_s)
        self._warn(warnings)
        self._step_start = now
        # The reset also starts the clock of the next step again.
        state = f"reward {metrics.reward_mean:.3f}, {duration(left_s)} left, "
        self._bar.reset(self._task, completed=metrics.step, state=state)

    def stop(self) -> None:
        """Leave the last state of the live bar on the screen."""
        self._bar.stop()

    def show(self, table: Table) -> None:
        """Print a table."""
        self._console.print(table)

    def _warn(self, lines: list[str]) -> None:
        """Print the watch's sentences, with line breaks."""
        for line in lines:
            self.say(textwrap.fill(line, 80, subsequent_indent="  "), style="yellow")

    def _show(
        self, metrics: StepMetrics, evaluation: Evaluation | None, seconds: float, left_s: float
    ) -> None:
        """Print the line of a step, below a header if one is due, and its scores."""
        step = f"{datetime.now():%H:%M:%S} step {metrics.step}/{self._config.steps}"
        width = len(f"00:00:00 step {self._config.steps}/{self._config.steps}")
        if self._lines % HEADER_EVERY == 0:
            columns = "    s reward   len  cut      KL entropy tok/s  GiB left"
            self.say(f"{'time     step':{width}} {columns}")
        self._lines += 1
        self.say(
            f"{step:{width}} {_number(seconds)} {metrics.reward_mean:6.3f} "
            f"{_number(metrics.completion_length_mean)} "
            f"{metrics.completion_truncated_fraction:4.0%} "
            f"{metrics.kl_behaviour_proximal_k3:7.1e} {metrics.entropy:7.3f} "
            f"{_number(metrics.rollout_tokens_per_s)} {metrics.memory_bytes / 2**30:4.1f} "
            f"{duration(left_s)}"
        )
        for name, value in evaluation.lines() if evaluation else []:
            self.say(f"{step} {name} {value}")


def _number(value: float) -> str:
    """Return a number in five columns, with one decimal if there is room."""
    return f"{value:5.1f}" if value < 1000 else f"{value:5.0f}"


def duration(seconds: float) -> str:
    """Return a duration in words: `12 s`, `3 min 1 s` or `2 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def rules(
    config: Config, first: list[dict[str, Any]], step: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the name and the sentence of each rule that holds at a step.

    If a metric is not finite, the other rules mean nothing, and only that one is yielded.

    Args:
        first: the first `WINDOW` steps of the run; empty before they are done.
        step: the metrics of the step, by name.
    """
    now = defaultdict(lambda: math.nan, step)
    if wrong := [name for name in FINITE if not math.isfinite(step.get(name) or 0.0)]:
        yield (
            NOT_FINITE,
            f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} not finite: stop the run, "
            "and resume from a checkpoint before this step with a lower optimizer.learning_rate",
        )
        return
    is_quantized = config.quantization.format != "bf16"
    in_groups = config.objective.advantage_estimator not in WITHOUT_GROUPS
    kl, flips = now[KL], now["code_flip_fraction"]
    cut_off = now["completion_truncated_fraction"]
    rewards = [reward for reward, _ in now.get("reward_counts") or []]
    remedy = (
        "choose problems of medium difficulty, raise rollout.completions_per_prompt, or set "
        "rollout.dynamic_sampling_tries (rule: the rewards of more than 90% of prompts are equal)"
    )
    if len(rewards) == 1:
        yield (
            "no reward signal",
            f"no reward signal: every completion scores {rewards[0]:g}; look at the answers in "
            f"samples.jsonl and at the verifier, or {remedy}",
        )
    elif in_groups and now["equal_reward_fraction"] > 0.9:  # others compare prompts too
        yield (
            "no reward signal",
            f"no reward signal: the rewards of {now['equal_reward_fraction']:.0%} of prompts are "
            f"equal; {remedy}",
        )
    elif now["grad_norm"] == 0:
        yield (
            "no gradient",
            "the gradient is 0: the rewards of each prompt are equal, so nothing is learned; "
            "choose problems of medium difficulty, or check the verifier (rule: 0)",
        )
    elif now["learning_rate"] == 0:
        yield "no learning rate", "the learning rate is 0; raise optimizer.learning_rate (rule: 0)"
    elif is_quantized and flips < 1e-4:
        yield (
            "few changed codes",
            f"each publish changes {flips:.4%} of the quantized codes. A small "
            "learning rate does that, and small updates add up until a code changes; raise "
            "optimizer.learning_rate only if the reward stalls too (rule: below 0.01%)",
        )
    shown = now["update_shown_fraction"]
    if config.optimizer.rounding == "nearest" and shown is not None and shown < 0.5:
        yield (
            "hidden update",
            f"BF16 values show {shown:.0%} of what the learner has changed since the start: "
            "rounding to the nearest number hides small changes; set "
            "optimizer.rounding=unbiased (rule: less than half)",
        )
    if cut_off > 0.2:
        yield (
            "cut-off completions",
            f"{cut_off:.0%} of completions are cut off, so the reward "
            "favours short answers; raise rollout.max_completion_length (rule: more than 20%)",
        )
    rollout = config.rollout.at(step["step"])
    failed = now["verifier_failures"] / rollout.completions_per_step
    if failed > 0.01:
        yield (
            "verifier failures",
            f"{failed:.1%} of verifier calls fail and count as wrong; look at the data and at "
            "reward (rule: more than 1%)",
        )
    if first and now["entropy"] < 0.1 * (entropy := fmean(each["entropy"] for each in first)):
        yield (
            "entropy collapse",
            f"entropy has collapsed to {now['entropy']:.2g} nats, from {entropy:.2g} in the first "
            "steps; raise objective.entropy_coefficient or objective.eps_high, or lower "
            "optimizer.learning_rate (rule: less than a tenth)",
        )
    if first and kl > 1e-3 and kl > 10 * (early := fmean(each[KL] for each in first)):
        compare = (
            ". A run with quantization.format=bf16 shows whether quantization is the cause; if it "
            "is, keep the layers that `qurl mismatch` names in BF16 (quantization.keep)"
        )
        yield (
            "growing KL",
            f"KL(behaviour, proximal) has grown to {kl:.1e}, from {early:.1e} in the first "
            f"steps, and {now['tis_truncated_fraction']:.1%} of tokens have a ratio proximal / "
            "behaviour above C; lower optimizer.learning_rate"
            f"{compare if is_quantized else ''} (rule: more than tenfold, "
            "and above 1e-3)",
        )
    if kl > 5e-3 and config.objective.objective == "naive":
        yield (
            "naive objective",
            f"KL(behaviour, proximal) is {kl:.1e}, and the naive objective does not correct "
            "for it; set objective.objective=tis or acr (rule: above 5e-3)",
        )


class Watch:
    """The rules that hold in a run, updated at each step in order."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._first: list[dict[str, Any]] = []
        self._recent: deque[dict[str, str]] = deque(maxlen=WINDOW)
        self._raised: dict[str, str] = {}

    @property
    def raised(self) -> list[str]:
        """The warnings that are not over."""
        return list(self._raised.values())

    def update(self, step: dict[str, Any]) -> list[str]:
        """Return a line for each warning that a step raises or ends.

        `step` has the metrics of the step, by name.
        """
        first = self._first if len(self._first) == WINDOW else []
        holding = dict(rules(self._config, first, step))
        if not first:
            self._first.append(step)
        self._recent.append(holding)
        lines = []
        for name, sentence in holding.items():
            lasts = len(self._recent) == WINDOW and all(name in held for held in self._recent)
            if name not in self._raised and (lasts or name == NOT_FINITE):
                self._raised[name] = f"warning at step {step['step']}: {sentence}"
                lines.append(self._raised[name])
        for name in list(self._raised):
            if not any(name in held for held in self._recent):
                del self._raised[name]
                lines.append(f"over at step {step['step']}, after {WINDOW} steps without: {name}")
        return lines
