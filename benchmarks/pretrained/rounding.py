"""Does an update act? Supervised training by the learner, with each way of making BF16.

UAQ takes weights off BF16's grid, unless its scale is a power of two. Rates that are as much larger
as the scale tell what of it is the size of a step.
"""

import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qurl_megatron.algorithm.batch import TrainBatch
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, UaqConfig
from qurl_megatron.learner.learner import Learner
from qurl_megatron.model.tokenizer import load_tokenizer
from qurl_megatron.quantization import uaq

STEPS, ROWS, HELD_OUT = 20, 8, 32
MEASURED = (0, 1, 5, 10, 20)  # after these steps
ARMS: list[dict[str, Any]] = [
    {"dtype": dtype, "rounding": rounding, "learning_rate": rate}
    for rate in (1e-6, 1e-5)
    for dtype, rounding in (
        ("bfloat16", "nearest"),
        ("bfloat16", "unbiased"),
        ("float32", "unbiased"),
    )
]
ARMS += [
    {"dtype": dtype, "rounding": rounding, "learning_rate": rate, "scale": scale}
    for rate, scale in ((1e-6, 1.5), (1e-6, 2.0), (1.5e-6, 1.0), (2e-6, 1.0))
    for dtype, rounding in (
        ("bfloat16", "nearest"),
        ("bfloat16", "unbiased"),
        ("float32", "unbiased"),
    )
]


def measure(
    model: Path, dtype: Any, rounding: Any, learning_rate: float, scale: float = 1.0
) -> dict[str, Any]:
    """Train, and return held-out losses by step, what changed, and what is shown of it.

    `scale` is UAQ's.
    """
    gc.collect()  # the learner of the arm before has cycles, and no object count to be noticed by
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    config = LearnerConfig(dtype=dtype, threads_per_rank=threads)
    optimizer = OptimizerConfig(learning_rate, rounding=rounding)
    scaled = uaq.transform(UaqConfig(scale=scale), is_hybrid=False)
    learner = Learner(model, config, optimizer, transform=scaled)
    batches = batches_of_sums(model)
    held_out = next(batches)
    before = [weight.clone() for *_, weight in learner.shards()]
    losses: dict[int, float] = {}
    changed: dict[int, float] = {}
    start = time.monotonic()
    for step in range(STEPS + 1):
        if step:
            learner.update(learner.share(next(batches)), _likelihood, temperature=1.0)
        if step in MEASURED:
            losses[step] = _loss(learner, held_out)
            changed[step] = _changed(before, learner)
            print(dtype, rounding, learning_rate, scale, step, losses[step], flush=True)
    shown = learner.update_shown()
    learner.close()
    return {
        "held_out_loss": losses,
        "changed_fraction": changed[STEPS],
        "changed_fraction_by_step": changed,
        "update_shown_fraction": shown,
        "seconds": time.monotonic() - start,
    }


def batches_of_sums(model: Path) -> Any:
    """Yield the held-out batch, then batches to train on: sums and differences in words."""
    tokenizer = load_tokenizer(model)
    draw = random.Random(7)
    pairs = [(a, b) for a in range(11, 60) for b in range(2, 10)]
    draw.shuffle(pairs)
    start = 0
    while True:
        size = ROWS if start else HELD_OUT
        sequences, masks = [], []
        for a, b in (pairs[number % len(pairs)] for number in range(start, start + size)):
            text = f"What is {a} plus {b}?"
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
            asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            answer = tokenizer(f"{a + b}", add_special_tokens=False)["input_ids"]
            sequences.append([*asked, *answer, tokenizer.eos_token_id])
            masks.append([False] * len(asked) + [True] * (len(answer) + 1))
        start += size
        mask = torch.tensor([each for row in masks for each in row])
        yield TrainBatch(
            torch.tensor([len(row) for row in sequences]),
            torch.tensor([each for row in sequences for each in row], dtype=torch.int32),
            mask,
            loss_weights=mask / mask.sum(),
        )


def _likelihood(logprobs: Tensor, _: Tensor, __: Any, loss_weights: Tensor, *___: Any) -> Any:
    return -(loss_weights * logprobs).sum(), {}


def _changed(before: list[Tensor], learner: Learner) -> float:
    pairs = [(old, new) for old, (*_, new) in zip(before, learner.shards(), strict=True)]
    changed = sum(int((old != new).sum()) for old, new in pairs)
    return changed / sum(old.numel() for old in before)


def _loss(learner: Learner, batch: TrainBatch) -> float:
    share = learner.share(batch)
    learner.score(share, ["proximal_logprobs", "entropy"], temperature=1.0)
    logprobs = torch.cat(share.collect("proximal_logprobs"))
    return float(-logprobs[batch.loss_mask].mean())


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    header = ["rate", "UAQ", "learner", "rounding", *(f"after {step}" for step in MEASURED)]
    lines = [[*header, "changed", "shown"], ["---"] * (len(header) + 2)]
    for row in rows:
        arm, losses = row["arm"], row["held_out_loss"].values()
        rounding = arm["rounding"] if arm["dtype"] == "bfloat16" else ""
        scale = f"{arm['scale']:g}" if arm.get("scale", 1) != 1 else ""
        cells = [f"{arm['learning_rate']:g}", scale, arm["dtype"], rounding]
        cells += [f"{loss:.3f}" for loss in losses]
        fractions = row["changed_fraction"], row["update_shown_fraction"]
        lines.append([*cells, *(f"{fraction:.1%}" for fraction in fractions)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
