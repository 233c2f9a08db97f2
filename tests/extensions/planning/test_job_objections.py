"""What the plan of a run says against its jobs, before they cost anything."""

import itertools
import re
from pathlib import Path

import pytest

from qurl_megatron.config.gpus import DGX_H100, node_of
from qurl_megatron.config.nodes import gpus_of_run
from qurl_megatron.config.schema import Config
from qurl_megatron.config.text import with_overrides
from qurl_megatron.extensions.planning import job
from qurl_megatron.extensions.planning.job import idle_gpus, objections, objections_to_limit
from qurl_megatron.extensions.planning.plan import Plan, most_servers, plan
from qurl_megatron.launch.nodes import smallest_plan
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.recipes import dapo_aime, quickstart, scaling_32b

HOUR_S = 3600


@pytest.fixture(scope="module")
def planned() -> Plan:
    """Return the plan of 800 steps of a 32B model, with a checkpoint every 20."""
    return plan(KNOWN_MODELS["Qwen2.5-32B"], scaling_32b.recipe(), 64)


def test_a_job_whose_run_saves_and_ends_in_time_has_no_objection(planned: Plan) -> None:
    assert 200 < planned.total_s < 300
    assert [*objections_to_limit(planned, 4 * HOUR_S, 21)] == []
    assert [*objections_to_limit(planned, float("inf"), 1)] == []


@pytest.mark.parametrize(
    ("limit_s", "max_jobs", "starts"),
    [
        (100, 10_000, "a step is planned to take 2.. s, and a job only 100 s: none would complete"),
        (HOUR_S, 100, "between two checkpoints 1.. h are planned to pass, and a job takes 1.0 h"),
        (4 * HOUR_S, 3, "800 steps are planned to take 5... h, and 3 jobs 12.0 h: the run would"),
    ],
)
def test_a_limit_is_compared_with_a_step_a_checkpoint_and_the_run(
    planned: Plan, limit_s: float, max_jobs: int, starts: str
) -> None:
    (objection,) = objections_to_limit(planned, limit_s, max_jobs)
    assert re.match(starts, objection), objection


def test_checkpoints_by_the_clock_answer_the_second_objection(planned: Plan) -> None:
    planned.config.checkpoint.every_minutes = 30
    try:
        assert [*objections_to_limit(planned, HOUR_S, 100)] == []
    finally:
        planned.config.checkpoint.every_minutes = 0


def test_what_a_plan_refuses_is_an_objection_and_what_it_does_not_know_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of(config: Config, *words: str) -> list[str]:
        return objections(with_overrides(config, list(words)), DGX_H100, float("inf"), 1)

    assert of(quickstart.recipe()) == []  # its model is not built yet
    architecture = KNOWN_MODELS["Qwen2.5-32B"]
    monkeypatch.setattr(job.Architecture, "from_directory", lambda path: architecture)
    (objection,) = of(dapo_aime.recipe(), f"model={Path.cwd()}")
    assert objection.startswith("on H100 GPUs the run does not fit: learner of tensor x pipeline")
    (objection,) = of(scaling_32b.recipe(), "learner.tensor_parallel_size=3")
    assert objection.startswith("`qurl plan` refuses this run: ")
    assert of(dapo_aime.recipe(), "objective.advantage_estimator=gae") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("learner.tensor_parallel_size=2 rollout.servers=6", ""),
        (
            "learner.tensor_parallel_size=2 rollout.servers=2",
            "4 of the 8 GPUs of a job's node stay idle: rollout.servers=6 would use them; "
            "--gpus-per-node 4 --sbatch exclusive=false leaves them to other jobs",
        ),
        (
            "learner.tensor_parallel_size=3 rollout.server.tensor_parallel_size=2",
            "3 of the 8 GPUs of a job's node stay idle: rollout.servers=2 would use 2 of them; "
            "--gpus-per-node 5 --sbatch exclusive=false leaves them to other jobs",
        ),
        (
            "learner.data_parallel_size=12 rollout.server.tensor_parallel_size=4",
            "8 of the 24 GPUs of a job's 3 nodes stay idle: rollout.servers=2 would use 4 of them",
        ),
        (
            "learner.data_parallel_size=12 rollout.placement=colocated rollout.servers=12",
            "4 of the 16 GPUs of a job's 2 nodes stay idle: a larger "
            "learner.data_parallel_size would use them",
        ),
    ],
)
def test_idle_gpus_of_a_jobs_nodes_are_counted_with_what_would_use_them(
    words: str, said: str
) -> None:
    config = with_overrides(Config(), ["evaluation.problems=0", *words.split()])
    assert [*idle_gpus(config, DGX_H100)] == [said][: bool(said)]


@pytest.mark.parametrize("gpus_per_node", [4, 8])
def test_a_job_asks_for_the_gpus_that_were_planned(gpus_per_node: int) -> None:
    node, layouts = node_of("H100", gpus_per_node), 0
    for ranks, size, evaluation, placement in itertools.product(
        (1, 2, 3, 4, 6, 8, 12, 16), (1, 2, 4), (0, 1, 2), ("separate", "colocated")
    ):
        words = [f"learner.data_parallel_size={ranks}", f"rollout.placement={placement}"]
        words += [
            f"rollout.server.tensor_parallel_size={size}",
            f"evaluation.problems={evaluation}",
        ]
        words += [f"evaluation.server.tensor_parallel_size={max(1, evaluation)}"]
        config = with_overrides(Config(), words)
        numbers = [4, 8, 16, 24, 32] if placement == "separate" else [ranks]
        for gpus in numbers:
            if gpus % gpus_per_node or not (servers := most_servers(config, gpus, node)):
                continue
            if placement == "colocated" and (ranks < size or ranks % gpus_per_node):
                continue
            layouts += 1
            config.rollout.servers = servers
            asked = sum(map(len, smallest_plan(config, gpus_per_node)))
            assert asked * gpus_per_node == gpus, (words, servers)
            idle = sum(int(said.split()[0]) for said in idle_gpus(config, node))
            assert idle == gpus - gpus_of_run(config)
    assert layouts > 100
