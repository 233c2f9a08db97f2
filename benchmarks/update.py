"""What an update costs beside the model's own work: `python benchmarks/update.py`.

1. `acr` against `tis`: one learner updates on the same batch, one objective after the other.
2. The memory of scoring tokens over Qwen2.5-32B's vocabulary, forward and backward: from hidden
   states in chunks, as the learner does, against whole logits and torch's own cross entropy. Each
   in a process of its own; peak resident memory above what its inputs take.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

VOCABULARY = 152_064
HIDDEN = 256  # of 5120: it is not what the vocabulary's memory depends on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150, help="of both objectives")
    parser.add_argument("--tokens", type=int, default=8192, help="scored in one pass")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core")))
    objectives(arguments.rounds)
    memory(arguments.tokens)


def objectives(rounds: int) -> None:
    from qurl_megatron.algorithm.batch import TrainBatch
    from qurl_megatron.algorithm.objective import PolicyLoss, token_weights
    from qurl_megatron.config.schema import LearnerConfig, ObjectiveConfig, OptimizerConfig
    from qurl_megatron.learner.learner import Learner
    from recipes import quickstart

    generator = torch.Generator().manual_seed(0)
    shape = (128, 32)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[:, 0] = False
    proximal = -torch.rand(shape, generator=generator)
    batch = TrainBatch(
        tokens=torch.randint(3, 250, shape, generator=generator),
        loss_mask=mask,
        behaviour_logprobs=proximal + 0.7 * torch.randn(shape, generator=generator),
        rewards=torch.zeros(shape),
        advantages=torch.randn(shape, generator=generator),
        proximal_logprobs=proximal,
    )
    weights = token_weights(mask, "token_mean")
    names = ("tis", "acr")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as directory:
        quickstart.build_model(Path(directory), seed=0)
        settings = LearnerConfig(dtype="float32", micro_batch_size=128)
        # A rate of 0: every update meets the same weights.
        learner = Learner(Path(directory), settings, OptimizerConfig(learning_rate=0.0))
        for round_ in range(rounds + 1):
            for name in names if round_ % 2 else names[::-1]:
                start = time.perf_counter()
                learner.update(
                    batch, weights, PolicyLoss(ObjectiveConfig(objective=name)), temperature=1.0
                )
                if round_:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
        learner.close()
    for name, measured in seconds.items():
        print(
            f"update with {name}: median {median(measured):.3f} s "
            f"[{min(measured):.3f}, {max(measured):.3f}]"
        )
    ratios = [acr / tis for tis, acr in zip(*seconds.values(), strict=True)]
    print(
        f"acr / tis: {median(ratios):.4f}, median of {rounds} pairs; "
        f"of the medians {median(seconds['acr']) / median(seconds['tis']):.4f}, "
        f"of the least {min(seconds['acr']) / min(seconds['tis']):.4f}"
    )


def memory(tokens: int) -> None:
    peaks = {}
    for version_ in ("chunked", "plain"):
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_peak, args=(version_, tokens, sender))
        process.start()
        sender.close()  # so that the end of a process that fails is seen
        peaks[version_] = receiver.recv()
        process.join()
    print(
        f"log-probs of {tokens} tokens over {VOCABULARY} words, forward and backward, at most: "
        + ", ".join(f"{name} {peak / 2**20:,.0f} MiB" for name, peak in peaks.items())
        + f" ({peaks['plain'] / peaks['chunked']:.0f} times)"
    )


def _peak(version_: str, tokens: int, sender: multiprocessing.connection.Connection) -> None:  # type: ignore[name-defined]
    from qurl_megatron import device
    from qurl_megatron.learner.logprobs import logprobs_and_entropy

    device.initialize_distributed()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    targets = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    before = _most_resident_bytes()
    if version_ == "plain":
        logprobs = -torch.nn.functional.cross_entropy(
            hidden @ weight.t(), targets, reduction="none"
        )
    else:
        logprobs, _ = logprobs_and_entropy(
            hidden,
            weight,
            targets,
            temperature=1.0,
            first_row=0,
            group=torch.distributed.group.WORLD,
            chunk_elements=device.logit_chunk_elements(VOCABULARY),
        )
    logprobs.sum().backward()
    sender.send(_most_resident_bytes() - before)


def _most_resident_bytes() -> int:
    """Of this process so far; getrusage would begin with what its parent had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(peak)


if __name__ == "__main__":
    main()
