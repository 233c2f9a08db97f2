"""The training loop. Every learner rank runs it; global rank 0 talks to the servers.

It departs from the paper ("QuRL: Efficient Reinforcement Learning with Quantized Rollout") in
three ways:
- SGLang samples the rollouts, not vLLM, and checksums verify the weights of every publish.
- Eq. 13 and Eq. 14 are measured at every publish, over the quantized weights.
- Full-precision accuracy is measured on a BF16 server, unless `evaluation.quantized`.

The phases of a step:

    rollout     prompts -> SGLang (quantized policy) -> completions, behaviour_logprobs
                -> rewards -> advantages -> batch; with `rollout.max_staleness` the completions and
                rewards come from a producer that samples while the learner trains
    critic      PPO only: values -> returns, advantages -> update of the critic
    proximal    minibatches -> shares of the replicas; of all but the first, also
                learner before any update -> proximal_logprobs
    update      shares -> current_logprobs -> objective -> optimizer steps
    publish     shards of the learner -> quantize -> gather -> SGLang, verified
"""

import errno
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch.distributed as dist

from qurl_megatron import device
from qurl_megatron.algorithm.objective import minibatches
from qurl_megatron.algorithm.proof import WrongRollouts
from qurl_megatron.config.schema import SAID_WHY, STOPPED_EARLY, Config
from qurl_megatron.config.text import load
from qurl_megatron.learner.checkpoint import CheckpointError
from qurl_megatron.learner.learner import Learner, NonFinite
from qurl_megatron.learner.shares import Share
from qurl_megatron.loop.assemble import Run, assemble, make_loss, write_report
from qurl_megatron.loop.measurements import StepResults, step_metrics, weight_metrics
from qurl_megatron.loop.sampling import NothingToTrainOn
from qurl_megatron.machine.output import outlive_output, qurl_command
from qurl_megatron.report.record import list_checkpoints
from qurl_megatron.report.run_log import Clock
from qurl_megatron.rollout.fleet import FleetTooSmall
from qurl_megatron.rollout.roster import SERVERS_AT
from qurl_megatron.weight_sync.export import export
from qurl_megatron.weight_sync.transport import PublishError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a quota, a file


def train(config: Config, rosters: Sequence[Path], stop_requested: Callable[[], bool]) -> bool:
    """Train a run from its start, or from its newest checkpoint; return True if it is complete.

    When `stop_requested()` is true on global rank 0, the run stops after the current step, with a
    checkpoint; also when too few servers are left. `rosters` are the files that list the servers.
    Collective over all learner ranks.
    """
    with ExitStack() as stack:
        run = assemble(config, rosters, stack)
        stack.enter_context(run.saving_what_is_done())
        learner, critic, publisher, log = run.learner, run.critic, run.publisher, run.log
        update = partial(learner.update, temperature=config.rollout.temperature)
        served, forward = publisher.converter, config.learner.quantized_forward
        as_trained = partial(learner.as_served, served, config.rollout.server, forward)
        asked_to_stop = partial(device.from_rank_zero, stop_requested)
        policy_loss = make_loss(config)

        steps_done = start_or_resume(run)
        step, evaluation = steps_done, None
        # A run that was interrupted after a metric had ended it has no step left.
        last = steps_done if device.from_rank_zero(log.has_reached) else config.steps
        for step in range(steps_done + 1, last + 1):
            clock = Clock()
            with clock("rollout"):
                batch, summary = run.sampler.sample(step, publisher.version)
            with clock("proof"):
                run.proof.of_new_servers()
            with clock("critic"):
                critic_metrics = critic.step(batch) if critic else None
            with clock("proximal"), as_trained():
                shares = [learner.share(minibatch) for minibatch in minibatches(config, batch)]
                score_before_updates(config, learner, shares)
            with clock("update"), as_trained():
                updates = [update(share, policy_loss) for share in shares]
                shown = learner.update_shown()
            with clock("publish"):
                published = publisher.publish()

            measured = summary, critic_metrics, updates, shown
            results = StepResults(step, *measured, published, clock.seconds)
            samples = run.sampler.samples(step, shares)
            evaluation = None
            is_last = step == config.steps or device.from_rank_zero(log.time_is_up)
            try:
                with clock("evaluation"):
                    # An evaluation may take longer than whoever asks to stop will wait.
                    if evaluation_is_due(config, step, is_last) and not asked_to_stop():
                        evaluation = run.evaluate(step)
            finally:  # the step is done, even if its evaluation fails
                log.write(step_metrics(config, results), evaluation)
                log.write_samples(samples)
                log.write_weights(published.version, weight_metrics(published.conversion))
            is_last = is_last or device.from_rank_zero(log.has_reached)
            if is_last and not (evaluation or asked_to_stop()):
                evaluation = run.evaluate(step)  # the checkpoint may be the best
            stopping = asked_to_stop() and not (is_last and evaluation)
            run.checkpoint(step, published.version, evaluation, is_last=is_last, now=stopping)
            if stopping:
                run.say_stopped_early()
                return False
            if is_last:
                break

        run.checkpoints.poll(wait=True)
        uaq, template = config.quantization.uaq, config.prompts.chat_template
        final_model = config.run_dir / "final_model"
        export(learner, Path(config.model), final_model, uaq, template)
        log.finish(evaluation or run.evaluate(step))
        if device.rank() == 0:
            write_report(config)
        log.say_results()
        return True
    return False  # `saving_what_is_done` ended the block: too few servers


