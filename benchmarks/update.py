"""Measure what an update costs beyond the model's own work: `python benchmarks/update.py`.

1. Time of `acr` (adaptive clipping range) against `tis` (truncated importance sampling). One
   learner updates on the same batch with both objectives in turn. A third way has a pass of its own
   for the proximal log-probs before each update, as a step of several minibatches needs it: the
   ratio is what a step of one minibatch saves.
2. Memory for the log-probs of tokens over Qwen2.5-32B's vocabulary, forward and backward. The
   learner's way, chunk by chunk from hidden states, is compared with full logits and PyTorch's
   cross entropy. Each runs in its own process. The figure is peak resident memory beyond the
   inputs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import tempfile
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

VOCABULARY = 152_064
HIDDEN = 256  # Qwen2.5-32B has 5120; the memory of the logits does not depend on it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=150, help="number of updates with each objective"
    )
    parser.add_argument(
        "--tokens", type=int, default=8192, help="number of tokens scored in one pass"
    )
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core")))
    compare_update_times(arguments.rounds)
    compare_logprob_memory(arguments.tokens)


def compare_update_times(rounds: int) -> None:
    from qurl_megatron.algorithm.batch import TrainBatch
    from qurl_megatron.algorithm.objective import PolicyLoss, token_weights
    from qurl_megatron.config.schema import (
        LearnerConfig,
        Objective,
        ObjectiveConfig,
        OptimizerConfig,
    )
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.recipes import quickstart

    generator = torch.Generator().manual_seed(0)
    sequences, length = 128, 32
    shape = (sequences, length)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[:, 0] = False
    lengths = torch.full((sequences,), length)
    proximal = -5.5 - torch.rand(shape, generator=generator)
    batch = TrainBatch(
        lengths=lengths,
        tokens=torch.randint(3, 250, shape, generator=generator, dtype=torch.int32).flatten(),
        loss_mask=mask.flatten(),
        behaviour_logprobs=(proximal + 0.7 * torch.randn(shape, generator=generator)).flatten(),
        advantages=torch.randn(shape, generator=generator).flatten(),
        loss_weights=token_weights(mask.flatten(), lengths, "token_mean"),
    )
    ways: dict[str, Objective] = {"tis": "tis", "acr": "acr", "proximal pass, then acr": "acr"}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as directory:
        quickstart.build_model(Path(directory), seed=0)
        settings = LearnerConfig(dtype="float32", micro_batch_size=sequences)
        # At a learning rate of 0, every update starts from the same weights.
        learner = Learner(Path(directory), settings, OptimizerConfig(learning_rate=0.0))
        for round_ in range(rounds + 1):
            for name in list(ways) if round_ % 2 else list(ways)[::-1]:
                loss = PolicyLoss(ObjectiveConfig(objective=ways[name]))
                share = learner.share(batch)
                start = time.perf_counter()
                if name not in ("tis", "acr"):
                    learner.score(share, ["proximal_logprobs", "entropy"], temperature=1.0)
                learner.update(share, loss, temperature=1.0)
                if round_:  # round 0 is a warm-up
                    seconds[name].append(time.perf_counter() - start)
        learner.close()
    for name, measured in seconds.items():
        print(
            f"update with {name}: median {median(measured):.3f} s "
            f"[{min(measured):.3f}, {max(measured):.3f}]"
        )
    for above, below in (("acr", "tis"), ("proximal pass, then acr", "acr")):
        ratios = [x / y for x, y in zip(seconds[above], seconds[below], strict=True)]
        print(
            f"{above} / {below}: median ratio of {rounds} rounds {median(ratios):.4f}, "
            f"ratio of medians {median(seconds[above]) / median(seconds[below]):.4f}, "
            f"ratio of minima {min(seconds[above]) / min(seconds[below]):.4f}"
        )


def compare_logprob_memory(tokens: int) -> None:
    peaks = {}
    for method in ("chunked", "full"):
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send_peak, args=(method, tokens, sender))
        process.start()
        sender.close()  # otherwise recv() would block forever if the process fails
        peaks[method] = receiver.recv()
        process.join()
    print(
        f"peak memory for log-probs of {tokens} tokens over {VOCABULARY} vocabulary entries, "
        "forward and backward: "
        + ", ".join(f"{name} {peak / 2**20:,.0f} MiB" for name, peak in peaks.items())
        + f" ({peaks['full'] / peaks['chunked']:.0f} times)"
    )


def _send_peak(method: str, tokens: int, sender: Connection) -> None:
    """Send the peak resident bytes of scoring `tokens` tokens, beyond the inputs."""
    from qurl_megatron import device
    from qurl_megatron.learner.logprobs import logprobs_and_entropy

    device.initialize_distributed()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    group = torch.distributed.group.WORLD
    assert group is not None
    before = _peak_resident_bytes()
    if method == "full":
        logprobs = -torch.nn.functional.cross_entropy(
            hidden @ weight.t(), targets, reduction="none"
        )
    else:
        logprobs, _ = logprobs_and_entropy(
            hidden,
            weight,
            targets,
            torch.ones(tokens, dtype=torch.bool),
            temperature=1.0,
            first_row=0,
            group=group,
            chunk_tokens=device.logit_chunk_elements(VOCABULARY) // VOCABULARY,
        )
    logprobs.sum().backward()
    sender.send(_peak_resident_bytes() - before)


def _peak_resident_bytes() -> int:
    """Return this process's peak resident memory. getrusage would include the parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(peak)


if __name__ == "__main__":
    main()
