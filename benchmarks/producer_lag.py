"""Measure how late the producer's loop is beside training: `python benchmarks/producer_lag.py`.

The producer samples in a thread of the learner's process, so a call of the learner that holds
Python's interpreter lock keeps it from sending prompts and receiving answers. A coroutine in the
producer's loop sleeps for 10 ms, again and again, and notes how much later than that it wakes up,
while a real learner trains on what a real server samples one step ahead. It prints the lags by what
the learner does at that moment, each with the time that the learner spends on it per step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median

from transformers import AutoTokenizer

from qurl_megatron import device
from qurl_megatron.algorithm.advantages import grpo_advantages
from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, pack
from qurl_megatron.algorithm.objective import PolicyLoss, minibatches
from qurl_megatron.algorithm.score import Score
from qurl_megatron.config.schema import Config, QuantizationConfig, RolloutConfig, ServerConfig
from qurl_megatron.data.prompts import PromptStream
from qurl_megatron.learner.checkpoint import Checkpoints, RunState
from qurl_megatron.learner.learner import Learner
from qurl_megatron.loop.producer import Producer
from qurl_megatron.recipes import quickstart
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.server import ServerPlan, wait_ready
from qurl_megatron.weight_sync.publish import Publisher

SLEEP_S = 0.01
BUCKET_BYTES = 64 * 2**20


class Lags:
    """How late a coroutine woke up, by what the learner was doing when it should have."""

    def __init__(self) -> None:
        self.by_phase: dict[str, list[float]] = defaultdict(list)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._phase = "start"

    async def measure(self) -> None:
        """Sleep for 10 ms again and again, until cancelled."""
        while True:
            begun, phase = time.perf_counter(), self._phase
            await asyncio.sleep(SLEEP_S)
            self.by_phase[phase].append(time.perf_counter() - begun - SLEEP_S)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Give what the learner does in this context a name."""
        self._phase, begun = phase, time.perf_counter()
        yield
        self.seconds[phase].append(time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="number of steps")
    parser.add_argument("--hidden-size", type=int, default=192, help="width of the model")
    parser.add_argument("--response", type=int, default=32, help="tokens of a completion")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(", ".join(f"{n} {version(n)}" for n in ("torch", "megatron-core", "sglang", "httpx")))
    device.extend_environment({"GLOO_SOCKET_IFNAME": "lo"})
    device.limit_threads(1)
    with ExitStack() as stack:
        lags = train(arguments, Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)
    print("learner     s/step  sleeps  median ms   p99 ms   max ms")
    for phase, seconds in lags.seconds.items():
        late = sorted(1000 * lag for lag in lags.by_phase[phase])
        if late:
            print(
                f"{phase:10} {fmean(seconds):7.2f} {len(late):7} {median(late):10.2f} "
                f"{late[int(0.99 * len(late))]:8.1f} {late[-1]:8.1f}"
            )


def train(arguments: argparse.Namespace, directory: Path, stack: ExitStack) -> Lags:
    """Train for some steps, one step behind a server, and return the lags."""
    model = directory / "model"
    quickstart.build_model(model, seed=0, hidden_size=arguments.hidden_size)
    config = quickstart.recipe()
    config.model, config.output_dir, config.name = str(model), str(directory), "run"
    config.steps, config.learner.tensor_parallel_size = arguments.steps, 1
    config.rollout.max_staleness = 1
    config.rollout.max_response_length = arguments.response
    server = ServerPlan(
        model,
        ServerConfig(mem_fraction_static=0.3, max_running_requests=512, max_total_tokens=65536),
        config.quantization.format,
        context_length=config.rollout.max_length,
        log_file=directory / "server.log",
        seed=0,
    ).start()
    stack.callback(server.stop)
    learner = stack.enter_context(closing(Learner(model, config.learner, config.optimizer)))
    checkpoints = stack.enter_context(closing(Checkpoints(config, learner)))
    wait_ready([server], timeout_s=600)
    fleet = Fleet("rollout", {0: server})
    settings = QuantizationConfig(config.quantization.format, bucket_bytes=BUCKET_BYTES)
    publisher = stack.enter_context(closing(Publisher(learner, fleet, settings)))
    client = RolloutClient(fleet, AutoTokenizer.from_pretrained(model), [])
    producer = stack.enter_context(closing(producer_of(config, client)))
    lags = Lags()
    asyncio.run_coroutine_threadsafe(lags.measure(), producer._loop)
    publisher.publish()
    for step in range(1, config.steps + 1):
        with lags.during("take"):
            groups = producer.take(
                config.rollout.prompts_per_step,
                step=step,
                version=publisher.version,
                interrupted=lambda: False,
            )
            assert groups is not None
        with lags.during("pack"):
            batch = pack(
                [RolloutGroup(group.prompt, group.completions, group.rewards) for group in groups],
                grpo_advantages([group.rewards for group in groups]),
                publisher.version,
            )
        with lags.during("score"):
            shares = [learner.share(minibatch) for minibatch in minibatches(config, batch)]
            for share in shares:
                learner.score(share, ["proximal_logprobs", "entropy"], temperature=1.0)
        with lags.during("update"):
            for share in shares:
                learner.update(share, PolicyLoss(config.objective), temperature=1.0)
        with lags.during("publish"):
            publisher.publish()
        with lags.during("save"):
            checkpoints.save(RunState(step, publisher.version, 0.0, {}, {}))
    checkpoints.poll(wait=True)
    return lags


def producer_of(config: Config, client: RolloutClient) -> Producer:
    """Return a producer of groups with random rewards."""
    prompts = [Prompt(str(n), "", "", [2 + n % 250, 3, 4, 5, 6, 7]) for n in range(1000)]
    numbers = itertools.count()

    def sample(prompt: Prompt, rollout: RolloutConfig) -> Awaitable[list[Completion]]:
        settings = client.sampling(
            completions_per_prompt=rollout.completions_per_prompt,
            temperature=rollout.temperature,
            max_response_length=rollout.max_response_length,
        )
        return client.group(prompt, settings)

    def score(prompt: Prompt, completions: Sequence[Completion]) -> Future[list[Score]]:
        scores: Future[list[Score]] = Future()
        scores.set_result([Score(float(next(numbers) % 2), {}, failure="") for _ in completions])
        return scores

    return Producer(config.rollout, config.steps, PromptStream(prompts, 0), sample, score)


if __name__ == "__main__":
    main()
