"""The run that the tests submit, and functions that wait for its output and end."""

import json
from pathlib import Path
from typing import Any

from e2e.running import SMALL
from qurl_megatron.launch.experiment import JobOptions, job_script
from qurl_megatron.launch.recipe import load_recipe
from slurm.cluster import GPUS_PER_NODE, Job

TIMEOUT_S = 900.0  # starting takes a minute on an idle machine
# Of a job that has not ended; a preempted one is signalled for a moment.
GOING_ON = ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING")
WORDS = [
    "quickstart",
    *SMALL,
    "rollout.server.mem_fraction_static=0.6",  # other servers take memory while one starts
]


def script_of(*overrides: str, **options: Any) -> str:
    """Return the script of a job of the run with overrides and options, in this directory."""
    recipe = load_recipe(WORDS[0], [*WORDS[1:], *overrides])
    options = {"gpus_per_node": GPUS_PER_NODE, **options}
    return job_script(recipe.config, recipe, JobOptions(**options))


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wait_for_text(job: Job, pattern: str, count: int = 1) -> None:
    """Wait until the output has `pattern` `count` times; fail if the job ends first."""

    def look() -> str:
        text = job.text()
        if text.count(pattern) < count:
            state = job.state()
            assert state in GOING_ON, f"{state}:\n{text}"
        return text

    job.cluster.wait_for(look, lambda text: text.count(pattern) >= count, TIMEOUT_S, repr(pattern))


def wait_for_end(job: Job) -> str:
    """Wait until the job has ended; return its last state."""
    ends = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
    job.cluster.wait_for(job.state, lambda state: state in ends, TIMEOUT_S, "ended")
    return job.state()
