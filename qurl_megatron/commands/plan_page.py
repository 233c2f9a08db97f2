"""The page that `qurl plan` prints."""

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from qurl_megatron.planning.memory import GIB, GPU_BYTES, total_bytes
from qurl_megatron.planning.plan import Plan, largest_part, layout_overrides
from qurl_megatron.planning.step_time import PublishPlan


def print_plan(plan: Plan) -> None:
    """Print a plan: its layout, the memory of learner and servers, and the time of a step."""
    config, server = plan.config, plan.config.rollout.server
    console = Console(highlight=False)
    console.print(f"{plan.gpus} H100: {' '.join(layout_overrides(config))}", soft_wrap=True)
    gib = f"GiB of {GPU_BYTES / GIB:.1f}"
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
    learner_bytes = {
        **plan.learner_bytes,
        "or buckets, during a publish": plan.converter_bucket_bytes,
    }
    most = total_bytes(plan.learner_bytes, plan.converter_bucket_bytes)
    server_bytes = plan.server_bytes
    console.print(
        _table(of_learner, gib, learner_bytes, ("at most", most), GIB),
        _table(of_server, gib, server_bytes, ("total", sum(server_bytes.values())), GIB),
        _table(of_step, "s", plan.step_s, (whole, plan.total_s)),
    )
    console.print(f"Limit: {largest_part(plan.parts_s)}.", soft_wrap=True)
    console.print(
        f"A server holds {plan.kv_tokens:,} tokens and decodes {plan.load.slots} sequences at "
        f"once. {_describe_publish(plan.publish)} The formulas, their sources and what they omit: "
        "memory.py, step_time.py and rollout_time.py in qurl_megatron/planning. "
        "The errors of the estimate: docs/findings/planning.md.",
        soft_wrap=True,
    )


def _describe_publish(publish: PublishPlan) -> str:
    full = f"{publish.full_bytes / 1e9:.1f} GB"
    if publish.is_direct:
        return f"A publish writes {full} into the parameters of each server."
    if publish.sent_bytes == publish.full_bytes:
        return f"A publish of all tensors sends {full} to each server."
    return (
        f"A publish sends a server what changed, about {publish.sent_bytes / 1e9:.2f} of {full}, "
        "and all of it to one that joins."
    )


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
