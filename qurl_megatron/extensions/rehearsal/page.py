"""Play a rehearsal, and the page that it prints."""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from qurl_megatron.config.gpus import GIB
from qurl_megatron.config.schema import ConfigError
from qurl_megatron.config.validate import check_layout
from qurl_megatron.extensions.planning.plan import Plan, layout_overrides
from qurl_megatron.extensions.rehearsal import transformer_engine
from qurl_megatron.extensions.rehearsal.rehearsal import Played, Rehearsal, play, ranks_that_differ
from qurl_megatron.memory.estimate import RUNTIME_BYTES

UNSEEN = """Not seen: numbers, and whatever depends on the values of weights (a router counts as
balanced, a delta has the stated share of changes); NCCL's order of collectives, its hangs and its
buffers; what a kernel refuses or needs as a workspace; fragmentation. Transformer Engine's kernels
are stand-ins; its attention is torch's, its FP8 is not played. Of the publish, only the learner's
part is played: no server receives. docs/own-model.md says more."""


def find_transformer_engine(wanted: bool | None) -> Path | None:
    """Return Transformer Engine's directory if it is `wanted`, or with None if it is installed.

    Raises:
        ConfigError: it is wanted, but not there.
    """
    found = transformer_engine.find() if wanted in (None, True) else None
    if wanted and found is None:
        raise ConfigError(
            "--transformer-engine: its Python is not installed; pip install --no-deps --target "
            f"{sys.prefix}/transformer-engine -r requirements-te.txt"
        )
    return found


def rehearse_plan(plan: Plan) -> int:
    """Play a plan's ranks that differ, print what was seen, and return the exit code."""
    ranks, found = ranks_that_differ(plan.config.learner), transformer_engine.find()
    return play_and_print(Rehearsal(plan.architecture, plan.config, plan.node, ranks, found))


def play_and_print(rehearsal: Rehearsal, *, as_json: bool = False) -> int:
    """Play the ranks of a rehearsal, print what was seen, and return the exit code.

    Raises:
        ArchitectureError, ConfigError: it cannot be played; one line.
    """
    learner = rehearsal.config.learner
    check_layout(rehearsal.architecture, learner)
    start, played = time.monotonic(), []
    for each in play([rehearsal]):
        played.append(each)
        if as_json:
            print(json.dumps(each.report()), flush=True)
        end = "\n" if len(played) == len(rehearsal.ranks) else "\r"
        done = f"{len(played)} of {len(rehearsal.ranks)} ranks played"
        print(f"{done}, {time.monotonic() - start:.0f} s", end=end, file=sys.stderr, flush=True)
    if not as_json:
        for line in _page(rehearsal, played):
            print(line)
    return int(any(each.error or not each.fits for each in played))


def _page(rehearsal: Rehearsal, played: Sequence[Played]) -> Iterator[str]:
    """Yield the lines of a rehearsal's page."""
    gpu, learner = rehearsal.node.gpu, rehearsal.config.learner
    layers = "with" if rehearsal.transformer_engine else "without"
    yield f"{learner.world_size} {gpu.name}: {' '.join(layout_overrides(rehearsal.config))}"
    yield (
        f"Layers {layers} Transformer Engine. GiB, traced and planned; a GPU has "
        f"{gpu.memory_bytes / GIB:.1f}, less {RUNTIME_BYTES / GIB:.0f} assumed for CUDA and NCCL. "
        "For the publish, the plan is that of a rank that sends."
    )
    yield f"\n{'rank':>6} {'stage':>5}" + "".join(
        f" {name:>22}" for name in ("kept", "score", "update", "publish")
    )
    for each in played:
        row = f"{each.rank:>6} {each.stage:>5}"
        for name, traced in each.traced.items():
            planned = each.planned.get(name)
            row += f" {traced / GIB:7.2f}"
            row += f"{planned / GIB:7.2f} {planned / traced - 1:+6.1%}" if planned else " " * 14
        yield row + (f"  error: {each.error}" if each.error else "" if each.fits else "  too large")
    alive = [each for each in played if not each.error]
    if alive:
        fullest = max(alive, key=lambda each: max(each.traced.values()))
        for name in ("update", "publish"):
            sender = min(alive, key=lambda each: each.rank) if name == "publish" else fullest
            yield from _describe(sender, name)
        yield from _waits(alive)
    yield "\n" + UNSEEN


def _describe(played: Played, name: str) -> Iterator[str]:
    """Yield what holds the peak memory of a rank's phase, and what it computes and sends."""

    phase = played.phases[name]
    holders = Counter({title: num_bytes / GIB for title, num_bytes in phase["holders"].items()})
    held = ", ".join(f"{title} {gib:.2f}" for title, gib in holders.most_common() if gib >= 0.01)
    kernels = Counter(phase["kernels"])
    most = ", ".join(f"{number:,} {title}" for title, number in kernels.most_common(5))
    yield f"\n{name} of rank {played.rank}, traced in {played.cpu_s:.0f} s of CPU:"
    yield f"  peak       {phase['peak_bytes'] / GIB:.2f} GiB: {held}"
    yield f"  kernels    {kernels.total():,}: {most}"
    yield (
        f"  time       at least {phase['roofline_s']:.3f} s of kernels, for "
        f"{phase['flops'] / 1e12:.1f} TFLOP of products, and {phase['wire_s']:.3f} s of collectives"
    )
    for title, (number, num_bytes) in sorted(phase["collectives"].items()):
        yield f"  sends      {number:6,} x {title}, {num_bytes / GIB:.2f} GiB"


def _waits(played: Sequence[Played]) -> Iterator[str]:
    """Yield where the host waits for the GPU, with the largest count of any rank."""
    shown = ("score", "update", "publish", "delta")
    for name in (name for name in shown if name in played[0].phases):
        most: Counter[str] = Counter()
        for each in played:
            phase = each.phases[name]
            most |= Counter(phase["waits"])
            most |= Counter({f"{line} copy to the GPU": n for line, n in phase["copies"].items()})
        yield f"\nwaits for the GPU in {name}, at most {most.total():,} of a rank:"
        yield from (f"  {number:6,} x {line}" for line, number in most.most_common())
