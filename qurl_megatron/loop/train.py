"""The training loop; every learner rank runs it. Global rank 0 talks to the servers.

Where it departs from the paper:
- Rollouts are sampled by SGLang, not vLLM, and every publish is verified by checksums.
- Eq. 13 and Eq. 14 are measured at every publish, over the quantized weights.
- Full precision, when it comes to evaluation, is a BF16 server.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from qurl_megatron import device
from qurl_megatron.algorithm.objective import PolicyLoss, minibatches
from qurl_megatron.config.schema import STOPPED_EARLY, Config
from qurl_megatron.config.yaml_file import load
from qurl_megatron.loop.assemble import assemble
from qurl_megatron.loop.step_metrics import step_metrics, weight_metrics
from qurl_megatron.loop.warmup import warm_up
from qurl_megatron.report.page import write_report
from qurl_megatron.report.run_log import Clock
from qurl_megatron.rollout.server import Server, load_servers
from qurl_megatron.weight_sync.export import export


def train(config: Config, servers: dict[str, list[Server]], stop_asked: Callable[[], bool]) -> bool:
    """Run `config` on `servers`, by set; whether it came to its end. Collective over all ranks.

    It ends early, with a checkpoint, after the step in which `stop_asked` is true on global rank 0.
    """
    temperature = config.rollout.temperature
    objective = PolicyLoss(config.objective)
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


def is_evaluated(config: Config, step: int) -> bool:
    every = config.evaluation.every_steps
    return every > 0 and step % every == 0


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
    device.initialize_distributed()
    finished = train(load(run_dir / "config.yaml"), servers, lambda: bool(asked))
    for number in stop_on:  # Python would die of one that comes while it ends
        signal.signal(number, signal.SIG_IGN)
    dist.destroy_process_group()
    return 0 if finished else STOPPED_EARLY


if __name__ == "__main__":
    main()
