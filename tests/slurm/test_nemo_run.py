"""`qurl launch --executor slurm`: a nemo-run experiment as a job of a real Slurm."""

from __future__ import annotations

import json
import re
from pathlib import Path

from e2e.running import QURL
from slurm.cluster import Cluster, Job
from slurm.runs import WORDS, wait_for_end, wait_for_text

TIMEOUT_S = 300.0  # one command; importing nemo-run takes seconds on an idle machine


def test_a_launched_job_is_requeued_on_a_signal_and_completes(
    cluster: Cluster, tmp_path: Path
) -> None:
    def qurl(*words: str) -> str:
        return cluster.call(QURL, *words, cwd=tmp_path, timeout_s=TIMEOUT_S)

    options = ["--executor=slurm", "--partition=low", "--gpus-per-node=2", "--heterogeneous"]
    output = qurl("launch", *WORDS, "steps=100", "checkpoint.every_steps=1000", *options)
    number = re.fullmatch(r"runs/run: job (\d+)\n", output)
    assert number, output
    (directory,) = (tmp_path / "runs" / ".nemo_run" / "experiments" / "run").iterdir()
    log = directory / "run" / f"sbatch_qurl.run-0_{number[1]}.out"
    job = Job(cluster, number[1], log)
    wait_for_text(job, "step 3/")
    cluster.call("scancel", "--batch", "--signal=USR1", job.id)
    wait_for_text(job, "requeueing job")
    status = qurl("status", "runs/run")
    assert re.match(
        rf"runs/run: step \d+ of 100, newest checkpoint step_\d+, job {job.id} ", status
    )
    assert f"==> {log} <==" in qurl("logs", "runs/run")
    wait_for_text(job, "resuming after step")
    assert wait_for_end(job) == "COMPLETED", job.text()

    plan = json.loads((tmp_path / "runs" / "run" / "logs" / "plan.json").read_text())
    assert [(node["ranks"], len(node["servers"])) for node in plan["nodes"]] == [(2, 0), (0, 1)]
    status = "runs/run: step 100 of 100, newest checkpoint step_000100, finished\n"
    assert qurl("status", "runs/run") == status
    assert list((tmp_path / "runs" / "run" / "final_model").glob("*.safetensors"))
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert cluster.left_over() == []
