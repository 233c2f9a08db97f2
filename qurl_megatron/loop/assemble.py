"""Build the parts of a run: learner, critic, publisher, sampler, evaluator, checkpoints, log."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Completion, Prompt, RolloutGroup, TrainBatch, pack
from qurl_megatron.algorithm.objective import PolicyLoss
from qurl_megatron.config.extensions import find, needed
from qurl_megatron.config.schema import OBJECTIVES, Config, Releases, Transport
from qurl_megatron.data.prompts import PromptSet, draw, load_prompts, set_aside, sum_of
from qurl_megatron.data.scoring import scoring
from qurl_megatron.learner.checkpoint import (
    CheckpointError,
    Checkpoints,
    RunState,
    Saved,
    read_state,
)
from qurl_megatron.learner.learner import Learner
from qurl_megatron.loop.measurements import Evaluator
from qurl_megatron.loop.proof import Proof
from qurl_megatron.loop.sampling import NothingToTrainOn, Sampler
from qurl_megatron.model.architecture import Architecture
from qurl_megatron.model.tokenizer import load_tokenizer
from qurl_megatron.quantization import uaq
from qurl_megatron.report.metrics import Evaluation
from qurl_megatron.report.run_log import RunLog
from qurl_megatron.rollout.client import RolloutClient, client_type
from qurl_megatron.rollout.controller import Controller
from qurl_megatron.rollout.fleet import Fleet, FleetTooSmall
from qurl_megatron.rollout.roster import read_set
from qurl_megatron.rollout.server import Server, revive, wait_ready
from qurl_megatron.weight_sync.publish import Publisher


class Critic(Saved, Protocol):
    """PPO's value model (`extensions/ppo`)."""

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on a batch, and set its advantages; return the critic's metrics."""

    def leave(self) -> None:
        """Move to the host's memory."""

    def come_back(self) -> None:
        """Move back, bit for bit."""

    def close(self) -> None:
        """Destroy its process groups."""


@dataclass(frozen=True)
class Run:
    """The working parts of a run, on this learner rank. Its methods are collective."""

    model: str  # the directory that the run began with
    learner: Learner
    critic: Critic | None  # None without PPO
    publisher: Publisher  # publishes to the rollout servers
    sampler: Sampler
    evaluator: Evaluator | None  # None if the run evaluates nothing
    proof: Proof
    checkpoints: Checkpoints
    log: RunLog

    def resume(self) -> int:
        """Restore the newest checkpoint; return its step, or 0 if the run has no checkpoint.

        Raises:
            CheckpointError: the base under the checkpoint's adapters has changed.
        """
        newest = device.from_rank_zero(self.checkpoints.newest)
        if newest is None:
            return 0
        state = read_state(newest)
        if state.base != self.learner.base_hash():
            raise CheckpointError(
                f"{newest}: its adapters were trained over another base than {self.model} is now; "
                "put that model back, or start a new run"
            )
        self.checkpoints.restore(newest)
        self.sampler.restore(state.prompts, state.step)
        self.publisher.version = state.weight_version - 1  # the next publish repeats that version
        before = Evaluation(**state.evaluation_before)
        compares = device.from_rank_zero(lambda: self.checkpoints.compares(state))
        self.log.resume(state.step, state.time_s, before if compares else Evaluation())
        if not compares and (state.highest or before.lines()):
            self.log.say(
                "evaluations are measured otherwise now: the highest score, and what was measured "
                "before RL, are forgotten"
            )
        return state.step

    def checkpoint(
        self,
        step: int,
        weight_version: int,
        evaluation: Evaluation | None,
        *,
        is_last: bool = False,
        now: bool,
    ) -> None:
        """Complete a save that has been written, and start another if `now` or if one is due.

        One is also due if this step's `evaluation` is above all others.
        """
        self.checkpoints.poll()
        best_by = self.checkpoints.best_by
        accuracy, error = evaluation.score(best_by) if evaluation else (None, None)
        is_due = self.checkpoints.is_due(step, is_last=is_last)
        if now or is_due or self.checkpoints.is_best(accuracy):
            base = self.learner.base_hash()
            self.checkpoints.save(
                RunState(
                    step=step,
                    weight_version=weight_version,
                    time_s=self.log.time_s,
                    evaluation_before=asdict(self.log.before),
                    prompts=self.sampler.state(),
                    accuracy=accuracy,
                    standard_error=error,
                    base=base,
                )
            )

    @contextmanager
    def saving_what_is_done(self) -> Iterator[None]:
        """Save a checkpoint of the last step when the next one gets no rewards.

        If too few servers are left to go on, the context ends without an error.

        Raises:
            NothingToTrainOn: completions cannot be scored.
            FleetTooSmall: too few servers are left, and there is nothing to save.
        """
        try:
            yield
        except (FleetTooSmall, NothingToTrainOn) as loss:
            step = self.log.steps_done
            self.checkpoints.poll(wait=True)
            newest = device.from_rank_zero(self.checkpoints.newest)
            if step and (newest is None or read_state(newest).step < step):
                self.checkpoint(step, self.publisher.version, None, now=True)
            if isinstance(loss, NothingToTrainOn) or not (step or newest):
                self.checkpoints.poll(wait=True)
                raise
            self.log.say(str(loss))
            self.say_stopped_early()

    def say_stopped_early(self) -> None:
        """Say so once the last checkpoint is written; the launcher says how to resume."""
        self.checkpoints.poll(wait=True)
        self.log.say(f"stopped early after step {self.log.steps_done}, with a checkpoint")

    def evaluate(self, step: int) -> Evaluation:
        """Measure the policy's accuracy; an empty result without an evaluator."""
        return self.evaluator.evaluate(step) if self.evaluator else Evaluation()


