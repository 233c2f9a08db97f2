"""The page that `qurl plan` prints."""

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from qurl_megatron.config.gpus import GIB, H100
from qurl_megatron.extensions.planning.plan import Plan, largest_part, layout_overrides
from qurl_megatron.machine.output import gigabytes
from qurl_megatron.memory.disk import checkpoint_bytes
from qurl_megatron.memory.estimate import total_bytes
from qurl_megatron.report.progress import table_console

PUBLISHED = {
    "experts": (18, 1.2, 2.9),
    "dense, long answers": (6, 0.9, 1.3),
    "dense, short answers": (4, 0.9, 1.4),
}
"""By kind: how many steps were published, and the range of their time over the planned time.

`benchmarks/plan.py` has the steps.
"""


def print_plan(plan: Plan, placements_s: Mapping[str, float | None]) -> None:
    """Print a plan: its layout, the memory of learner and servers, and the time of a step.

    `placements_s` has the seconds of a step in each placement that was compared; None: no fit.
    """
    config, server = plan.config, plan.config.rollout.server
    console = table_console()
    print_layout(console, plan)
    gib = f"GiB of {plan.node.gpu.memory_bytes / GIB:.1f}"
    of_learner = f"learner, {config.learner.world_size} GPUs: memory of the fullest GPU"
    of_server = (
        f"rollout.servers={config.rollout.servers}, in {config.quantization.format}, of "
        f"{server.tensor_parallel_size} GPUs each: memory of a GPU"
    )
    of_step, whole = "time of a step", "total"
    if plan.asynchronous:
        of_step += ": rollout beside the rest; a server "
        of_step += f"decodes {plan.asynchronous.running:.0f} sequences at once"
        whole = "step"
    learner_bytes = dict(plan.learner_bytes)
    learner_bytes["or buckets, during a publish"] = learner_bytes.pop("buckets")
    most = total_bytes(plan.learner_bytes)
    server_bytes = plan.server_bytes
    console.print(
        _table(of_learner, gib, learner_bytes, ("at most", most), GIB),
        _table(of_server, gib, server_bytes, ("total", sum(server_bytes.values())), GIB),
        _table(of_step, "s", plan.step_s, (whole, plan.total_s)),
    )
    lines = [*_compare(plan, placements_s), f"Limit: {largest_part(plan.parts_s)}."]
    for line in (*lines, *_describe(plan)):
        console.print(line, soft_wrap=True)


def print_layout(console: Console, plan: Plan) -> None:
    """Print the layout of a plan on a line of its own, to be pasted behind a command."""
    console.print(f"{plan.gpus} {plan.node.gpu.name}:")
    console.print(" ".join(layout_overrides(plan.config)), soft_wrap=True)


def describe_workload(plan: Plan) -> Iterator[str]:
    """Yield sentences on the completions that a step has."""
    rollout, workload = plan.config.rollout, plan.workload
    yield (
        f"A step has {rollout.prompts_per_step} prompts x {rollout.completions_per_prompt} "
        f"completions. Prompts have {workload.mean_prompt:,.0f} tokens; lengths of completions are "
        f"lognormal (deviation {workload.log_deviation:g}), with a mean of "
        f"{workload.mean_completion:,.0f} and at most {plan.load.lengths.maximum:,} tokens."
    )
    if rollout.agent:
        yield (
            f"A completion is an episode of turns: {workload.observed:.0%} of its tokens are read "
            "between them."
        )


def _compare(plan: Plan, placements_s: Mapping[str, float | None]) -> Iterator[str]:
    """Yield sentences on the time in each placement, and on what colocated GPUs hold."""
    if len(placements_s) > 1:
        times = [
            f"{name} {'does not fit' if time_s is None else f'{time_s:.1f} s'}"
            for name, time_s in placements_s.items()
        ]
        yield (
            f"A step by placement: {', '.join(times)}. ahead is separate with "
            "rollout.max_staleness=1."
        )
    if own := plan.colocation:
        server = plan.config.rollout.server
        phases = ", ".join(f"{name} {size / GIB:.1f}" for name, size in own.gpu_bytes.items())
        what = "KV cache and graphs" if server.releases == "cache" else "weights too"
        yield (
            f"Learner and servers are colocated. Of {plan.node.gpu.memory_bytes / GIB:.1f} GiB of "
            f"a GPU they take: {phases}. Servers that sleep give back their {what} "
            f"(rollout.server.releases={server.releases}). While they sample, the learner waits in "
            f"{gigabytes(own.node_bytes)} of each node's memory; each step copies up to "
            f"{gigabytes(own.waiting_bytes)} of a GPU there and back over PCIe, in "
            f"{own.copies_s:.1f} s."
        )


def _describe(plan: Plan) -> Iterator[str]:
    """Yield sentences on what was planned, what it costs, how far off it may be, and why."""
    config, workload = plan.config, plan.workload
    yield from describe_workload(plan)
    publish = "writes {} into the parameters of" if plan.publish.is_direct else "sends {} to"
    yield (
        f"A server holds {plan.kv_tokens:,} tokens and decodes {plan.load.slots} sequences at "
        f"once. A publish {publish.format(gigabytes(plan.publish.num_bytes))} each server."
    )
    hours = config.steps * plan.total_s / 3600
    yield (
        f"{config.steps} steps take {hours:,.1f} hours, {hours * plan.gpus:,.0f} GPU-hours, "
        "without evaluation and checkpoints. A checkpoint takes "
        f"{gigabytes(checkpoint_bytes(plan.architecture, config))}."
    )
    kind = f"dense, {'long' if workload.mean_length >= 2048 else 'short'} answers"
    kind = "experts" if plan.architecture.num_experts else kind
    number, least, most = PUBLISHED[kind]
    yield (
        f"Error to expect: {number} published steps ({kind}; NeMo-RL on H100) took {least:.1f} to "
        f"{most:.1f} times as long as planned. docs/findings/planning.md has them; the formulas, "
        "their sources and what they omit are in memory/estimate.py, and in step_time.py and "
        "rollout_time.py in extensions/planning."
    )
    if not_counted := [*_not_counted(plan)]:
        yield f"Not counted: {'; '.join(not_counted)}."


def _not_counted(plan: Plan) -> Iterator[str]:
    """Yield what the configuration sets and the plan leaves out."""
    config, rollout = plan.config, plan.config.rollout
    if rollout.dynamic_sampling_tries:
        yield "prompts that rollout.dynamic_sampling_tries samples again"
    if rollout.agent:
        yield "the time of an agent's tools"
    if config.quantization.publish != "full":
        yield f"what quantization.publish={config.quantization.publish} saves"
    if rollout.stages:
        yield "the times of rollout.stages, only their memory"
    if config.quantization.keep:
        yield "the time of layers that quantization.keep leaves in BF16"
    if plan.node.gpu is not H100:
        yield f"how much of its rates {plan.node.gpu.name} reaches, taken to be H100's part"


def _table(
    title: str,
    unit: str,
    rows: Mapping[str, float],
    total: tuple[str, float],
    unit_size: int = 1,
) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", show_footer=True)
    table.add_column("", footer=total[0])
    table.add_column(unit, justify="right", footer=f"{total[1] / unit_size:.1f}")
    for name, value in rows.items():
        table.add_row(name, f"{value / unit_size:.1f}")
    return table