def start_or_resume(run: Run) -> int:
    """Prepare learner, servers and log for the next step; return the number of steps done."""
    steps_done = run.resume()
    if steps_done == 0:
        run.log.start(run.evaluate(step=0))
    run.publisher.publish()
    if steps_done == 0:
        run.proof.before_training()
    run.log.begin_steps()
    return steps_done


def score_before_updates(config: Config, learner: Learner, shares: Sequence[Share]) -> None:
    """Score a step's shares with the policy before its updates, and with the reference, if used."""
    score = partial(learner.score, temperature=config.rollout.temperature)
    for share in shares[1:]:  # the pass of its own update scores the first
        score(share, ["proximal_logprobs", "entropy"])
    if config.objective.kl_coefficient:
        with learner.as_reference():
            for share in shares:
                score(share, ["reference_logprobs"])


def evaluation_is_due(config: Config, step: int, is_last: bool) -> bool:
    """Return True if the run evaluates after `step`; it always does after its last step."""
    every = config.evaluation.every_steps
    is_due = is_last or (every > 0 and step % every == 0)
    return config.evaluation.enabled and is_due


def run_rank(run_dir: Path, rosters: Sequence[Path]) -> int:
    """Train the run in `run_dir` as this learner rank; return the exit code of the process.

    SIGUSR1 stops the run after the current step, SIGUSR2 ends the process at once.
    """
    stop_signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: stop_signals.append(number))
    signal.signal(signal.SIGUSR2, lambda number, _: sys.exit(128 + number))
    device.initialize_distributed()
    try:
        config = load(run_dir / "config.yaml")
        if config.rollout.servers_at:
            rosters = [*rosters, run_dir / SERVERS_AT]
        is_complete = train(config, rosters, lambda: bool(stop_signals))
    except (NonFinite, NothingToTrainOn) as error:  # on every rank
        print(f"\nqurl: {error}: {qurl_command('resume', run_dir)}", flush=True)
        return SAID_WHY
    except (FleetTooSmall, PublishError, WrongRollouts) as error:  # on every rank
        print(f"\nqurl: {error}", flush=True)
        return SAID_WHY
    except (CheckpointError, OSError) as error:  # maybe on one rank only: others would wait
        # To the console if there is one: the logs may be on the disk that is full.
        print(f"\nqurl: {error_line(error, run_dir)}", flush=True)
        return 1
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it would kill the process while Python exits
    dist.destroy_process_group()
    return 0 if is_complete else STOPPED_EARLY


def error_line(error: CheckpointError | OSError, run_dir: Path) -> str:
    """Return a line about a file that could not be written, with the last checkpoint's name."""
    if isinstance(error, CheckpointError):  # its text names that
        return str(error)
    if error.errno not in FULL:
        traceback.print_exception(error)  # to the log
    saved = list_checkpoints(run_dir)
    last = f"the last whole checkpoint is {saved[-1]}" if saved else "there is no checkpoint"
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}; {last}"


def main(run_dir: str, *rosters: str) -> None:
    """Run a learner rank for a supervisor: `python -m qurl_megatron.loop.train RUN_DIR ROSTER...`.

    The rosters are the files in which the supervisors of all nodes list their servers.
    """
    outlive_output(Path(run_dir))
    sys.exit(run_rank(Path(run_dir), [Path(roster) for roster in rosters]))


if __name__ == "__main__":
    main(*sys.argv[1:])
