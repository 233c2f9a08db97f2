"""A learner, two real servers and their starter: what `qurl train` has in several processes."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import psutil
from transformers import AutoTokenizer

from qurl_megatron import device
from qurl_megatron.config.schema import Config, QuantizationConfig
from qurl_megatron.config.servers import server_specs
from qurl_megatron.config.text import with_overrides
from qurl_megatron.launch import servers
from qurl_megatron.launch.placement import place_servers
from qurl_megatron.launch.servers import Attempt
from qurl_megatron.learner.learner import Learner
from qurl_megatron.quantization.checksum import combine
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.fleet import Fleet
from qurl_megatron.rollout.roster import read_set
from qurl_megatron.rollout.server import Server, wait_ready
from qurl_megatron.weight_sync.publish import Publisher

BUCKET_BYTES = 64 * 1024  # a publish sends several
PEER_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 5.0
PROMPT_LENGTH, COMPLETION_LENGTH = 8, 200
PER_STEP, COMPLETIONS = 8, 2

# torch keeps a record of each of the last collectives of a process, 2,000 unless this says
# otherwise. They fill up in hundreds of publishes, and look like growth until then.
FEW_RECORDS = {"TORCH_FR_BUFFER_SIZE": "20"}

# A server holds more than twice what the tests ask of it, and refuses what is above that.
WORDS = f"""name=run learner.dtype=float32 optimizer.learning_rate=3e-4 optimizer.warmup_steps=0
    quantization.format=int8 rollout.servers=2
    rollout.prompts_per_step={PER_STEP} rollout.completions_per_prompt={COMPLETIONS}
    rollout.max_prompt_length={PROMPT_LENGTH} rollout.max_completion_length={COMPLETION_LENGTH}
    rollout.max_staleness=1 rollout.server.mem_fraction_static=0.3
    rollout.server.max_running_requests=64 rollout.server.options.max_queued_requests=64
    rollout.server.max_total_tokens=32768
    evaluation.problems=0""".split()
WORDS += [f"rollout.server.environment.{name}={value}" for name, value in FEW_RECORDS.items()]


class Deployment:
    """A learner and its two servers, which `starter` starts again in its `check`."""

    def __init__(self, directory: Path, model: Path, stack: ExitStack) -> None:
        """Start everything and publish once; `stack` ends it."""
        words = [*WORDS, f"output_dir={directory}", f"model={model}"]
        self.config = config = with_overrides(Config(), words)
        config.run_dir.mkdir()
        # These servers are killed on purpose, many times an hour.
        stack.enter_context(patch.object(servers, "MAX_RESTARTS", 10**9))
        attempt = Attempt.create(config)
        self.logs = attempt.logs
        self._rosters = [config.run_dir / "servers.json"]
        self.starter = servers.Servers(attempt, self._rosters[0])
        stack.enter_context(closing(self.starter))
        placed = place_servers(config, device.num_gpus())
        for spec, (_, _, first) in zip(server_specs(config), placed, strict=True):
            gpus = range(first, first + spec.server.tensor_parallel_size)
            self.starter.start(spec, gpus if device.num_gpus() else [])
        self.starter.save()
        self.learner = Learner(model, config.learner, config.optimizer)
        stack.enter_context(closing(self.learner))
        wait_ready(list(self.roster.values()), timeout_s=400)
        self.starter.check()
        self.said: list[str] = []
        self.fleet = Fleet(
            "rollout",
            self.roster,
            patience_s=300,
            health_timeout_s=HEALTH_TIMEOUT_S,
            say=self.said.append,
        )
        stack.enter_context(closing(self.fleet))
        self.fleet.watch(lambda: self.roster)
        settings = QuantizationConfig(bucket_bytes=BUCKET_BYTES)
        self.publisher = Publisher(self.learner, self.fleet, settings)
        stack.enter_context(closing(self.publisher))
        tokenizer, architecture = AutoTokenizer.from_pretrained(model), self.learner.architecture
        self.client = RolloutClient(self.fleet, tokenizer, architecture.eos_token_ids)
        self.publisher.publish()

    @property
    def roster(self) -> dict[int, Server]:
        """The servers as their starter lists them."""
        listed = read_set(self._rosters, "rollout")
        return {index: replace(each, timeout_s=PEER_TIMEOUT_S) for index, each in listed.items()}


def held_by(server: Server) -> dict[str, int]:
    """Return the checksums of the tensors that a server holds."""
    return combine(asyncio.run(server.checksums()))


def wait_until(condition: Callable[[], bool], timeout_s: float = 200.0) -> float:
    """Wait until `condition()`, and return how long it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + timeout_s, "timed out"
        time.sleep(0.02)
    return time.monotonic() - begin


def tree(server: Server) -> list[psutil.Process]:
    """Return all processes of a server; none if it has ended."""
    try:
        main = psutil.Process(server.pid)
        return [main, *main.children(recursive=True)] if server.alive() else []
    except psutil.NoSuchProcess:
        return []


def send_signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to all processes that have not ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