def assemble(config: Config, rosters: Sequence[Path], stack: ExitStack) -> Run:
    """Build the parts of a run; `stack` closes them in reverse order.

    `rosters` are the files in which the starters of servers list them.
    """
    is_first = device.rank() == 0
    template = config.prompts.template
    tokenizer = load_tokenizer(Path(config.model), *template)
    prompts = load_prompts(config, tokenizer) if is_first else PromptSet([], [], {})

    keep = stack.enter_context
    score_of: Any = None  # other ranks score nothing, and ask no servers
    make_client: Callable[..., RolloutClient] = RolloutClient
    if is_first:
        score_of = keep(scoring(config))
        logs = config.run_dir / "logs"
        kind = client_type(config.rollout, config.model, template, config.scoring.wrong, logs)
        make_client = keep(kind)
    colocation: Any = None
    make_publisher: Callable[..., Publisher] = Publisher
    if config.rollout.placement == "colocated":
        turns = needed("colocated", "turns", by="rollout.placement=colocated")
        colocation = keep(closing(turns.Colocation(rosters[0].parent)))
        make_publisher = partial(turns.ColocatedPublisher, colocation)
    learner = keep(closing(make_learner(config)))
    critic = make_critic(config)
    if critic:
        keep(closing(critic))
    if colocation:
        colocation.hold([learner, critic] if critic else [learner])
    asked = [*prompts.held_out, *itertools.chain.from_iterable(prompts.files.values())]
    checkpoints = keep(closing(Checkpoints(config, learner, critic, sum_of(asked))))
    log = keep(closing(RunLog(config, writes=is_first)))

    if config.quantization.smoothing:
        log.say(_smooth(config, learner, prompts.train))
    log.say("waiting for the servers")
    quantizations = {"rollout": config.quantization}
    if config.evaluation.enabled:
        quantizations["evaluation"] = config.evaluation_quantization
    controller = keep(closing(Controller()))
    clients, publishers = {}, {}
    for name, quantization in quantizations.items():
        releases = getattr(config, name).server.releases if colocation else None
        fleet = keep(closing(_fleet(config, name, rosters, controller, log, releases)))
        shape = _routing_shape(config, name, learner.architecture)
        stops = config.rollout.stop_token_ids
        clients[name] = make_client(fleet, tokenizer, stops, routing_shape=shape)
        if releases:
            can_attach = device.can_attach(stays=releases == "cache")
            transport: Transport = "direct" if can_attach else "broadcast"
            quantization = replace(quantization, transport=transport)
        publishers[name] = keep(closing(make_publisher(learner, fleet, quantization)))

    of_rollout = clients["rollout"], publishers["rollout"]
    score: Any = score_of("") if is_first else None
    sampler = keep(closing(Sampler(config, *of_rollout, score, prompts.train, tokenizer, log.say)))
    evaluator = None
    if config.evaluation.enabled:
        evaluator = Evaluator(
            config,
            publishers["evaluation"],
            clients["evaluation"],
            score_of,
            held_out=set_aside(prompts.held_out, config.evaluation.problems)[0],
            files=prompts.files,
        )
    return Run(
        model=config.model,
        learner=learner,
        critic=critic,
        publisher=publishers["rollout"],
        sampler=sampler,
        evaluator=evaluator,
        proof=Proof(clients, publishers, prompts.train, learner, config, log),
        checkpoints=checkpoints,
        log=log,
    )


