"""Where the tail of long responses is hidden: `python -m benchmarks.overlap`.

Plans Qwen2.5-32B on 64 H100s with lognormal response lengths, synchronous and with
`rollout.max_staleness` of 1, 2 and 4, in the layout that is fastest when synchronous. It prints the
time of a step as `qurl plan` estimates it, and as a simulation of every sequence on every server
finds it (median and range over seeds).

Everything is arithmetic on the constants of `planning/step_time.py`; nothing is measured.
"""

import dataclasses
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from benchmarks import machine
from qurl_megatron.config.text import with_overrides
from qurl_megatron.model.known import KNOWN_MODELS
from qurl_megatron.planning import plan
from qurl_megatron.planning.lengths import Workload
from qurl_megatron.planning.plan import Plan
from qurl_megatron.recipes.scaling_32b import study

MODEL = KNOWN_MODELS["Qwen2.5-32B"]
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
        self.running: list[tuple[float, float, int]] = []  # clock at the end and start, batch
        self._clock = 0.0  # tokens that a sequence which always ran has decoded
        self._sum_of_starts = 0.0
        self._unfinished: Counter[int] = Counter()  # sequences by batch
        self._finished_s: dict[int, float] = {}  # end of the last finished sequence, by batch
        self.now_s = 0.0

    @property
    def num_sequences(self) -> int:
        """The sequences that it decodes or will decode."""
        return len(self._waiting) + len(self.running)

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
        while self._waiting and len(self.running) < self._slots:
            batch, tokens = self._waiting.popleft()
            heapq.heappush(self.running, (self._clock + tokens, self._clock, batch))
            self._sum_of_starts += self._clock
        mean_age = self._clock - self._sum_of_starts / len(self.running)
        token_s = self._token_s(len(self.running), mean_age)
        end, start, batch = self.running[0]
        tokens_left = min(end - self._clock, CHUNK)
        if self.now_s + tokens_left * token_s > time_s:
            self._clock += (time_s - self.now_s) / token_s
            self.now_s = time_s
            return
        self.now_s += tokens_left * token_s
        self._clock += tokens_left
        if end - self._clock < 1e-6:
            heapq.heappop(self.running)
            self._sum_of_starts -= start
            self._unfinished[batch] -= 1
            self._finished_s[batch] = self.now_s


def simulate(planned: Plan, seed: int) -> float:
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
            server.now_s += load.pause_s(len(server.running))
        issue(batch + max_staleness + 1)
    first = SIMULATED_STEPS // 3
    return (published_s[-1] - published_s[first]) / (SIMULATED_STEPS - first)


def describe(planned: Plan) -> str:
    """Return the layout: learner TP x PP x CP x DP, recomputation, then servers x TP."""
    learner, rollout = planned.config.learner, planned.config.rollout
    sizes = [learner.tensor_parallel_size, learner.pipeline_parallel_size]
    sizes += [learner.context_parallel_size, learner.data_parallel_size]
    words = [" x ".join(map(str, sizes))]
    if learner.recompute:
        layers = learner.recompute_layers
        words.append(learner.recompute + (f" of {layers} layers" if layers else ""))
    if learner.offload_optimizer:
        words.append("offloaded")
    return f"{', '.join(words)} + {rollout.servers} x {rollout.server.tensor_parallel_size}"


def main() -> None:
    machine.parser(__doc__).parse_args()
    print(f"Qwen2.5-32B in INT8, {GPUS} H100s, 256 x 8 responses of up to 8192 tokens\n")
    for log_deviation in LOG_DEVIATIONS:
        workload = dataclasses.replace(WORKLOAD, log_deviation=log_deviation)
        layout = plan.suggest(MODEL, study("", GPUS, "int8"), GPUS, workload=workload)
        print(f"lognormal lengths, mean {workload.mean_response}, deviation {log_deviation}")
        print(f"   {'staleness':>9}  {'planned':>8} {'simulated':>22}  limited by")
        for max_staleness in STALENESS:
            words = [f"rollout.max_staleness={max_staleness}"]
            planned = plan.plan(
                MODEL, with_overrides(layout.config, words), GPUS, workload=workload
            )
            simulated = [simulate(planned, seed) for seed in range(SEEDS)]
            limit = planned.asynchronous.limit if planned.asynchronous else "everything in turn"
            print(
                f"   {max_staleness:9}  {planned.total_s:8.1f} "
                f"{machine.spread(simulated, '.1f'):>22}  {limit}",
                flush=True,
            )
        print(f"   layout: {describe(layout)}\n")


if __name__ == "__main__":
    main()
