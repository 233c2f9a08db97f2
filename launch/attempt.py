"""One start of a run: its number, its log directory, and the seeds of its servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.config.schema import Config
from qurl_megatron.launch.placement import ServerSpec
from qurl_megatron.rollout.server import ServerPlan

SEED_STRIDE = 100_003  # between the seeds of two servers, or of a server in two attempts
RESTART_SEED_STRIDE = 1_009  # between the seeds of a server's starts in one attempt


@dataclass(frozen=True)
class Attempt:
    """The first start of a run, which has number 0, or its `number`-th resume."""

    config: Config
    number: int

    @staticmethod
    def create(config: Config) -> Attempt:
        """Create the log directory of the next attempt; return the attempt."""
        logs = config.run_dir / "logs"
        resumed = [path.name.removeprefix("resumed_") for path in logs.glob("resumed_*")]
        numbers = [int(number) for number in resumed if number.isdecimal()]
        number = 1 + max(numbers, default=0) if logs.exists() else 0
        attempt = Attempt(config, number)
        attempt.logs.mkdir()
        return attempt

    @property
    def logs(self) -> Path:
        """The log directory: RUN/logs, or RUN/logs/resumed_N for the Nth resume."""
        logs = self.config.run_dir / "logs"
        return logs / f"resumed_{self.number}" if self.number else logs

    def rank_log(self, rank: int) -> Path:
        """Return the log file of a learner rank."""
        return self.logs / f"learner_rank{rank}.log"

    def server_plan(self, spec: ServerSpec) -> ServerPlan:
        """Return how to start one of the run's servers, on loopback and the first GPUs.

        Every start in the attempt has a log and a seed of its own.
        """
        restarts, rollout = self.num_starts(spec), self.config.rollout
        return ServerPlan(
            Path(self.config.model),
            spec.server,
            spec.weight_format,
            context_length=rollout.max_length,
            log_file=self.server_log(spec, restarts),
            seed=self.server_seed(spec.index, restarts),
            keep=spec.keep,
            records_routing=spec.set_name == "rollout" and rollout.routing != "ignore",
        )

    def server_log(self, spec: ServerSpec, restarts: int) -> Path:
        """Return the log of a server's first start, or of its `restarts`-th restart."""
        suffix = f"_restarted_{restarts}" if restarts else ""
        return self.logs / f"server_{spec.set_name}_{spec.index}{suffix}.log"

    def num_starts(self, spec: ServerSpec) -> int:
        """Return how often a server was started in this attempt, which its logs show.

        A starter that takes the place of a dead one continues its count.
        """
        restarted = self.server_log(spec, 0).stem + "_restarted_*.log"
        return self.server_log(spec, 0).exists() + len(list(self.logs.glob(restarted)))

    def server_seed(self, index: int, restarts: int = 0) -> int:
        """Return the random seed of a server, different in each of its starts.

        A server does not save its random state. With the same seed it would sample again what it
        sampled before.
        """
        start = self.number * max(1, self.config.rollout.servers) + index
        return self.config.seed + SEED_STRIDE * start + RESTART_SEED_STRIDE * restarts
