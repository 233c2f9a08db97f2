"""Build what the loop works with: learner, critic, publisher, sampler, evaluator, log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Prompt
from qurl_megatron.config.schema import Config, WeightFormat
from qurl_megatron.data.prompts import load_prompts
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

WARMUP_CHECK_PROBLEMS = 256  # of the training side, left out of all training


@dataclass(frozen=True)
class Components:
    """What the loop works with. Prompts are on global rank 0 only."""

    learner: Learner
    critic: Critic | None  # of PPO
    publisher: Publisher
    sampler: Sampler
    evaluator: Evaluator | None
    held_out: list[Prompt]
    files: dict[str, list[Prompt]]
    noise: Callable[[], dict[str, dict[str, float]]]
    warmup_check: list[Prompt]
    log: RunLog
    checkpoints: Checkpoints

    def resume(self) -> int | None:
        """Go on from the run's newest checkpoint; the last step it has done, None without one."""
        newest = device.from_rank_zero(self.checkpoints.newest)
        if newest is None:
            return None
        state = read_state(newest)
        self.checkpoints.restore(newest)
        self.sampler.restore(state.prompts)
        self.publisher.version = state.weight_version - 1  # the first publish gives it again
        self.log.resume(state.step, state.time_s, Evaluation(**state.evaluation_before))
        return state.step

    def checkpoint(self, step: int, weight_version: int, *, now: bool) -> None:
        """Make saves that are written visible, and begin one `now` or where it is due."""
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
        if self.evaluator is None:
            return Evaluation()
        return self.evaluator.evaluate(step, self.held_out, self.files)

    def warmup_accuracy(self) -> float:
        assert self.evaluator is not None  # `validate` refuses a warm-up without one
        return self.evaluator.accuracy(self.warmup_check)


def assemble(config: Config, servers: dict[str, list[Server]], stack: ExitStack) -> Components:
    """Build every part; `stack` takes them down in the opposite order."""
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    training: list[Prompt] = []
    held_out: list[Prompt] = []
    files: dict[str, list[Prompt]] = {}
    if device.rank() == 0:
        training, held_out, files = load_prompts(config, tokenizer)
    check = WARMUP_CHECK_PROBLEMS if config.warmup.max_steps else 0
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
            _front(name, members, stack), tokenizer, learner.architecture.eos_token_ids
        )
        for name, members in servers.items()
    }

    def publisher(name: str, weight_format: WeightFormat) -> Publisher:
        made = Publisher(
            learner, servers[name], weight_format, config.quantization.bucket_bytes, name
        )
        return stack.enter_context(closing(made))

    evaluator = None
    if "evaluation" in servers:
        evaluator = Evaluator(config, publisher("evaluation", "bf16"), clients["evaluation"])
    return Components(
        learner=learner,
        critic=critic,
        publisher=publisher("rollout", config.quantization.format),
        sampler=Sampler(config, clients["rollout"], training[check:], tokenizer),
        evaluator=evaluator,
        held_out=held_out[: config.evaluation.problems],
        files=files,
        noise=partial(
            measure_noise,
            clients,
            training[check:][: config.rollout.prompts_per_step],
            learner,
            config,
            pad_token_id(tokenizer),
        ),
        warmup_check=training[:check],
        log=log,
        checkpoints=checkpoints,
    )


def _front(name: str, servers: list[Server], stack: ExitStack) -> Server | Router:
    """What to sample from: the only server, or on global rank 0 a router before several."""
    if len(servers) == 1 or device.rank() != 0:
        return servers[0]
    router = Router(servers, Path(servers[0].log_file).with_name(f"router_{name}.log"))
    stack.enter_context(closing(router))
    router.wait_ready()
    return router
