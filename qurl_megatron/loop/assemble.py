"""Build the parts of a run: learner, critic, publisher, sampler, evaluator, checkpoints, log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from qurl_megatron import device
from qurl_megatron.config.schema import WARMUP_CHECK_PROBLEMS, Config, WeightFormat
from qurl_megatron.data.prompts import PromptSet, load_prompts
from qurl_megatron.learner.checkpoint import Checkpoints, RunState, read_state
from qurl_megatron.learner.critic import Critic
from qurl_megatron.learner.learner import Learner
from qurl_megatron.loop.evaluation import Evaluator
from qurl_megatron.loop.noise import measure_noise
from qurl_megatron.loop.sampling import Sampler, pad_token_id
from qurl_megatron.quantization import uaq
from qurl_megatron.report.metrics import Evaluation
from qurl_megatron.report.run_log import RunLog
from qurl_megatron.rollout.client import RolloutClient
from qurl_megatron.rollout.router import Router
from qurl_megatron.rollout.server import Server, wait_ready
from qurl_megatron.weight_sync.publish import Publisher


@dataclass(frozen=True)
class Run:
    """The working parts of a run, on this learner rank. Its methods are collective."""

    learner: Learner
    critic: Critic | None  # None without PPO
    publisher: Publisher  # publishes to the rollout servers
    sampler: Sampler
    evaluator: Evaluator | None  # None if the run evaluates nothing
    measure_noise: Callable[[], dict[str, dict[str, float]]]
    checkpoints: Checkpoints
    log: RunLog

    def resume(self) -> int:
        """Restore the newest checkpoint; return its step, or 0 if the run has no checkpoint."""
        newest = device.from_rank_zero(self.checkpoints.newest)
        if newest is None:
            return 0
        state = read_state(newest)
        self.checkpoints.restore(newest)
        self.sampler.restore(state.prompts)
        self.publisher.version = state.weight_version - 1  # the next publish repeats that version
        self.log.resume(state.step, state.time_s, Evaluation(**state.evaluation_before))
        return state.step

    def checkpoint(self, step: int, weight_version: int, *, now: bool) -> None:
        """Complete a save that has been written, and start another if `now` or if one is due."""
        self.checkpoints.poll()
        if now or self.checkpoints.is_due(step):
            self.checkpoints.save(
                RunState(
                    step=step,
                    weight_version=weight_version,
                    time_s=self.log.time_s,
                    evaluation_before=asdict(self.log.before),
                    prompts=self.sampler.state(),
                )
            )

    def evaluate(self, step: int) -> Evaluation:
        """Measure the policy in full precision; an empty result without an evaluator."""
        return self.evaluator.evaluate(step) if self.evaluator else Evaluation()

    def warmup_accuracy(self) -> float:
        """Measure the policy's accuracy on the problems set aside for the warm-up."""
        assert self.evaluator is not None  # `validate` refuses a warm-up without evaluation
        return self.evaluator.warmup_accuracy()


def assemble(config: Config, servers: dict[str, list[Server]], stack: ExitStack) -> Run:
    """Build the parts of a run; `stack` closes them in reverse order."""
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    # Only global rank 0 has prompts.
    prompts = load_prompts(config, tokenizer) if device.rank() == 0 else PromptSet([], [], {})
    num_check = WARMUP_CHECK_PROBLEMS if config.warmup.max_steps else 0
    warmup_check, training = prompts.train[:num_check], prompts.train[num_check:]

    learner = Learner(
        Path(config.model),
        config.learner,
        config.optimizer,
        transform=uaq.transform(config.quantization.uaq),
    )
    stack.enter_context(closing(learner))
    if config.objective.kl_coefficient:
        learner.keep_reference()  # before a checkpoint is restored
    critic = None
    if config.advantage_estimator == "gae":
        critic = Critic(config)
        stack.enter_context(closing(critic))
    checkpoints = Checkpoints(config, learner, critic)
    stack.enter_context(closing(checkpoints))
    log = RunLog(config, writes=device.rank() == 0)
    stack.enter_context(closing(log))

    if device.rank() == 0:
        log.say("waiting for the servers")
        for name, members in servers.items():
            wait_ready(members, getattr(config, name).server.start_timeout_s)
    clients = {
        name: RolloutClient(
            _endpoint(name, members, stack), tokenizer, learner.architecture.eos_token_ids
        )
        for name, members in servers.items()
    }

    def publisher_to(name: str, weight_format: WeightFormat) -> Publisher:
        publisher = Publisher(
            learner, servers[name], weight_format, config.quantization.bucket_bytes, name
        )
        return stack.enter_context(closing(publisher))

    evaluator = None
    if "evaluation" in servers:
        evaluator = Evaluator(
            config,
            publisher_to("evaluation", "bf16"),
            clients["evaluation"],
            held_out=prompts.held_out[: config.evaluation.problems],
            files=prompts.files,
            warmup_check=warmup_check,
        )
    return Run(
        learner=learner,
        critic=critic,
        publisher=publisher_to("rollout", config.quantization.format),
        sampler=Sampler(config, clients["rollout"], training, tokenizer),
        evaluator=evaluator,
        measure_noise=partial(
            measure_noise,
            clients,
            training[: config.rollout.prompts_per_step],
            learner,
            config,
            pad_token_id(tokenizer),
        ),
        checkpoints=checkpoints,
        log=log,
    )


def _endpoint(name: str, servers: list[Server], stack: ExitStack) -> Server | Router:
    """Return the endpoint that a client samples from: the only server, or a router to several.

    A router is started on global rank 0 alone, where the clients are used.
    """
    if len(servers) == 1 or device.rank() != 0:
        return servers[0]
    router = Router(servers, Path(servers[0].log_file).with_name(f"router_{name}.log"))
    stack.enter_context(closing(router))
    router.wait_ready()
    return router
