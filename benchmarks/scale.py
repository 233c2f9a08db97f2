"""Plan a 32B run on 24 to 1,024 GPUs: `python -m benchmarks.scale` prints it and draws a figure.

Qwen2.5-32B in INT8 on H100s, 256 x 8 responses a step with lognormal lengths: 2,048 tokens on
average and 8,192 at most, then 8,192 on average and 31,744 at most. For each number of GPUs it
prints the fastest layout that fits, for a synchronous run and for an asynchronous one with
`rollout.max_staleness` = 2. The asynchronous step is also given as a simulation of every sequence
finds it (`benchmarks/overlap.py`, one seed).

Then it prints the parts that make up a step as GPUs are added, which shows what saturates first,
and how much of the speed of the fewest GPUs is left on each. The figure is docs/plan_32b.svg.

Everything is arithmetic on the constants of `planning/step_time.py`; nothing is measured.
"""

from pathlib import Path

from benchmarks import machine
from benchmarks.overlap import describe, simulate
from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import with_overrides
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.planning.lengths import Workload
from qurl_megatron.planning.plan import REMEDIES, Plan, suggest
from qurl_megatron.recipes.scaling_32b import study

MODEL = KNOWN_MODELS["Qwen2.5-32B"]
GPUS = (24, 32, 64, 128, 256, 512, 1024)
# Longest response -> its workload.
WORKLOADS = {8192: Workload(512, 2048, 1.0), 31_744: Workload(512, 8192, 1.0)}
STALENESS = 2
FIGURE = Path(__file__).parent.parent / "docs" / "plan_32b.svg"


def configuration(longest: int, max_staleness: int = 0) -> Config:
    words = [f"rollout.max_response_length={longest}", f"rollout.max_staleness={max_staleness}"]
    return with_overrides(study("Qwen2.5-32B", 64, "int8"), words)


def study_lengths(longest: int) -> dict[int, list[Plan]]:
    """Print one table; return the plans by staleness, without numbers of GPUs that are too few."""
    workload = WORKLOADS[longest]
    plans: dict[int, list[Plan]] = {0: [], STALENESS: []}
    print(f"\nresponses of {workload.mean_response:,.0f} tokens on average, {longest:,} at most")
    for gpus in GPUS:
        for staleness, found in plans.items():
            name = f"   {gpus:5} GPUs  {'asynchronous' if staleness else 'synchronous':12}"
            best = suggest(MODEL, configuration(longest, staleness), gpus, workload)
            if best is None:
                print(f"{name}  nothing fits")
                continue
            found.append(best)
            simulated = f" (simulated {simulate(best, seed=0):.0f} s)"
            print(
                f"{name}  {best.total_s:6.0f} s  {describe(best)}{simulated if staleness else ''}",
                flush=True,
            )
    return plans


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


def plot(results: dict[int, dict[int, list[Plan]]]) -> None:
    """Draw the time of a step, and below it the parts of the synchronous one."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "scale"  # makes the file reproducible
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not outlines: a tenth of the size
    figure, axes = pyplot.subplots(2, len(results), figsize=(9, 7), sharex=True)
    colours = ("#00798c", "#66a182", "#d1495b", "#edae49", "#8d96a3", "#2e4057")
    for column, (longest, plans) in enumerate(results.items()):
        times, shares = axes[0][column], axes[1][column]
        for (staleness, of_staleness), colour in zip(
            plans.items(), ("#d1495b", "#00798c"), strict=True
        ):
            gpus = [planned.gpus for planned in of_staleness]
            seconds = [planned.total_s for planned in of_staleness]
            times.plot(gpus, seconds, color=colour, marker="s", label=f"max_staleness={staleness}")
        synchronous = plans[0]
        ideal = [synchronous[0].total_s * synchronous[0].gpus / n for n in GPUS]
        times.plot(
            GPUS, ideal, color="#777777", linestyle=":", label="twice the GPUs, half the time"
        )
        times.set(xscale="log", yscale="log")
        times.set_title(f"responses of up to {longest:,} tokens", fontsize=10)
        times.grid(alpha=0.3, which="both")
        parts = [
            [100 * planned.parts_s[name] / planned.total_s for planned in synchronous]
            for name in REMEDIES
        ]
        gpus = [planned.gpus for planned in synchronous]
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
    machine.parser(__doc__).parse_args()
    machine.print_machine("matplotlib")
    print("layouts: learner TP x PP x CP x DP + servers x TP")
    results = {}
    for longest in WORKLOADS:
        results[longest] = plans = study_lengths(longest)
        print_parts("synchronous", plans[0])
        print_parts("asynchronous", plans[STALENESS])
    plot(results)


if __name__ == "__main__":
    main()