def make_learner(config: Config) -> Learner:
    """Return a run's learner, with the initial model as its reference if it needs one."""
    make: Callable[..., Learner] = Learner
    if rank := config.adapters.rank:
        adapters = needed("adapters", "learner", by=f"adapters.rank={rank}")
        make = partial(adapters.AdaptedLearner, adapters=adapters.Adapters.of(config))
    is_hybrid = Architecture.from_directory(config.model).is_hybrid
    learner = make(
        Path(config.model),
        config.learner,
        config.optimizer,
        transform=uaq.transform(config.quantization.uaq, is_hybrid=is_hybrid),
        replays_routing=config.rollout.routing == "replay",
        steps=config.steps,
    )
    if config.objective.kl_coefficient:
        learner.keep_reference()
    return learner


def make_critic(config: Config) -> Critic | None:
    """Return PPO's critic; None without PPO. A `Learner` must exist."""
    if config.objective.advantage_estimator != "gae":
        return None
    ppo = needed("ppo", "critic", by="objective.advantage_estimator=gae")
    return ppo.Critic(config)  # type: ignore[no-any-return]


def make_loss(config: Config) -> PolicyLoss:
    """Return the loss of a run's objective, which may be the user's own."""
    user, objective = None, config.objective
    if objective.objective not in OBJECTIVES:
        field = f"objective.objective={objective.objective}"
        user = needed("user_objective", "user_objective", by=field).user_objective(objective)
    return PolicyLoss(objective, config.rollout.max_staleness > 0, user)


def write_report(config: Config) -> None:
    """Write the page of a finished run, where there are reports."""
    if pages := find("report", "page"):
        pages.write_report([config.run_dir], config.run_dir / "report" / "index.html")


def _smooth(config: Config, learner: Learner, prompts: list[Prompt]) -> str:
    """Choose the scales of smoothing; return a line about them. Collective.

    They come from prompts that any step and layout would have, and from the model that the run
    began with, so before a checkpoint is restored: a run that resumes has the same.
    """
    exponent = config.quantization.smoothing
    drawn = draw(prompts, config.seed, config.prompts.weights)
    # The last token of a sequence is no input.
    nothing = [Completion([0], [0.0], "", truncated=True, token_versions=[0])]
    groups = [RolloutGroup(prompt, nothing, [0.0]) for prompt in drawn]
    share = learner.share(pack(groups).only() if groups else TrainBatch.empty())
    largest = learner.smooth(share, exponent)
    assert learner.smoothing
    return (
        f"smoothing of {exponent:g} by {len(drawn)} prompts: the largest outlier is "
        f"{largest.ratio:,.0f} times its layer's median, in the input of {largest.name}; the "
        f"scales' checksum is {learner.smoothing.checksum:016x}"
    )


def _routing_shape(config: Config, name: str, architecture: Architecture) -> tuple[int, int] | None:
    """Return the layers and the experts per token that servers record; None: they record none."""
    if name != "rollout" or config.rollout.routing == "ignore":
        return None
    return architecture.num_layers, architecture.experts_per_token


def _fleet(
    config: Config,
    name: str,
    rosters: Sequence[Path],
    controller: Controller,
    log: RunLog,
    releases: Releases | None,
) -> Fleet:
    """Return the servers of a set once they answer; only global rank 0 has any.

    Raises:
        ServerFailed: a server did not start.
    """
    if device.rank() != 0:
        return Fleet(name, {})
    servers = read_set(rosters, name)
    start_timeout_s = getattr(config, name).server.start_timeout_s
    start, num_up = time.monotonic(), itertools.count(1)

    def say_ready(server: Server) -> None:
        waited = f"{time.monotonic() - start:.0f} s of waiting"
        number = f"{next(num_up)} of {len(servers)}"
        log.say(f"{name} server {number} is up after {waited}: {server.url}")

    # Colocated servers are up when they are listed, and sleep.
    starting = [server for server in servers.values() if not (server.is_remote or releases)]
    wait_ready(starting, start_timeout_s, ready=say_ready)
    for server in revive(server for server in servers.values() if server.is_remote):
        say_ready(server)  # the fleet asks the others again later
    fleet = Fleet(
        name,
        servers,
        min_servers=config.rollout.min_servers if name == "rollout" else 1,
        patience_s=start_timeout_s,
        pause_mode=config.rollout.pause_mode,
        releases=releases,
        controller=controller,
        say=log.say,
    )
    fleet.watch(lambda: read_set(rosters, name))
    return fleet
