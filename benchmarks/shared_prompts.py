"""How much faster is a learner whose completions share their prompts?

    python -m benchmarks.shared_prompts MODEL --prompts 8 --completions 8 --lengths 40 25

MODEL is a Hugging Face directory; without one it is SmolLM2-135M-Instruct from its package. Random
tokens are scored, and trained on, in float32: completions that share their prompts, in turn with
others of the same lengths, whose prompts all begin with another token. Seconds of the processor on
one rank of one thread are printed, as median [least, most], and the tokens that the layers compute.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig


def make_batch(arguments: argparse.Namespace, vocabulary: int, *, shares: bool) -> TrainBatch:
    """Return completions of half to one and a half times their mean length."""
    generator = torch.Generator().manual_seed(0)
    prompt, mean = arguments.lengths
    count = arguments.prompts * arguments.completions
    prompts = torch.randint(vocabulary, (arguments.prompts, prompt), generator=generator)
    prompts = prompts.repeat_interleave(arguments.completions, dim=0)
    if not shares:
        prompts[:, 0] = torch.randperm(vocabulary, generator=generator)[:count]
    lengths = torch.randint(mean // 2, mean + mean // 2 + 1, (count,), generator=generator)
    completions = [torch.randint(vocabulary, (n,), generator=generator) for n in lengths.tolist()]
    rows = [torch.cat(row) for row in zip(prompts, completions, strict=True)]
    masks = [torch.arange(len(row)) >= prompt for row in rows]
    batch = TrainBatch(lengths + prompt, torch.cat(rows).int(), torch.cat(masks))
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def likelihood(
    logprobs: Tensor, entropy: Tensor, rows: Any, weights: Tensor, *_: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss whose gradient reaches every token."""
    return -(weights * logprobs).sum(), {}


def run(arguments: argparse.Namespace) -> None:
    """Print the table, on one learner rank."""
    from qurl_megatron.learner.learner import Learner

    learner = Learner(arguments.model, LearnerConfig(dtype="float32"), OptimizerConfig())
    batches = {
        name: make_batch(arguments, learner.architecture.vocab_size, shares=name == "shared")
        for name in ("apart", "shared")
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    tokens = {}
    for warms_up in [True] + [False] * arguments.rounds:
        for name, batch in batches.items():
            share = learner.share(batch)
            tokens[name] = sum(micro.inputs.shape[1] for micro in share.micro_batches)
            start = time.process_time()
            learner.score(share, ["proximal_logprobs", "entropy"], temperature=1.0)
            scored = time.process_time()
            learner.update(share, likelihood, temperature=1.0)
            if not warms_up:
                seconds[f"score {name}"].append(scored - start)
                seconds[f"update {name}"].append(time.process_time() - scored)
    for what in ("score", "update"):
        apart, shared = (seconds[f"{what} {name}"] for name in batches)
        ratio = [a / s for a, s in zip(apart, shared, strict=True)]
        print(f"{what:6}  {machine.spread(apart)} s, shared {machine.spread(shared)} s", end="")
        print(f": {machine.spread(ratio)} times as fast", flush=True)
    print(f"tokens  {tokens['apart']}, shared {tokens['shared']}")
    learner.close()


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=(40, 25), metavar=("PROMPT", "MEAN")
    )
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    machine.print_machine("torch", "megatron-core")
    with machine.real_model(arguments.model) as arguments.model:
        machine.run_ranks(run, 1, arguments)


if __name__ == "__main__":
    main()
