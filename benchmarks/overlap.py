"""Where the tail of long responses is hidden: `python benchmarks/overlap.py`.

Plans Qwen2.5-32B on 64 H100s with lognormal response lengths, synchronous and with
`rollout.max_staleness` of 1, 2 and 4: the time of a step as `qurl plan` estimates it, and as a
simulation of every sequence on every server finds it (median and range over seeds). First in one
layout, then in the fastest layout of each, which shows how the GPUs are best split.

Everything is arithmetic on the constants of `planning/step_time.py`; nothing is measured.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from qurl_megatron.config.overrides import with_overrides
from qurl_megatron.planning import plan
from qurl_megatron.planning.step_time import Workload
from qurl_megatron.recipes.scaling_32b import ARCHITECTURES, study

MODEL = ARCHITECTURES["Qwen2.5-32B"]
GPUS = 64
WORKLOAD = Workload(mean_prompt=512, mean_response=2048, log_deviation=1.0)
STALENESS = (0, 1, 2, 4)
LOG_DEVIATIONS = (0.5, 1.0, 1.5)
SIMULATED_STEPS = 24
SEEDS = 3
CHUNK = 64.0  # tokens after which the growing context changes the time of a token


class SimulatedServer:
    """A server that decodes up to `slots` sequences at once, in the order of their arrival."""

    def __init__(self, token_s: Callable[[float, float], float], slots: int) -> None:
        """`token_s(sequences, mean_age)` is the time of a token for all running sequences."""
        self._token_s = token_s
        self._slots = slots
        self._waiting: deque[tuple[int, int]] = deque()  # batch and tokens of a sequence
        self._running: list[tuple[float, float, int]] = []  # clock at the end and start, batch
        self._clock = 0.0  # tokens that a sequence which always ran has decoded
        self._sum_of_starts = 0.0
        self._unfinished: Counter[int] = Counter()  # sequences by batch
        self._finished_s: dict[int, float] = {}  # end of the last finished sequence, by batch
        self.now_s = 0.0

    @property
    def num_sequences(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def mean_age(self) -> float:
        return self._clock - self._sum_of_starts / len(self._running) if self._running else 0.0

    def add(self, batch: int, tokens: int) -> None:
        self._waiting.append((batch, tokens))
        self._unfinished[batch] += 1

    def finish(self, batch: int) -> float:
        """Decode until `batch` is finished; return the time at which it was."""
        while self._unfinished[batch]:
            self._decode(math.inf)
        return self._finished_s.get(batch, 0.0)

    def decode_until(self, time_s: float) -> None:
        while self.num_sequences and self.now_s < time_s:
            self._decode(time_s)
        self.now_s = max(self.now_s, time_s)

    def _decode(self, time_s: float) -> None:
        """Decode until a sequence ends, but at most `CHUNK` tokens and until `time_s`."""
        while self._waiting and len(self._running) < self._slots:
            batch, tokens = self._waiting.popleft()
            heapq.heappush(self._running, (self._clock + tokens, self._clock, batch))
            self._sum_of_starts += self._clock
        token_s = self._token_s(len(self._running), self.mean_age)
        end, start, batch = self._running[0]
        tokens_left = min(end - self._clock, CHUNK)
        if self.now_s + tokens_left * token_s > time_s:
            self._clock += (time_s - self.now_s) / token_s
            self.now_s = time_s
            return
        self.now_s += tokens_left * token_s
        self._clock += tokens_left
        if end - self._clock < 1e-6:
            heapq.heappop(self._running)
            self._sum_of_starts -= start
            self._unfinished[batch] -= 1
            self._finished_s[batch] = self.now_s


def simulate(planned: plan.Plan, seed: int) -> float:
    """Return the mean seconds of a step, without the first steps, in which the pipeline fills."""
    rollout, max_staleness = planned.config.rollout, planned.config.rollout.max_staleness
    generator = np.random.default_rng(seed)
    learner_s = sum(time_s for phase, time_s in planned.step_s.items() if phase != "rollout")
    load = planned.load
    servers = [SimulatedServer(load.token_s, load.slots) for _ in range(rollout.servers)]

    def issue(batch: int) -> None:
        for _ in range(rollout.prompts_per_step):
            server = min(servers, key=lambda server: server.num_sequences)
            for fraction in generator.random(rollout.completions_per_prompt):
                server.add(batch, round(load.lengths.quantile(fraction)) or 1)
        for server in servers:
            server.now_s += load.prompts_s

    published_s = [0.0]
    for batch in range(max_staleness + 1):
        issue(batch)
    for batch in range(SIMULATED_STEPS):
        finished_s = max(server.finish(batch) for server in servers)
        published_s.append(max(published_s[-1], finished_s) + learner_s)
        for server in servers:
            server.decode_until(published_s[-1])
            server.now_s += load.pause_s(server.num_running)
        issue(batch + max_staleness + 1)
    first = SIMULATED_STEPS // 3
    return (published_s[-1] - published_s[first]) / (SIMULATED_STEPS - first)


def fastest(max_staleness: int, workload: Workload) -> plan.Plan:
    """Return the plan with the shortest step over all layouts."""
    config = with_overrides(study("", GPUS, "int8"), [f"rollout.max_staleness={max_staleness}"])
    found = plan.suggest(MODEL, config, GPUS, workload=workload)
    assert found is not None
    return found


def describe(planned: plan.Plan) -> str:
    """Return the layout, as learner TP x PP x CP x DP + servers x TP."""
    learner, server = planned.config.learner, planned.config.rollout.server
    return (
        f"{learner.tensor_parallel_size} x {learner.pipeline_parallel_size} x "
        f"{learner.context_parallel_size} x {learner.data_parallel_size} + "
        f"{planned.config.rollout.servers} x {server.tensor_parallel_size}"
    )


def print_splits(workload: Workload) -> None:
    """Print the fastest layout of every staleness, and its time with other stalenesses."""
    print(f"   {'staleness':>9}  {'layout':24} {'planned':>8} {'simulated':>16}  limited by")
    for max_staleness in STALENESS:
        planned = fastest(max_staleness, workload)
        print_row(planned)
    print()


def print_row(planned: plan.Plan) -> None:
    simulated = [simulate(planned, seed) for seed in range(SEEDS)]
    limit = planned.asynchronous.limit if planned.asynchronous else "everything in turn"
    spread = f"{statistics.median(simulated):.1f} [{min(simulated):.1f}, {max(simulated):.1f}]"
    print(
        f"   {planned.config.rollout.max_staleness:9}  {describe(planned):24} "
        f"{planned.total_s:8.1f} {spread:>22}  {limit}",
        flush=True,
    )


def print_one_layout(workload: Workload) -> None:
    """Print every staleness in the layout that is fastest when synchronous."""
    layout = fastest(0, workload).config
    for max_staleness in STALENESS:
        config = with_overrides(layout, [f"rollout.max_staleness={max_staleness}"])
        print_row(plan.plan(MODEL, config, GPUS, workload=workload))
    print()


def main() -> None:
    print(f"Qwen2.5-32B in INT8, {GPUS} H100s, 256 x 8 responses of up to 8192 tokens\n")
    for log_deviation in LOG_DEVIATIONS:
        workload = dataclasses.replace(WORKLOAD, log_deviation=log_deviation)
        print(f"lognormal lengths, mean {workload.mean_response}, deviation {log_deviation}")
        print("   in the layout that is fastest when synchronous")
        print_one_layout(workload)
        print("   in the fastest layout of each")
        print_splits(workload)


if __name__ == "__main__":
    main()
