"""The page that `qurl plan` prints."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from qurl_megatron.planning.limits import largest_part
from qurl_megatron.planning.memory import GIB, GPU_BYTES
from qurl_megatron.planning.plan import Plan, layout_overrides
from qurl_megatron.planning.publish_time import PublishPlan


def print_plan(plan: Plan) -> None:
    """Print a plan: its layout, the memory of learner and servers, and the time of a step."""
    config, server = plan.config, plan.config.rollout.server
    console = Console(highlight=False)
    console.print(f"{plan.gpus} H100: {' '.join(layout_overrides(config))}", soft_wrap=True)
    console.print(
        _table(
            f"learner, {config.learner.world_size} GPUs: memory of the fullest GPU",
            f"GiB of {GPU_BYTES / GIB:.1f}",
            {
                **_gib(plan.learner_bytes),
                "or buckets, during a publish": plan.converter_bucket_bytes / GIB,
            },
            ("at most", plan.learner_total_bytes / GIB),
        ),
        _table(
            f"rollout.servers={config.rollout.servers}, in {config.quantization.format}, of "
            f"{server.tensor_parallel_size} GPUs each: memory of a GPU",
            f"GiB of {GPU_BYTES / GIB:.1f}",
            _gib(plan.server_bytes),
            ("total", sum(plan.server_bytes.values()) / GIB),
        ),
        _time_table(plan),
    )
    console.print(f"Limit: {largest_part(plan.parts_s)}.", soft_wrap=True)
    console.print(
        f"A server holds {plan.kv_tokens:,} tokens and decodes {plan.load.slots} sequences at "
        f"once. {_describe_publish(plan.publish)} The formulas, their sources and what they omit: "
        "memory.py, step_time.py, rollout_time.py and publish_time.py in qurl_megatron/planning. "
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


def _time_table(plan: Plan) -> Table:
    if plan.asynchronous is None:
        return _table("time of a step", "s", plan.step_s, ("total", plan.total_s))
    return _table(
        f"time of a step: rollout beside the rest; a server "
        f"decodes {plan.asynchronous.running:.0f} sequences at once",
        "s",
        plan.step_s,
        ("step", plan.total_s),
    )


def _table(title: str, unit: str, rows: dict[str, float], total: tuple[str, float]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", show_footer=True)
    table.add_column("", footer=total[0])
    table.add_column(unit, justify="right", footer=f"{total[1]:.1f}")
    for name, value in rows.items():
        table.add_row(name, f"{value:.1f}")
    return table


def _gib(parts: dict[str, int]) -> dict[str, float]:
    return {name: num_bytes / GIB for name, num_bytes in parts.items()}
