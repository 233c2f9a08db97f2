"""What an objective costs: `python -m benchmarks.objective_cost`.

Updates with `tis` alternate with updates with another objective, on one batch and one learner of
`benchmarks/growth.py`: a tiny Qwen2 in float32 on gloo, with one thread a rank. It has four layers,
32 sequences of 48 to 112 tokens, and micro batches of 1,024 tokens. The proximal log-probs are
those of the update's own pass. For each objective and context-parallel size it prints the median of
the pairs' ratios of seconds, with its 95 % interval from 1,000 resamplings of the pairs.
"""

import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap

from benchmarks import growth, machine
from qurl_megatron import device
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.algorithm.objective import PolicyLoss
from qurl_megatron.config.schema import LearnerConfig, Objective, ObjectiveConfig, OptimizerConfig
from qurl_megatron.learner.learner import Learner
from qurl_megatron.recipes import quickstart

OTHERS: tuple[Objective, ...] = ("acr", "sequence_tis")


def update_s(learner: Learner, objective: Objective) -> float:
    """Return the seconds of an update; all ranks begin it together."""
    batch = growth.make_batch(32) if device.rank() == 0 else TrainBatch.empty()
    share = learner.share(batch)
    device.from_rank_zero(lambda: None)
    began = time.perf_counter()
    learner.update(share, PolicyLoss(ObjectiveConfig(objective)), temperature=1.0)
    return time.perf_counter() - began


def ratios(model: Path, context: int, pairs: int) -> dict[str, list[float]]:
    """Return by objective the ratio of its seconds to those of `tis`, one a pair."""
    layout = LearnerConfig(
        context_parallel_size=context, dtype="float32", tokens_per_micro_batch=growth.MICRO_BATCH
    )
    learner = Learner(model, layout, OptimizerConfig(learning_rate=1e-6))
    measured: dict[str, list[float]] = {name: [] for name in OTHERS}
    for pair in range(1 + pairs):
        for name in OTHERS:
            order: list[Objective] = ["tis", name] if pair % 2 else [name, "tis"]
            seconds = {objective: update_s(learner, objective) for objective in order}
            if pair:  # the first one is not counted
                measured[name].append(seconds[name] / seconds["tis"])
    learner.close()
    return measured


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--context", type=int, default=[1, 2], nargs="+")
    arguments = parser.parse_args()
    machine.print_machine("torch", "megatron-core")
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        quickstart.build_model(model, seed=0, num_hidden_layers=4, **growth.DIMENSIONS)
        for context in arguments.context:
            of_ranks = machine.run_ranks(ratios, context, model, context, arguments.pairs)
            for name, values in of_ranks.items():
                interval = bootstrap([values], partial(np.median), n_resamples=1000)
                low, high = interval.confidence_interval
                print(
                    f"context parallel {context}, {name}: {np.median(values):.3f} times tis "
                    f"[{low:.3f}, {high:.3f}], {len(values)} pairs",
                    flush=True,
                )


if __name__ == "__main__":
    main()
