"""What every start of a run has, whoever launches it: its log directory and its servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qurl_megatron.config.schema import Config, ServerConfig, WeightFormat
from qurl_megatron.preload import Preload
from qurl_megatron.rollout.server import LOOPBACK, Server, start_server

SEEDS_APART = 100_003  # between the servers of a run, and of its attempts


@dataclass(frozen=True)
class WantedServer:
    """One of a run's servers, before it is started."""

    set_name: str  # rollout or evaluation
    index: int  # in its set
    server: ServerConfig
    weight_format: WeightFormat


@dataclass(frozen=True)
class Attempt:
    """The first start of a run, number 0, or the `number`-th time it is gone on with."""

    config: Config
    number: int

    @staticmethod
    def begin(config: Config) -> Attempt:
        """The next one, with a log directory of its own."""
        logs = config.run_dir / "logs"
        number = 1 + len(list(logs.glob("resumed_*"))) if logs.exists() else 0
        attempt = Attempt(config, number)
        attempt.logs.mkdir()
        return attempt

    @property
    def logs(self) -> Path:
        """`logs` of the run, and `logs/resumed_N` for each time it is gone on with."""
        logs = self.config.run_dir / "logs"
        return logs / f"resumed_{self.number}" if self.number else logs

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"learner_rank{rank}.log"

    def start(
        self,
        wanted: WantedServer,
        *,
        host: str = LOOPBACK,
        api_key: str | None = None,
        gpus: Sequence[int] | None = None,
        preload: Preload | None = None,
    ) -> Server:
        """Start one of `wanted_servers`; it comes up in the background."""
        return start_server(
            Path(self.config.model),
            wanted.server,
            wanted.weight_format,
            context_length=self.config.rollout.max_length,
            log_file=self.logs / f"server_{wanted.set_name}_{wanted.index}.log",
            seed=self.server_seed(wanted.index),
            host=host,
            api_key=api_key,
            gpus=gpus,
            preload=preload,
        )

    def server_seed(self, index: int) -> int:
        """Of a server's random numbers: its own in its set, and in every attempt another one.

        A server does not keep its random state; started with the seed it had, it would draw again
        what it drew when the run began.
        """
        return self.config.seed + SEEDS_APART * (self.number * self.config.rollout.servers + index)


def wanted_servers(config: Config) -> list[WantedServer]:
    """All the servers of a run, those of a set in order."""
    rollout = config.rollout
    wanted = [
        WantedServer("rollout", index, rollout.server, config.quantization.format)
        for index in range(rollout.servers)
    ]
    if config.evaluation.wanted:
        wanted.append(WantedServer("evaluation", 0, config.evaluation.server, "bf16"))
    return wanted
