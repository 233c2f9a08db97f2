"""The training loop; every learner rank runs it. Global rank 0 talks to the servers.

Where it departs from the paper:
- Rollouts are sampled by SGLang, not vLLM, and every publish is verified by checksums.
- Eq. 13 and Eq. 14 are measured at every publish, over the quantised weights.
- Full precision, when it comes to evaluation, is a BF16 server.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch.distributed as dist
from torch import Tensor
from transformers import AutoTokenizer

from qurl_megatron import device
from qurl_megatron.algorithm.batch import Prompt, TrainBatch
from qurl_megatron.algorithm.objective import policy_objective, rollout_statistics, token_weights
from qurl_megatron.config.schema import STOPPED_EARLY, Config, ObjectiveConfig, WeightFormat, load
from qurl_megatron.data.prompts import load_prompts
from qurl_megatron.learner.checkpoint import Checkpoints, RunState, read_state
from qurl_megatron.learner.critic import Critic, CriticMetrics
from qurl_megatron.learner.learner import Learner, Update
from qurl_megatron.loop.evaluation import Evaluator
from qurl_megatron.loop.noise import measure_noise
from qurl_megatron.loop.sampling import Sampler, SampleSummary, pad_token_id
from qurl_megatron.loop.warmup import warm_up
from qurl_megatron.quantization import uaq
from qurl_megatron.report.metrics import Clock, Evaluation, RunLog, StepMetrics
from qurl_megatron.report.page import write_report
from qurl_megatron.rollout.server import RolloutClient, Router, Server, load_servers, wait_ready
from qurl_megatron.weight_sync.export import export
from qurl_megatron.weight_sync.publish import Published, Publisher
from qurl_megatron.weight_sync.reshard import Conversion

WARMUP_CHECK_PROBLEMS = 256  # of the training side, left out of all training


def train(config: Config, servers: dict[str, list[Server]], stop_asked: Callable[[], bool]) -> bool:
    """Run `config` on `servers`, by set; whether it came to its end. Collective over all ranks.

    It ends early, with a checkpoint, after the step in which `stop_asked` is true on global rank 0.
    """
    temperature = config.rollout.temperature
    objective = Objective(config.objective)
    with ExitStack() as stack:
        parts = assemble(config, servers, stack)
        learner, publisher, log = parts.learner, parts.publisher, parts.log

        steps_done = parts.resume()
        if steps_done is None:
            if config.warmup.max_steps:
                warm_up(config, learner, parts.sampler.answers, parts.warmup_accuracy, log.say)
            log.start(parts.evaluate(step=0))
        publisher.publish()
        if steps_done is None:
            log.write_noise(parts.noise())
            steps_done = 0
        step, evaluation = steps_done, None
        for step in range(steps_done + 1, config.steps + 1):
            clock = Clock()
            with clock("rollout"):
                batch, summary = parts.sampler.sample(step)
            with clock("proximal"):
                batch.proximal_logprobs, entropy = learner.logprobs_and_entropy(
                    batch.tokens, loss_mask=batch.loss_mask, temperature=temperature
                )
                if config.objective.kl_coefficient:
                    with learner.as_reference():
                        batch.reference_logprobs, _ = learner.logprobs_and_entropy(
                            batch.tokens, loss_mask=batch.loss_mask, temperature=temperature
                        )
            with clock("critic"):
                critic_metrics = parts.critic.step(batch) if parts.critic else None
            with clock("update"):
                updates = [
                    learner.update(minibatch, weights, objective, temperature=temperature)
                    for minibatch, weights in minibatches(config, batch)
                ]
            with clock("publish"):
                published = publisher.publish()
            metrics = step_metrics(
                config, step, batch, summary, entropy, critic_metrics, updates, published, clock
            )
            evaluation = parts.evaluate(step) if is_evaluated(config, step) else None
            log.write(metrics, evaluation)
            log.write_weights(published.version, weight_metrics(published.conversion))
            stopping = step < config.steps and device.from_rank_zero(stop_asked)
            parts.checkpoint(step, published.version, now=stopping)
            if stopping:
                parts.checkpoints.poll(wait=True)
                log.say(f"stopped early after step {step}: qurl resume {config.run_dir} goes on")
                return False
            if device.from_rank_zero(log.time_is_up):
                break
        parts.checkpoints.poll(wait=True)
        export(learner, Path(config.model), config.run_dir / "final_model", config.quantization.uaq)
        log.finish(evaluation or parts.evaluate(step))
        if device.rank() == 0:
            write_report([config.run_dir], config.run_dir / "report" / "index.html")
        return True


@dataclass(frozen=True)
class Objective:
    """The loss function the learner minimises: QuRL's objective with a run's settings."""

    config: ObjectiveConfig

    def __call__(
        self,
        current_logprobs: Tensor,
        entropy: Tensor,
        batch: TrainBatch,
        loss_weights: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.proximal_logprobs is not None
        output = policy_objective(
            current_logprobs,
            batch.proximal_logprobs,
            batch.behaviour_logprobs,
            batch.advantages,
            loss_weights,
            objective=self.config.objective,
            eps_low=self.config.eps_low,
            eps_high=self.config.eps_high,
            ratio_cap=self.config.ratio_cap,
            reference_logprobs=batch.reference_logprobs,
            kl_coefficient=self.config.kl_coefficient,
        )
        moved = (current_logprobs.detach() - batch.proximal_logprobs).abs()
        moved = moved.where(loss_weights > 0, 0).sum()
        return output.loss, {**output.stats, "current_proximal_abs_diff": moved}


def minibatches(config: Config, batch: TrainBatch) -> Iterator[tuple[TrainBatch, Tensor]]:
    """Equal parts of the batch, in order, with their loss weights."""
    for minibatch in batch.split(config.optimizer.minibatches_per_step):
        yield minibatch, token_weights(minibatch.loss_mask, config.objective.aggregation)


def is_evaluated(config: Config, step: int) -> bool:
    every = config.evaluation.every_steps
    return every > 0 and step % every == 0


def step_metrics(
    config: Config,
    step: int,
    batch: TrainBatch,
    summary: SampleSummary,
    entropy: Tensor,
    critic_metrics: CriticMetrics | None,
    updates: list[Update],
    published: Published,
    clock: Clock,
) -> StepMetrics:
    assert batch.proximal_logprobs is not None
    tokens = sum(update.stats["tokens"] for update in updates)
    first = updates[0].stats
    return StepMetrics(
        step=step,
        weight_version=published.version,
        reward_mean=summary.reward_mean,
        response_length_mean=summary.response_length_mean,
        response_truncated_fraction=summary.response_truncated_fraction,
        verifier_failures=summary.verifier_failures,
        groups_replaced=summary.groups_replaced,
        **rollout_statistics(  # type: ignore[arg-type]  # it has none but floats' names
            batch.proximal_logprobs,
            batch.behaviour_logprobs,
            batch.loss_mask,
            config.objective.ratio_cap,
        ),
        acr_widened_fraction=sum(update.stats["acr_widened"] for update in updates) / tokens,
        clip_fraction=sum(update.stats["clipped"] for update in updates) / tokens,
        kl_reference=sum(update.stats["kl_reference"] for update in updates) / tokens,
        entropy=float(entropy[batch.loss_mask].mean()),
        loss=fmean(update.loss for update in updates),
        grad_norm=fmean(update.grad_norm for update in updates),
        learning_rate=updates[-1].learning_rate,
        current_proximal_abs_diff=first["current_proximal_abs_diff"] / first["tokens"],
        weight_update_norm=published.conversion.total.update_norm,
        weight_quant_error=published.conversion.total.quant_error,
        code_flip_fraction=published.conversion.total.code_flip_fraction,
        time_rollout_s=clock.seconds["rollout"],
        time_proximal_s=clock.seconds["proximal"],
        time_critic_s=clock.seconds["critic"],
        time_update_s=clock.seconds["update"],
        time_publish_s=clock.seconds["publish"],
        publish_bytes=published.sent_bytes,
        rollout_tokens_per_s=summary.sampled_tokens / clock.seconds["rollout"],
        **(asdict(critic_metrics) if critic_metrics else {}),
    )


def weight_metrics(conversion: Conversion) -> dict[str, dict[str, float]]:
    """Of each quantised weight: Eq. 13 and code flips since the last publish, and Eq. 14."""
    return {
        name: {
            "weight_update_norm": sums.update_norm,
            "weight_quant_error": sums.quant_error,
            "code_flip_fraction": sums.code_flip_fraction,
        }
        for name, sums in conversion.sums.items()
    }


@dataclass(frozen=True)
class Parts:
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


def assemble(config: Config, servers: dict[str, list[Server]], stack: ExitStack) -> Parts:
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
    return Parts(
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


def main() -> None:
    """`python -m qurl_megatron.loop.train RUN_DIR`, once a learner rank, started by a launcher.

    SIGUSR1 asks it to stop early, SIGTERM to end at once.
    """
    run_dir = Path(sys.argv[1])
    servers = load_servers(run_dir / "servers.json")
    sys.exit(run(run_dir, servers, stop_on={signal.SIGUSR1}, end_on=signal.SIGTERM))


def run(
    run_dir: Path,
    servers: dict[str, list[Server]],
    *,
    stop_on: Collection[signal.Signals],
    end_on: signal.Signals,
) -> int:
    """This learner rank's part in the run of a directory; returns its exit code."""
    asked: list[int] = []
    for number in stop_on:
        signal.signal(number, lambda number, _: asked.append(number))
    signal.signal(end_on, lambda *_: sys.exit(128 + end_on))
    device.initialise_distributed()
    finished = train(load(run_dir / "config.yaml"), servers, lambda: bool(asked))
    for number in stop_on:  # Python would die of one that comes while it ends
        signal.signal(number, signal.SIG_IGN)
    dist.destroy_process_group()
    return 0 if finished else STOPPED_EARLY


if __name__ == "__main__":
    main()
