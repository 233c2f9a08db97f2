"""Plan a 32B run on 24 to 1,024 GPUs: `python -m benchmarks.scale` prints it and draws a figure.

Qwen2.5-32B in INT8 on H100s, 256 x 8 responses a step with lognormal lengths: 2,048 tokens on
average and 8,192 at most, then 8,192 on average and 31,744 at most. For each number of GPUs it
prints the fastest layout that fits:

    before        plain data and tensor parallelism: every replica keeps the whole optimizer state,
                  adds up its gradients by all-reduce and steps on all weights; every tensor-
                  parallel rank keeps whole norms and inputs of linear layers; no context
                  parallelism; all or no activations recomputed; one padded row a micro batch,
                  which wastes no token
    after         what the learner does
    asynchronous  the same with `rollout.max_staleness` = 2, as planned, and as a simulation of
                  every sequence finds it (`benchmarks/overlap.py`, one seed)

Then it prints the parts that make up a step as GPUs are added, which shows what saturates first,
and how much of the speed of the fewest GPUs is left on each. The figure is docs/plan_32b.svg.

Everything is arithmetic on the constants of `planning/step_time.py`; nothing is measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import platform
from importlib.metadata import version
from pathlib import Path

from benchmarks.overlap import simulate
from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.config.schema import Config, ConfigError, LearnerConfig, RecomputeMode
from qurl_megatron.planning import memory, step_time
from qurl_megatron.planning.limits import REMEDIES
from qurl_megatron.planning.plan import Plan, layouts, plan, suggest
from qurl_megatron.planning.step_time import Workload
from qurl_megatron.recipes.scaling_32b import ARCHITECTURES, study

MODEL = ARCHITECTURES["Qwen2.5-32B"]
GPUS = (24, 32, 64, 128, 256, 512, 1024)
# Longest response -> its workload.
WORKLOADS = {8192: Workload(512, 2048, 1.0), 31_744: Workload(512, 8192, 1.0)}
STALENESS = 2
FIGURE = Path(__file__).parent.parent / "docs" / "plan_32b.svg"
# One scoring process: 8,192 answers in 10.3 s of CPU time (docs/findings/systems.md, "Scoring").
ANSWERS_PER_S = 8192 / 10.3


def configuration(longest: int, max_staleness: int = 0) -> Config:
    words = [f"rollout.max_response_length={longest}", f"rollout.max_staleness={max_staleness}"]
    return with_overrides(study("Qwen2.5-32B", 64, "int8"), words)


def bytes_before(planned: Plan) -> int:
    """Return what the fullest rank would hold without shared optimizer state and sequences."""
    config, learner = planned.config, planned.config.learner
    buckets = memory.bucket_memory(MODEL, config)
    stages = range(learner.pipeline_parallel_size)
    return max(memory.total_bytes(_parts_before(config, stage), buckets) for stage in stages)


def _parts_before(config: Config, stage: int) -> dict[str, int]:
    learner = config.learner
    parts = memory.learner_memory(MODEL, config, stage)
    parts["optimizer"] *= learner.data_parallel_size
    element, size = memory.element_bytes(learner), learner.tensor_parallel_size
    # Bytes of a token in a layer that the learner divides by the tensor-parallel size.
    layer_input = element * MODEL.hidden_size
    divided = 4 * layer_input + 8  # two norms and what they give to linear layers
    tokens = memory.micro_batch_tokens(config)
    stages = memory.stage_layers(MODEL, learner)
    most = memory.num_micro_batches(config, config.rollout.max_length)
    in_flight = stages[stage] * min(len(stages) - stage, most)
    kept = in_flight * divided
    if learner.recompute == "full":
        kept = (in_flight - 1) * layer_input + divided
    if stage == len(stages) - 1:
        kept += divided // 2  # the final norm
    parts["activations"] += kept * tokens * (size - 1) // size
    return parts


def seconds_before(planned: Plan) -> float:
    """Return the time of a step that all-reduces gradients and steps on all weights everywhere."""
    config, learner = planned.config, planned.config.learner
    replicas = learner.data_parallel_size
    stages = range(learner.pipeline_parallel_size)
    numel = max(sum(memory.values_by_copies(MODEL, learner, stage).values()) for stage in stages)
    # An all-reduce sends float32 gradients twice, instead of gradients and then weights.
    sent = (4 - memory.element_bytes(learner)) * numel / step_time.INFINIBAND_BYTES_PER_S
    stepped = 2 * 16 * numel / step_time.HBM_BYTES_PER_S
    more_s = (replicas - 1) / replicas * (sent + stepped)
    return planned.total_s + config.optimizer.minibatches_per_step * more_s


def fastest_before(config: Config, gpus: int, workload: Workload) -> tuple[Plan, float] | None:
    """Return the layout with the shortest step as it was before, and the seconds of the step."""
    best: tuple[Plan, float] | None = None
    modes: tuple[RecomputeMode | None, ...] = (None, "full")
    for layout, mode in itertools.product(layouts(MODEL, config, gpus), modes):
        if layout.learner.context_parallel_size > 1:
            continue
        learner = dataclasses.replace(
            layout.learner,
            tokens_per_micro_batch=None,
            micro_batch_size=1,
            recompute=mode,
            recompute_layers=None,
            offload_optimizer=False,
        )
        try:
            planned = plan(MODEL, dataclasses.replace(layout, learner=learner), gpus, workload)
        except ConfigError:  # it does not fit even with shared state
            continue
        time_s = seconds_before(planned)
        if (best is None or time_s < best[1]) and bytes_before(planned) <= memory.GPU_BYTES:
            best = planned, time_s
    return best


def describe(planned: Plan) -> str:
    """Return the layout: learner TP x PP x CP x DP, then servers x TP."""
    learner, server = planned.config.learner, planned.config.rollout.server
    sizes = [learner.tensor_parallel_size, learner.pipeline_parallel_size]
    sizes += [learner.context_parallel_size, learner.data_parallel_size]
    return (
        f"{' x '.join(map(str, sizes))}{recomputed(learner)} + "
        f"{planned.config.rollout.servers} x {server.tensor_parallel_size}"
    )


def recomputed(learner: LearnerConfig) -> str:
    layers = f" of {learner.recompute_layers} layers" if learner.recompute_layers else ""
    recompute = f", {learner.recompute}{layers}" if learner.recompute else ""
    return recompute + (", offloaded" if learner.offload_optimizer else "")


def study_lengths(longest: int) -> tuple[list[float | None], list[Plan], list[Plan]]:
    """Print one table; return the seconds before, the plans after, and those of the asynchronous.

    A number of GPUs that is too small for any layout is None before, and is left out after.
    """
    workload = WORKLOADS[longest]
    before_s: list[float | None] = []
    after: list[Plan] = []
    ahead: list[Plan] = []
    print(f"\nresponses of {workload.mean_response:,.0f} tokens on average, {longest:,} at most")
    for gpus in GPUS:
        before = fastest_before(configuration(longest), gpus, workload)
        before_s.append(before[1] if before else None)
        old = f"{before[1]:6.0f} s  {describe(before[0])}" if before else "nothing fits"
        print(f"   {gpus:5} GPUs  before        {old}")
        for name, staleness, found in (
            ("after", 0, after),
            ("asynchronous", STALENESS, ahead),
        ):
            best = suggest(MODEL, configuration(longest, staleness), gpus, workload)
            if best is None:
                print(f"               {name:12}  nothing fits")
                continue
            found.append(best)
            simulated = f" (simulated {simulate(best, seed=0):.0f} s)"
            print(
                f"               {name:12}  {best.total_s:6.0f} s  {describe(best)}"
                f"{simulated if staleness else ''}",
                flush=True,
            )
    return before_s, after, ahead


def print_parts(name: str, plans: list[Plan]) -> None:
    """Print the seconds of each part of a step, and how well added GPUs are used."""
    names = [part for part in REMEDIES if any(part in planned.parts_s for planned in plans)]
    print(f"\n   {name}: seconds of the parts that decide")
    print(f"   {'GPUs':>5} {'step':>7} {'of ideal':>9}  " + "".join(f"{n:>18}" for n in names))
    first = plans[0]
    for planned in plans:
        efficiency = first.total_s * first.gpus / (planned.total_s * planned.gpus)
        parts = planned.parts_s
        cells = "".join(f"{parts[n]:18.1f}" if n in parts else f"{'':18}" for n in names)
        print(f"   {planned.gpus:5} {planned.total_s:7.1f} {efficiency:8.0%}   {cells}")
    most = plans[-1]
    rollout = most.config.rollout
    answers = rollout.prompts_per_step * rollout.completions_per_prompt
    rows = answers // most.config.optimizer.minibatches_per_step
    print(
        f"   On {most.gpus} GPUs: {answers / most.total_s:.0f} answers a second to score, "
        f"{answers / most.total_s / ANSWERS_PER_S:.0%} of one process; "
        f"{rows // most.config.learner.data_parallel_size} sequences a minibatch and replica"
    )


def plot(results: dict[int, tuple[list[float | None], list[Plan], list[Plan]]]) -> None:
    """Draw the time of a step, and below it the parts of the synchronous one."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "scale"  # makes the file reproducible
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not outlines: a tenth of the size
    figure, axes = pyplot.subplots(2, len(results), figsize=(9, 7), sharex=True)
    colours = ("#00798c", "#66a182", "#d1495b", "#edae49", "#8d96a3", "#2e4057")
    for column, (longest, (before_s, after, ahead)) in enumerate(results.items()):
        times, shares = axes[0][column], axes[1][column]
        fits = [(n, s) for n, s in zip(GPUS, before_s, strict=True) if s is not None]
        times.plot(*zip(*fits, strict=True), color="#777777", marker="o", label="before")
        for plans, label, colour in (
            (after, "after", "#d1495b"),
            (ahead, f"after, max_staleness={STALENESS}", "#00798c"),
        ):
            gpus = [planned.gpus for planned in plans]
            seconds = [planned.total_s for planned in plans]
            times.plot(gpus, seconds, color=colour, marker="s", label=label)
        ideal = [after[0].total_s * after[0].gpus / n for n in GPUS]
        times.plot(
            GPUS, ideal, color="#777777", linestyle=":", label="twice the GPUs, half the time"
        )
        times.set(xscale="log", yscale="log")
        times.set_title(f"responses of up to {longest:,} tokens", fontsize=10)
        times.grid(alpha=0.3, which="both")
        parts = [
            [100 * planned.parts_s[name] / planned.total_s for planned in after]
            for name in REMEDIES
        ]
        gpus = [planned.gpus for planned in after]
        shares.stackplot(gpus, parts, labels=list(REMEDIES), colors=colours)
        shares.set(xlabel="H100, learner and servers", ylim=(0, 100))
        shares.set_xticks(GPUS, [str(number) for number in GPUS])
        shares.set_xticks([], minor=True)
    axes[0][0].set_ylabel("seconds a step")
    axes[1][0].set_ylabel("% of a synchronous step")
    axes[0][0].legend(fontsize=8)
    axes[1][0].legend(fontsize=8, loc="lower left")
    figure.suptitle("Qwen2.5-32B in INT8 as planned: 256 x 8 responses a step", fontsize=11)
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})
    print(f"\n{FIGURE} is ready")


def main() -> None:
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"matplotlib {version('matplotlib')}"
    )
    print("layouts: learner TP x PP x CP x DP + servers x TP")
    results = {}
    for longest in WORKLOADS:
        results[longest] = before_s, after, ahead = study_lengths(longest)
        print_parts("after", after)
        print_parts("asynchronous", ahead)
    plot(results)


if __name__ == "__main__":
    main()
