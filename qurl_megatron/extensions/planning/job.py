"""What the plan of a run says against its Slurm jobs: idle GPUs, too little memory or time."""

import dataclasses
import math
from collections.abc import Iterator

from qurl_megatron.config.gpus import Node
from qurl_megatron.config.nodes import gpus_of_run, nodes_of_run
from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.validate import check_weight_format
from qurl_megatron.extensions.colocated.fit import DoesNotFit
from qurl_megatron.extensions.planning.lengths import Workload
from qurl_megatron.extensions.planning.plan import Plan, most_servers, plan_run
from qurl_megatron.files import read_json_lines
from qurl_megatron.model.architecture import Architecture, ArchitectureError


def objections(config: Config, node: Node, limit_s: float, max_jobs: int) -> list[str]:
    """Return the plan's objections to the jobs of a run, one sentence each.

    There are none if plans do not support the run, or if its model is not built yet.

    Args:
        limit_s: time limit of a job; infinity for none.
        max_jobs: how many successive jobs may train the run.
    """
    if config.objective.advantage_estimator == "gae" or config.rollout.servers_at:
        return []
    try:
        architecture = Architecture.from_directory(config.model)
    except ArchitectureError:
        return []
    done = len(read_json_lines(config.run_dir / "metrics.jsonl"))
    try:
        check_weight_format(config.quantization.format, [node.gpu.capability])
        left = dataclasses.replace(config, steps=max(0, config.steps - done))
        plan = plan_run(architecture, left, Workload.of(config), node)
    except DoesNotFit as error:
        return [f"on {node.gpu.name} GPUs the run does not fit: {error}"]
    except ConfigError as error:
        return [f"`qurl plan` refuses this run: {error}"]
    return [*objections_to_limit(plan, limit_s, max_jobs)]


def idle_gpus(config: Config, node: Node) -> Iterator[str]:
    """Yield a sentence on the GPUs of a job's nodes that a run leaves idle, and what uses them."""
    nodes, used = sum(nodes_of_run(config, node.gpus)), gpus_of_run(config)
    idle = nodes * node.gpus - used
    if not idle:
        return
    rollout = config.rollout
    remedy = "a larger learner.data_parallel_size would use them"
    if more := most_servers(config, nodes * node.gpus, node) - rollout.servers:
        taken = more * rollout.server.tensor_parallel_size
        which = "them" if taken == idle else f"{taken} of them"
        remedy = f"rollout.servers={rollout.servers + more} would use {which}"
    if nodes == 1:
        remedy += f"; --gpus-per-node {used} --sbatch exclusive=false leaves them to other jobs"
    whole = f"{nodes} nodes" if nodes > 1 else "node"
    yield f"{idle} of the {nodes * node.gpus} GPUs of a job's {whole} stay idle: {remedy}"


def objections_to_limit(plan: Plan, limit_s: float, max_jobs: int) -> Iterator[str]:
    """Yield the plan's objections to jobs of `limit_s` seconds, one sentence each."""
    step_s, steps = plan.total_s, plan.config.steps
    if step_s > limit_s:
        yield (
            f"a step is planned to take {_hours(step_s)}, and a job only {_hours(limit_s)}: none "
            "would complete a step; give a longer --time"
        )
        return
    checkpoint, total_s = plan.config.checkpoint, steps * step_s
    interval_s = min(checkpoint.every_steps * step_s, total_s)
    if checkpoint.every_minutes:
        interval_s = min(interval_s, max(60 * checkpoint.every_minutes, step_s))
    if interval_s > limit_s:
        yield (  # the advice is a quarter of the limit, in minutes
            f"between two checkpoints {_hours(interval_s)} are planned to pass, and a job takes "
            f"{_hours(limit_s)}: one that dies loses all its steps; give "
            f"checkpoint.every_minutes={max(1, round(limit_s / 240))}"
        )
    if total_s > max_jobs * limit_s:
        yield (
            f"{steps} steps are planned to take {_hours(total_s)}, and {max_jobs} jobs "
            f"{_hours(max_jobs * limit_s)}: the run would not be finished; give --max-restarts "
            f"{math.ceil(total_s / limit_s) - 1}, or a longer --time"
        )


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds:.0f} s"
